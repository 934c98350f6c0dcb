"""A flag that a run refuses, or does without: in which scope, when, and the line that
says so.

Invariant: a rule reads the arguments and changes nothing. It needs no torch.
"""

import enum
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_2bw.schedules import SCHEDULES

Args = Any  # an argparse.Namespace of Megatron's

# Apex's CUDA extensions: the registry has another package named apex
_BUILT = {"apex": "amp_C"}


def installed(package: str) -> bool:
    return importlib.util.find_spec(_BUILT.get(package, package)) is not None


def value(args: Args, flag: str) -> Any:
    """What the arguments hold for `flag`; None if Megatron has removed it while it
    validated them."""
    setting = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
    # Megatron makes enumerations of some choices
    return setting.name if isinstance(setting, enum.Enum) else setting


def task(args: Args) -> str | None:
    """ "gpt" or "bert"; None in an entry script of the user's own."""
    return value(args, "--task")


def asks(args: Args, flag: str) -> bool:
    """Whether the arguments have `flag`: "--lr" with a true value, "--optimizer adam
    sgd" with one of these."""
    name, *choices = flag.split()
    setting = value(args, name)
    return setting in choices if choices else bool(setting)


def have(settings: dict[str, Any], args: Args) -> bool:
    """Whether the arguments have these settings, by name: a true value (True) or none
    (False), a value of a list, or another one ({"not": list})."""
    for name, wanted in settings.items():
        setting = getattr(args, name, None)
        if isinstance(wanted, bool):
            holds = bool(setting) == wanted
        elif isinstance(wanted, dict):
            holds = setting not in wanted["not"]
        else:
            holds = setting in wanted
        if not holds:
            return False
    return True


@dataclass(frozen=True)
class Rule:
    """A flag, or a value of it, that a run does not accept.

    flag   its name, and the values that are meant if not all of them are: "--rerun-mode
           validate_results report_stats"
    why    the reason, and what to do instead
    scope  "ours": with this project's schedules; "no flush": with those whose
           microbatches cross iterations; a schedule's name; "script", "bert": with
           every schedule, since the entry scripts, or that of BERT, lack it
    when   whether the arguments ask for it (default: the flag has a true value, or one
           of the values)
    """

    flag: str
    why: str
    scope: str = "ours"
    when: Callable | None = None

    def holds(self, args: Args) -> bool:
        """Whether the arguments break the rule."""
        schedule = SCHEDULES.get(args.pipeline_schedule)  # None: Megatron's own
        scopes = ["script", task(args)] if task(args) else []
        if schedule is not None:
            scopes += ["ours", schedule.name]
            if not schedule.flushes:
                scopes.append("no flush")
        if self.scope not in scopes:
            return False
        return bool(self.when(args) if self.when else asks(args, self.flag))

    def line(self, args: Args) -> str | None:
        """The line for arguments that break the rule, or None."""
        if not self.holds(args):
            return None
        name = self.flag.split()[0]
        setting = value(args, name)
        if setting and setting is not True and isinstance(setting, (str, int, float)):
            name += f" {setting}"
        if self.scope == "script":
            return f"{name} is not supported: {self.why}"
        other = f"--pipeline-schedule {args.pipeline_schedule}"
        if self.scope == "bert":
            other = "BERT"
        return f"{name} does not work with {other}: {self.why}"
