"""Lower bounds on the simulated time of a plan, a thousand times cheaper than the
simulation. Pure Python.

Invariant: a bound is the length of a chain of dependent actions, so no simulated time
is below it. `warmup_for` solves for the opposite: the warm-up with which no such chain
is longer than wanted.
"""

from __future__ import annotations

import math
from itertools import accumulate

from megatron_2bw.schedules import SCHEDULES
from megatron_2bw.tools.planner.cost.compute import Work
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.timelines.simulator import Times


def lower_bound(plan: Plan, times: Times) -> float:
    """Seconds per iteration that the plan's dependencies alone take."""
    return (
        _with_flush(plan, times)
        if plan.pipeline.flushes
        else _without_flush(plan, times)
    )


def work_bound(
    works: list[Work], microbatches: int, schedule: str, virtual: int
) -> float:
    """As `lower_bound`, from the stages' computation alone."""
    totals = [work.total for work in works]
    if schedule == "no-pipelining":
        return microbatches * sum(totals)
    if schedule in SCHEDULES and not SCHEDULES[schedule].flushes:
        return microbatches * max(totals)
    above = accumulate(totals, initial=0.0)
    return max(
        microbatches * total + before / virtual for total, before in zip(totals, above)
    )


def _with_flush(plan: Plan, times: Times) -> float:
    d, m, chunks = plan.depth, plan.microbatches, plan.virtual
    forward, backward, reduce, transfer = (
        times.of(n, d) for n in ("forward", "backward", "reduce", "transfer")
    )
    if chunks == 1:
        return _chain_of_flush(plan, forward, backward, reduce, transfer) + times.step
    # A stage starts when the first microbatch reaches it, and its last gradient still
    # passes all stages before it.
    down, up = (
        [0.0, *accumulate(time / chunks for time in times_)]
        for times_ in (forward, backward)
    )
    work = (m * (f + b) for f, b in zip(forward, backward))
    return (
        max(down[s] + w + max(reduce[s], up[s] + reduce[0]) for s, w in enumerate(work))
        + times.step
    )


def _chain_of_flush(plan, forward, backward, reduce, transfer) -> float:
    d, m = plan.depth, plan.microbatches
    down = [0.0, *accumulate(f + t for f, t in zip(forward, transfer))]
    up = [0.0, *accumulate(b + t for b, t in zip(backward, transfer))]
    whole = sum(forward) + sum(backward) + 2 * sum(transfer[: d - 1])
    if plan.schedule == "no-pipelining":
        return m * whole + reduce[0]
    bound = 0.0
    for s in range(d):
        f, b = forward[s], backward[s]
        busy = down[s] + m * (f + b)
        # The first microbatch's way down and back; then the stage still runs m - 1
        # backwards, and the forwards beyond its warm-up.
        later = max(m - 1 - plan.pipeline.ahead(plan.shape, s), 0)
        bound = max(
            bound,
            busy + reduce[s],
            busy + up[s] + reduce[0],
            whole + (m - 1) * b + later * f + reduce[0],
        )
    if plan.schedule != "gpipe":
        return bound
    # A round's first microbatch takes the whole way down, its last one the whole way
    # back.
    return max(
        bound,
        plan.rounds * whole
        + (m - plan.rounds) * (max(forward) + max(backward))
        + reduce[0],
    )


def _without_flush(plan: Plan, times: Times) -> float:
    d, m = plan.depth, plan.microbatches
    forward, backward, reduce, transfer = (
        times.of(n, d) for n in ("forward", "backward", "reduce", "transfer")
    )
    work = [f + b for f, b in zip(forward, backward)]
    ahead = [*accumulate((1 + more for more in reversed(plan.extra)), initial=0)][::-1]
    # Of k successive stages the first is some microbatches ahead of the last: k - 1
    # without extra warm-up. They hold one more than that at a time, so each microbatch
    # passes down and back within as many periods.
    pairs = [
        (work[s] + work[s + 1] + 2 * transfer[s]) / (ahead[s] - ahead[s + 1] + 1)
        for s in range(d - 1)
    ]
    whole = (sum(work) + 2 * sum(transfer[: d - 1])) / (ahead[0] + 1)
    period = max([*pairs, whole, *times.of("occupied", d)[: d - 1]])
    bound = max(
        [
            m * period,
            *(m * w + cost for w, cost in zip(work, times.of("overlap_cost", d))),
        ]
    )
    if not plan.pipeline.late_step:
        return bound
    # The chain through a step that spans all stages. It completes after the last
    # stage's reduction.
    down = [0.0, *accumulate(f + t for f, t in zip(forward, transfer))]
    above = [0.0, *accumulate(b + t for b, t in zip(backward, transfer))]
    for s, w in enumerate(work):
        below = (
            above[d - 1]
            - above[s]
            + (backward[d - 1] - backward[s] if s < d - 1 else 0.0)
        )
        # the first backward of the next batch, on the last stage first
        if plan.gradient_slots == 1:
            bound = max(
                bound,
                below
                + m * w
                - forward[s]
                + max(reduce[s], above[s] + reduce[0])
                + times.step,
            )
        # the last backward of the next batch; and, in two periods, the batch after
        # that, m + w pairs
        else:
            after = below + backward[s] + reduce[s] + times.step
            bound = max(
                bound,
                after,
                (down[s] + (m + ahead[s]) * w + reduce[s] + times.step) / 2,
            )
    return bound


def warmup_for(
    cycle: float, works: list[float], transfer: list[float]
) -> tuple[int, ...]:
    """The least extra warm-up of 2bw, by boundary, with which a microbatch takes
    `cycle` seconds.

    works: seconds of a microbatch's forward and backward on each stage, none above
    `cycle`. For all stages a < b, the way of a microbatch from a down to b and back
    must not take longer than stage a's concurrent work, (ahead_a - ahead_b + 1) ·
    cycle. From the last stage up, each stage gets the smallest number that satisfies
    this.
    """
    # way: the longest way down and back so far, in cycles
    extra, ahead, way = [], 0, works[-1] / cycle
    for work, sent in zip(works[-2::-1], transfer[len(works) - 2 :: -1]):
        way += (work + 2 * sent) / cycle
        needed = max(ahead + 1, math.ceil(way - 1 - 1e-9))
        extra.append(needed - ahead - 1)
        ahead, way = needed, max(way, needed + work / cycle)
    return tuple(reversed(extra))
