"""What the page docs/playground shows, as JSON: timelines, throughput, memory, a check
of a list edited by hand.

Invariant: the lists are those that the runtime executes; times, limits and bytes come
from the simulator, the validator and the planner. The page runs this module in Pyodide;
there is no other model of a schedule in it. Pure Python.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_2bw.base.errors import UserError
from megatron_2bw.engine.trace_file import names_of, spans_of
from megatron_2bw.schedules import (
    Schedule,
    ScheduleError,
    Shape,
    check_actions,
    parse_actions,
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
from megatron_2bw.tools.timelines.waits import drawn

# The schedules of the page, in its order.
SCHEDULES = (
    "2bw",
    "2bw-extra-warmup",
    "2bw-one-slot",
    "2bw-sync-start",
    "pipedream-flush",
    "gpipe",
    "no-pipelining",
    "pipedream",
    "megatron-interleaved",
)
FORWARDS = 50_000  # of one timeline
MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of the curve
# of the curve: message by forward and backward
SHARES = (0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1)
# The least and the greatest value of each number. Times are real numbers, the others
# whole ones.
TIMES = {
    "forward": (0, 1e6),
    "backward": (0, 1e6),
    "transfer": (0, 1e6),
    "reduce": (0, 1e6),
    "step": (0, 1e6),
    "occupied": (0, 1),
}
LIMITS = {
    "stages": (1, 64),
    "microbatches": (1, 512),
    "iterations": (1, 16),
    "extra_warmup": (0, 64),
    "sync_iterations": (0, 16),
    "gpipe_round": (1, 512),
    "chunks": (2, 16),
    "microbatch": (1, 1024),
    **TIMES,
}
# one a stage but for so many
PLACES = {"forward": 0, "backward": 0, "transfer": 1, "extra_warmup": 1}
CHOICES = {
    "schedules": SCHEDULES,
    "model": PRESETS,
    "precision": BYTES,
    "recompute": RECOMPUTE,
}
Answer = dict[str, Any]


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
    def read(cls, request: Answer) -> Parameters:
        """The parameters of a JSON object. UserError names the one that is out of its
        range."""
        given = cls(**request)
        for name, choices in CHOICES.items():
            wrong = set(_list(getattr(given, name))) - set(choices)
            if wrong:
                raise UserError(
                    f"{name}: {min(wrong)} is not one of {', '.join(choices)}"
                )
        for name in LIMITS:
            given._check_number(name)
        if not any(_list(given.forward)) or not any(_list(given.backward)):
            raise UserError("forward and backward must not be 0 on all stages")
        return replace(given, extra_warmup=tuple(_list(given.extra_warmup)))

    def _check_number(self, name: str) -> None:
        least, most = LIMITS[name]
        kinds = (int, float) if name in TIMES else (int,)
        count = self.stages - PLACES[name] if name in PLACES else 1
        values = _list(getattr(self, name))
        right = len(values) in (1, count)
        for value in values:
            right = right and type(value) in kinds and least <= value <= most
        if not right:
            several = f", or {count}" if count > 1 else ""
            raise UserError(
                f"{name}: give one {kinds[-1].__name__} from {least} to {most:g}{several}"
            )

    def plan(self, name: str) -> Plan:
        """The planner's plan of a schedule of the page, on one GPU a stage."""
        plan = Plan(
            tensor=1,
            depth=self.stages,
            width=1,
            microbatch=self.microbatch,
            microbatches=self.microbatches,
            recompute=self.recompute,
        )
        if name == "megatron-interleaved":
            return replace(plan, schedule="megatron", virtual=self.chunks)
        if name == "2bw-extra-warmup":
            return replace(plan, extra_warmup=self.extra_warmup)
        if name == "2bw-one-slot":
            return replace(plan, memory="one-slot")
        if name == "2bw-sync-start":  # 2bw but for its start
            return plan
        if name == "gpipe":
            # A round of more microbatches is the whole batch, and the runtime refuses
            # it.
            size = min(self.gpipe_round, self.microbatches)
            return replace(plan, schedule=name, gpipe_round=size)
        return replace(plan, schedule=name)

    def schedule(self, name: str, steady: bool = False) -> Schedule:
        """A schedule of the page, or as it is after its start. UserError or
        ScheduleError if these sizes exclude it."""
        schedule = self.plan(name).pipeline
        m = self.microbatches
        if self.stages * m * self.iterations * schedule.chunks > FORWARDS:
            raise UserError(
                f"more than {FORWARDS} forwards: give fewer microbatches, stages or iterations"
            )
        if name == "megatron-interleaved" and m % self.stages:
            raise UserError(
                f"Megatron's interleaved schedule needs a multiple of {self.stages} microbatches"
            )
        if name == "2bw-sync-start" and not steady:
            return replace(schedule, sync_iterations=self.sync_iterations)
        return schedule

    @property
    def shape(self) -> Shape:
        return Shape(self.stages, self.microbatches, 0, self.iterations)

    @property
    def times(self) -> Times:
        transfer = self.transfer
        occupied = self.occupied
        if isinstance(transfer, list):
            # The link from the last stage to the first, which only interleaved stages
            # use, is as slow as the slowest.
            transfer = [*transfer, max(transfer, default=0)]
            occupied = [occupied * seconds for seconds in transfer]
        else:
            occupied *= transfer
        return Times(
            self.forward,
            self.backward,
            transfer=transfer,
            occupied=occupied,
            reduce=self.reduce,
            step=self.step,
        )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def answer(request: Answer) -> Answer:
    """The answer to a request: its parameters, and "ask", one of EACH or of ASKED with
    its own options.

    {"error": line} if it cannot be answered; of EACH also for a single schedule.
    """
    fields = dict(request)
    asked = fields.pop("ask", "timelines")
    options = {}
    for name in ("over", "at", "lists"):
        if name in fields:
            options[name] = fields.pop(name)
    try:
        given = Parameters.read(fields)
    except (UserError, ValueError) as error:
        return _error(error)
    if asked not in EACH:
        return _or_error(ASKED[asked], given, **options)
    each = {name: _or_error(EACH[asked], given, name) for name in given.schedules}
    return {asked: each}


def _or_error(work: Callable[..., Answer], *args: Any, **options: Any) -> Answer:
    try:
        return work(*args, **options)
    except (UserError, ValueError) as error:
        return _error(error)


def _error(error: Exception) -> Answer:
    return {"error": str(error).split("\n")[0]}


def _timeline(given: Parameters, name: str) -> Answer:
    schedule = given.schedule(name)
    events = simulate(schedule, given.shape, given.times)
    return drawn(schedule, events, given.stages, given.times)


def _figures(given: Parameters, name: str) -> Answer:
    """Figures of the steady state, with bytes and command line; in_flight counts the
    microbatches of all chunks of a stage."""
    schedule = given.schedule(name)
    d = given.stages
    m = given.microbatches
    times = given.times
    seconds = iteration_time(given.schedule(name, steady=True), d, m, times)
    summary = schedule.summary
    if name == "gpipe" and given.gpipe_round < m:
        summary += f", in rounds of {given.gpipe_round}"
    work = zip(times.of("forward", d), times.of("backward", d))
    busy = [m * (forward + backward) / seconds for forward, backward in work]
    versions = []
    in_flight = []
    for stage in range(d):
        versions.append(schedule.max_versions(given.shape, stage))
        most = schedule.max_in_flight(given.shape, stage)
        in_flight.append(most / schedule.chunks)
    return {
        "summary": summary,
        "seconds": seconds,
        "throughput": m / seconds,
        "busy": busy,
        "bubble": max(1 - sum(busy) / d, 0.0),
        "versions": versions,
        "in_flight": in_flight,
        **_memory(given, name),
    }


def _memory(given: Parameters, name: str) -> Answer:
    """The planner's bytes of each stage, and Megatron's command line with random data;
    or why there are none."""
    plan = given.plan(name)
    model = preset(given.model)
    # each stage steps alone, so tied embeddings would drift apart
    if not plan.pipeline.global_step:
        model = replace(model, tied=False)
    if model.layers % (plan.depth * plan.virtual):
        parts = f"{plan.depth} stages"
        if plan.virtual > 1:
            parts += f" of {plan.virtual} chunks"
        reason = f"{model.layers} layers do not divide into {parts}"
        return {"bytes": None, "command": None, "reason": reason}
    stages = Memory(model, given.precision, flash=True).stages(plan)
    found: Answer = {"bytes": [asdict(stage) for stage in stages]}
    # the entry script refuses it
    if given.precision == "fp16" and not plan.pipeline.global_step:
        reason = "each stage would scale the loss by itself: choose bf16 or fp32"
        return found | {"command": None, "reason": reason}
    words = ["megatron-2bw", "train", model.kind, *model.flags()]
    words += plan.flags(given.precision)
    if name == "2bw-sync-start":
        words += ["--two-bw-sync-iterations", str(given.sync_iterations)]
    words += training.flags()
    words += jobs.mock_data(model)
    return found | {"command": " ".join(words)}


def _rate(given: Parameters, name: str) -> dict[str, float]:
    m = given.microbatches
    schedule = given.schedule(name, steady=True)
    return {"rate": m / long_iteration_time(schedule, given.stages, m, given.times)}


def curve(
    given: Parameters, over: str = "microbatches", at: int | None = None
) -> Answer:
    """Each schedule's throughput in the steady state over the microbatches, or over the
    time of a message.

    Microbatches per unit of time at all x, or at one of them; None where the schedule
    cannot run.
    """
    if over == "microbatches":
        places = list(MICROBATCHES)
        points = [replace(given, microbatches=m) for m in places]
    else:
        forward = given.times.of("forward", given.stages)
        backward = given.times.of("backward", given.stages)
        longest = max(map(operator.add, forward, backward))
        places = [share * longest for share in SHARES]
        points = [replace(given, transfer=seconds) for seconds in places]
    if at is not None:
        points = points[at : at + 1]
    curves = {}
    for name in given.schedules:
        curves[name] = [_or_error(_rate, point, name).get("rate") for point in points]
    return {"over": over, "x": places, "curves": curves}


def check(given: Parameters, lists: list[str]) -> Answer:
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
    actions = [parse_actions(text) for text in lists]
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
    events = simulate_lists(schedule, actions, given.times)
    return {"timeline": drawn(schedule, events, given.stages, given.times)}


def trace(given: Parameters) -> Answer:
    """The first schedule's timeline for Perfetto; the unit of the times counts as a
    millisecond."""
    name = given.schedules[0]
    events = simulate(given.schedule(name), given.shape, given.times)
    records = names_of(f"pipeline: {name}", range(given.stages))
    # in seconds; waits are events too
    for event in scaled(events, 1e-3):
        records += spans_of(event, event.stage, chunk=event.action.chunk)
    return {"traceEvents": records, "displayTimeUnit": "ms"}


EACH: dict[str, Callable[[Parameters, str], Answer]] = {
    "timelines": _timeline,
    "figures": _figures,
}
ASKED: dict[str, Callable[..., Answer]] = {
    "curve": curve,
    "check": check,
    "trace": trace,
}
