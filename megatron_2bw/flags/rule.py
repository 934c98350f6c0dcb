"""A rule about a flag: when a command line breaks it, and the line that says so.

Invariant: a rule reads the arguments, changes nothing, and answers one line that names the flag and says what to do,
or None. It needs no torch: the planner uses the rules of `sizes.py` too.
"""

from __future__ import annotations

import enum
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_2bw.schedules import SCHEDULES

Args = Any  # an argparse.Namespace of Megatron's; for the rules of sizes.py the planner's too
Condition = Callable[[Args], object]

OUT = "leave the flag out"


def value(args: Args, flag: str) -> Any:
    """What the arguments hold for `flag`; None if Megatron has removed it while it validated them."""
    return getattr(args, flag.removeprefix("--").replace("-", "_"), None)


def task(args: Args) -> str | None:
    """ "gpt" or "bert"; None in a source checkout, whose entry scripts are Megatron's own."""
    return value(args, "--task")


def asks(args: Args, flag: str) -> bool:
    """Whether the arguments have `flag`: "--lr" with a true value, "--optimizer adam sgd" with one of these."""
    name, *choices = flag.split()
    given = value(args, name)
    return getattr(given, "name", given) in choices if choices else bool(given)  # Megatron makes enums of some choices


_BUILT = {"apex": "amp_C"}  # Apex's CUDA extensions: the registry has another package named apex


def installed(package: str) -> bool:
    return importlib.util.find_spec(_BUILT.get(package, package)) is not None


@dataclass(frozen=True)
class Rule:
    """A flag, or a value of it, that a run does not accept.

    flag   its name, and the values that are meant if not all of them are: "--rerun-mode validate_results report_stats"
    why    the reason, and what to do instead
    scope  "ours": with this project's schedules; "no flush": with those whose microbatches cross iterations; a
           schedule's name; "script", "bert": with every schedule, since the entry scripts, or that of BERT, lack it;
           "line": always, and `why` is the rest of the line, with {given} for the flag's value and {a.lr} for --lr's
    when   whether the arguments break the rule; the flag must then have one of the values, if it names any
           (default: the flag has a true value, or one of the values)
    """

    flag: str
    why: str
    scope: str = "ours"
    when: Condition | None = None

    def holds(self, args: Args) -> bool:
        """Whether the arguments break the rule."""
        if self.when and not self.when(args):  # first, for the planner asks this of many plans
            return False
        if (" " in self.flag or not self.when) and not asks(args, self.flag):
            return False
        schedule = SCHEDULES.get(args.pipeline_schedule)  # None: Megatron's own
        scopes = ["line", "script" if task(args) else "", task(args)]
        if schedule is not None:
            scopes += ["ours", schedule.name, "" if schedule.flushes else "no flush"]
        return self.scope in scopes

    def message(self, args: Args) -> str | None:
        """The line for arguments that break the rule, or None."""
        if not self.holds(args):
            return None
        name, *choices = self.flag.split()
        given = value(args, name)
        given = given.name if isinstance(given, enum.Enum) else given
        if self.scope == "line":
            return f"{name}{f' {given}' * bool(choices)} {self.why.format(a=args, given=given)}"
        shown = f" {given}" if given and isinstance(given, (str, int, float)) and given is not True else ""
        words = {"script": "is not supported", "bert": "does not work with BERT"}.get(self.scope)
        return (
            f"{name}{shown} {words or f'does not work with --pipeline-schedule {args.pipeline_schedule}'}: {self.why}"
        )


def rules(scope: str, *rows: tuple) -> tuple[Rule, ...]:
    """A rule for each flag of each row: (flags with their values, why) or (flags, why, when)."""
    return tuple(Rule(flag, why, scope, *when) for flags, why, *when in rows for flag in re.split(r"\s+(?=--)", flags))


def line(text: str, when: Condition) -> Rule:
    """A rule by the line that it answers."""
    flag, why = text.split(" ", 1)
    return Rule(flag, why, "line", when)
