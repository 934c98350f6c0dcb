"""A flag that a run refuses, or does without: in which scope, when, and the line that
says so.

Invariant: a rule reads the arguments and changes nothing. It needs no torch.
"""

from __future__ import annotations

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
    given = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
    # Megatron makes enumerations of some choices
    return given.name if isinstance(given, enum.Enum) else given


def task(args: Args) -> str | None:
    """ "gpt" or "bert"; None in an entry script of the user's own."""
    return value(args, "--task")


def asks(args: Args, flag: str) -> bool:
    """Whether the arguments have `flag`: "--lr" with a true value, "--optimizer adam
    sgd" with one of these."""
    name, *choices = flag.split()
    given = value(args, name)
    return given in choices if choices else bool(given)


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
    when: Callable[[Args], object] | None = None

    def holds(self, args: Args) -> bool:
        """Whether the arguments break the rule."""
        schedule = SCHEDULES.get(args.pipeline_schedule)  # None: Megatron's own
        scopes = ["script" if task(args) else "", task(args)]
        if schedule is not None:
            scopes += ["ours", schedule.name, "" if schedule.flushes else "no flush"]
        return self.scope in scopes and bool(
            self.when(args) if self.when else asks(args, self.flag)
        )

    def line(self, args: Args) -> str | None:
        """The line for arguments that break the rule, or None."""
        if not self.holds(args):
            return None
        name = self.flag.split()[0]
        given = value(args, name)
        shown = (
            f" {given}"
            if given and isinstance(given, (str, int, float)) and given is not True
            else ""
        )
        words = {"script": "is not supported", "bert": "does not work with BERT"}
        schedule = f"does not work with --pipeline-schedule {args.pipeline_schedule}"
        return f"{name}{shown} {words.get(self.scope, schedule)}: {self.why}"
