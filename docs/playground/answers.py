"""What the page docs/playground shows, as JSON: timelines, throughput, memory, a check
of a list edited by hand.

Invariant: the lists are those that the runtime executes; times, limits and bytes come
from the simulator, the validator and the planner. The page runs this module in Pyodide;
there is no other model of a schedule in it. Pure Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_2bw.base.errors import UserError
from megatron_2bw.schedules import (
    Schedule,
    ScheduleError,
    Shape,
    check_actions,
    parse,
    validate,
)
from megatron_2bw.tools.planner.cost.memory import BYTES, Memory
from megatron_2bw.tools.planner.descriptions.model import PRESETS, preset
from megatron_2bw.tools.planner.descriptions.plan import RECOMPUTE, Plan
from megatron_2bw.tools.planner.tell import jobs, training
from megatron_2bw.tools.timelines.simulator import (
    Times,
    iteration_time,
    long_iteration_time,
    scaled,
    simulate,
    simulate_lists,
)
from megatron_2bw.tools.timelines.trace import of_events
from megatron_2bw.tools.timelines.waits import drawn

# The schedules of the page, as fields of a Plan.
SCHEDULES: dict[str, Callable[[Parameters], dict[str, Any]]] = {
    "2bw": lambda given: {},
    "2bw-extra-warmup": lambda given: {"extra_warmup": given.extra_warmup},
    "2bw-one-slot": lambda given: {"gradient_slots": 1},
    "2bw-sync-start": lambda given: {},  # but for its start
    "pipedream-flush": lambda given: {"schedule": "pipedream-flush"},
    # A round of more microbatches is the whole batch, and the runtime refuses it.
    "gpipe": lambda given: {
        "schedule": "gpipe",
        "gpipe_round": min(given.gpipe_round, given.microbatches),
    },
    "no-pipelining": lambda given: {"schedule": "no-pipelining"},
    "pipedream": lambda given: {"schedule": "pipedream"},
    "megatron-interleaved": lambda given: {
        "schedule": "megatron",
        "virtual": given.chunks,
    },
}
FORWARDS = 50_000  # of one timeline
MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of the curve
# of the curve: message by forward and backward
SHARES = (0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1)
# The least and the greatest value of each number. Times are real numbers, the others
# whole ones.
TIMES = dict.fromkeys(
    ("forward", "backward", "transfer", "reduce", "step"), (0, 1e6)
) | {"occupied": (0, 1)}
LIMITS = {
    "stages": (1, 64),
    "microbatches": (1, 512),
    "iterations": (1, 16),
    "extra_warmup": (0, 64),
}
LIMITS |= {
    "sync_iterations": (0, 16),
    "gpipe_round": (1, 512),
    "chunks": (2, 16),
    "microbatch": (1, 1024),
} | TIMES
# one a stage but for so many
PLACES = {"forward": 0, "backward": 0, "transfer": 1, "extra_warmup": 1}
CHOICES = {
    "schedules": SCHEDULES,
    "model": PRESETS,
    "precision": BYTES,
    "recompute": RECOMPUTE,
}


@dataclass(frozen=True)
class Parameters:
    """What a person can choose. Times are in one unit."""

    schedules: list[str] = field(default_factory=lambda: ["2bw", "pipedream-flush"])
    stages: int = 4
    microbatches: int = 8
    iterations: int = 3
    forward: Any = 1.0  # a number, or one per stage
    backward: Any = 2.0  # the same
    transfer: Any = 0.0  # of a message: a number, or one per boundary between stages
    # the share of a message's time in which its link carries no other
    occupied: float = 1.0
    reduce: float = 0.0
    step: float = 0.0
    extra_warmup: Any = 1  # a number, or one per boundary
    sync_iterations: int = 2
    gpipe_round: int = 4
    chunks: int = 2
    model: str = "gpt-2.2b"  # a name of the planner; the next three are of its memory
    microbatch: int = 1
    precision: str = "bf16"
    recompute: str = "none"

    @classmethod
    def read(cls, given: dict[str, Any]) -> Parameters:
        """The parameters of a JSON object. UserError names the one that is out of its
        range."""
        found = cls(**given)
        for name, choices in CHOICES.items():
            if wrong := {
                value for value in _every(getattr(found, name)) if value not in choices
            }:
                raise UserError(
                    f"{name}: {min(wrong)} is not one of {', '.join(choices)}"
                )
        for name, (least, most) in LIMITS.items():
            values, count = (
                _every(getattr(found, name)),
                found.stages - PLACES[name] if name in PLACES else 1,
            )
            kinds = (int, float) if name in TIMES else (int,)
            if len(values) not in (1, count) or not all(
                type(x) in kinds and least <= x <= most for x in values
            ):
                several = f", or {count}" if count > 1 else ""
                raise UserError(
                    f"{name}: give one {kinds[-1].__name__} from {least} to {most:g}{several}"
                )
        if not any(_every(found.forward)) or not any(_every(found.backward)):
            raise UserError("forward and backward must not be 0 on all stages")
        return replace(found, extra_warmup=tuple(_every(found.extra_warmup)))

    def plan(self, name: str) -> Plan:
        """The planner's plan of a schedule of the page, on one GPU a stage."""
        chosen = SCHEDULES[name](self)
        return Plan(
            1,
            self.stages,
            1,
            self.microbatch,
            self.microbatches,
            self.recompute,
            **chosen,
        )

    def schedule(self, name: str, steady: bool = False) -> Schedule:
        """A schedule of the page, or as it is after its start. UserError or
        ScheduleError if these sizes exclude it."""
        schedule, m = self.plan(name).pipeline, self.microbatches
        if self.stages * m * self.iterations * schedule.chunks > FORWARDS:
            raise UserError(
                f"more than {FORWARDS} forwards: give fewer microbatches, stages or iterations"
            )
        if name == "megatron-interleaved" and m % self.stages:
            raise UserError(
                f"Megatron's interleaved schedule needs a multiple of {self.stages} microbatches"
            )
        if m < schedule.min_microbatches(self.stages):
            validate(schedule, self.shape)  # raises
        late = name != "2bw-sync-start" or steady
        return (
            schedule
            if late
            else replace(schedule, sync_iterations=self.sync_iterations)
        )

    @property
    def shape(self) -> Shape:
        return Shape(self.stages, self.microbatches, 0, self.iterations)

    @property
    def times(self) -> Times:
        # The link from the last stage to the first, which only interleaved stages use,
        # is as slow as the slowest.
        transfer = (
            [*self.transfer, max(self.transfer, default=0)]
            if isinstance(self.transfer, list)
            else self.transfer
        )
        occupied = (
            [self.occupied * t for t in transfer]
            if isinstance(transfer, list)
            else self.occupied * transfer
        )
        return Times(
            self.forward,
            self.backward,
            transfer=transfer,
            occupied=occupied,
            reduce=self.reduce,
            step=self.step,
        )


def _every(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request: its parameters, and "ask", one of EACH or of ASKED with
    its own options.

    {"error": line} if it cannot be answered; of EACH also for a single schedule.
    """
    given = dict(request)
    asked = given.pop("ask", "timelines")
    more = {name: given.pop(name) for name in ("over", "at", "lists") if name in given}
    if asked in EACH:
        return _or_error(lambda: _each(Parameters.read(given), asked))
    return _or_error(lambda: ASKED[asked](Parameters.read(given), **more))


def _or_error(work: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    try:
        return work(*args)
    except (UserError, ValueError) as error:
        return {"error": str(error).split("\n")[0]}


def _each(given: Parameters, asked: str) -> dict[str, Any]:
    return {
        asked: {name: _or_error(EACH[asked], given, name) for name in given.schedules}
    }


def _timeline(given: Parameters, name: str) -> dict[str, Any]:
    schedule = given.schedule(name)
    return drawn(
        schedule,
        simulate(schedule, given.shape, given.times),
        given.stages,
        given.times,
    )


def _figures(given: Parameters, name: str) -> dict[str, Any]:
    """Of the steady state, with bytes and command line; in_flight counts the
    microbatches of all chunks of a stage."""
    schedule, d, m, times, shape = (
        given.schedule(name),
        given.stages,
        given.microbatches,
        given.times,
        given.shape,
    )
    seconds = iteration_time(given.schedule(name, steady=True), d, m, times)
    rounds = (
        f", in rounds of {given.gpipe_round}"
        if name == "gpipe" and given.gpipe_round < m
        else ""
    )
    busy = [
        m * (f + b) / seconds
        for f, b in zip(times.of("forward", d), times.of("backward", d))
    ]
    return {
        "summary": schedule.summary + rounds,
        "seconds": seconds,
        "throughput": m / seconds,
        "busy": busy,
        "bubble": max(1 - sum(busy) / d, 0.0),
        "versions": [schedule.max_versions(shape, stage) for stage in range(d)],
        "in_flight": [
            schedule.max_in_flight(shape, stage) / schedule.chunks for stage in range(d)
        ],
    } | _memory(given, name)


def _memory(given: Parameters, name: str) -> dict[str, Any]:
    """The planner's bytes of each stage, and Megatron's command line with random data;
    or why there are none."""
    plan, model = given.plan(name), preset(given.model)
    # each stage steps alone, so tied embeddings would drift apart
    if not plan.pipeline.global_step:
        model = replace(model, tied=False)
    if model.layers % (plan.depth * plan.virtual):
        parts = f"{plan.depth} stages" + (
            f" of {plan.virtual} chunks" if plan.virtual > 1 else ""
        )
        return {
            "bytes": None,
            "command": None,
            "reason": f"{model.layers} layers do not divide into {parts}",
        }
    found = {
        "bytes": [
            asdict(stage)
            for stage in Memory(model, given.precision, flash=True).stages(plan)
        ]
    }
    # the entry script refuses it
    if given.precision == "fp16" and not plan.pipeline.global_step:
        return found | {
            "command": None,
            "reason": "each stage would scale the loss by itself: choose bf16 or fp32",
        }
    words = [
        "megatron-2bw",
        "train",
        model.kind,
        *model.flags(),
        *plan.flags(given.precision),
    ]
    if name == "2bw-sync-start":
        words += ["--two-bw-sync-iterations", str(given.sync_iterations)]
    words += [*training.flags(), *jobs.mock_data(model)]
    return found | {"command": " ".join(words)}


def _rate(given: Parameters, name: str) -> dict[str, float]:
    m, schedule = given.microbatches, given.schedule(name, steady=True)
    return {"rate": m / long_iteration_time(schedule, given.stages, m, given.times)}


def curve(
    given: Parameters, over: str = "microbatches", at: int | None = None
) -> dict[str, Any]:
    """Each schedule's throughput in the steady state over the microbatches, or over the
    time of a message.

    Microbatches per unit of time at all x, or at one of them; None where the schedule
    cannot run.
    """
    if over == "microbatches":
        points = {m: replace(given, microbatches=m) for m in MICROBATCHES}
    else:
        whole = max(
            f + b
            for f, b in zip(
                *(
                    given.times.of(name, given.stages)
                    for name in ("forward", "backward")
                )
            )
        )
        points = {
            share * whole: replace(given, transfer=share * whole) for share in SHARES
        }
    chosen = [*points.values()][slice(None) if at is None else slice(at, at + 1)]
    rates = {
        name: [_or_error(_rate, point, name).get("rate") for point in chosen]
        for name in given.schedules
    }
    return {"over": over, "x": list(points), "curves": rates}


def check(given: Parameters, lists: list[str]) -> dict[str, Any]:
    """The validator's answer to lists of actions, one text per stage, under the first
    schedule's rules.

    {"timeline": ...} of lists that pass; else {"reason", "grid"}, and {"stage", "step"}
    of the fault.
    """
    schedule = given.schedule(given.schedules[0])
    if schedule.chunks > 1:
        raise UserError("the validator does not cover schedules with model chunks")
    if len(lists) != given.stages or not all(map(str.strip, lists)):
        raise UserError(f"lists: give {given.stages}, one per stage")
    actions = [parse(text) for text in lists]
    try:
        check_actions(actions, schedule, given.shape)
    except ScheduleError as error:
        line, _, grid = str(error).partition("\n")
        where = re.match(r"stage (\d+), step (\d+): ", line)
        return {
            "stage": int(where[1]),
            "step": int(where[2]),
            "reason": line[where.end() :],
            "grid": grid,
        }
    return {
        "timeline": drawn(
            schedule,
            simulate_lists(schedule, actions, given.times),
            given.stages,
            given.times,
        )
    }


def trace(given: Parameters) -> dict[str, Any]:
    """The first schedule's timeline for Perfetto; the unit of the times counts as a
    millisecond."""
    events = simulate(given.schedule(given.schedules[0]), given.shape, given.times)
    return of_events(scaled(events, 1e-3), given.stages, given.schedules[0])


EACH: dict[str, Callable[[Parameters, str], dict[str, Any]]] = {
    "timelines": _timeline,
    "figures": _figures,
}
ASKED: dict[str, Callable[..., dict[str, Any]]] = {
    work.__name__: work for work in (curve, check, trace)
}
