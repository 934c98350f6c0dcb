"""Lower bounds on the simulated time of a plan, a thousand times cheaper than the
simulation. Pure Python.

Invariant: a bound is the length of a chain of dependent actions, so no simulated time
is below it. `warmup_for` solves for the opposite: the warm-up with which no such chain
is longer than wanted.
"""

import math
import operator
from itertools import accumulate

from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.timelines.simulator import Times


def lower_bound(plan: Plan, times: Times) -> float:
    """Seconds per iteration that the plan's dependencies alone take. `times` has lists,
    apart from its step."""
    if plan.pipeline.flushes:
        return _with_flush(plan, times)
    return _without_flush(plan, times)


def _sums(times: list[float], messages: list[float]) -> list[float]:
    """Seconds from the first stage to each stage."""
    return [0.0, *accumulate(map(operator.add, times, messages))]


def _with_flush(plan: Plan, times: Times) -> float:
    if plan.virtual == 1:
        return _chain_of_flush(plan, times) + times.step
    # A stage starts when the first microbatch reaches it, and its last gradient still
    # passes all stages before it.
    down = up = bound = 0.0
    for f, b, own in zip(times.forward, times.backward, times.reduce):
        work = plan.microbatches * (f + b)
        reduced = max(own, up + times.reduce[0])
        bound = max(bound, down + work + reduced)
        down += f / plan.virtual
        up += b / plan.virtual
    return bound + times.step


def _chain_of_flush(plan: Plan, times: Times) -> float:
    microbatches = plan.microbatches
    reduce = times.reduce
    down = _sums(times.forward, times.transfer)
    up = _sums(times.backward, times.transfer)
    work = sum(times.forward) + sum(times.backward)
    whole = work + 2 * sum(times.transfer[:-1])
    if plan.schedule == "no-pipelining":
        return microbatches * whole + reduce[0]
    bound = 0.0
    for stage in range(plan.depth):
        f = times.forward[stage]
        b = times.backward[stage]
        busy = down[stage] + microbatches * (f + b)
        # The first microbatch's way down and back; then the stage still runs m - 1
        # backwards, and the forwards beyond its warm-up.
        ahead = plan.pipeline.ahead(plan.shape, stage)
        later = max(microbatches - 1 - ahead, 0)
        bound = max(
            bound,
            busy + reduce[stage],
            busy + up[stage] + reduce[0],
            whole + (microbatches - 1) * b + later * f + reduce[0],
        )
    if plan.schedule != "gpipe":
        return bound
    # A round's first microbatch takes the whole way down, its last one the whole way
    # back.
    longest = max(times.forward) + max(times.backward)
    others = microbatches - plan.rounds
    rounds = plan.rounds * whole + others * longest
    return max(bound, rounds + reduce[0])


def _without_flush(plan: Plan, times: Times) -> float:
    microbatches = plan.microbatches
    work = [*map(operator.add, times.forward, times.backward)]
    ahead = [plan.pipeline.ahead(plan.shape, s) for s in range(plan.depth)]
    # Of k successive stages the first is some microbatches ahead of the last: k - 1
    # without extra warm-up. They hold one more than that at a time, so each microbatch
    # passes down and back within as many periods.
    whole = sum(work) + 2 * sum(times.transfer[:-1])
    period = max(whole / (ahead[0] + 1), *times.occupied[:-1], 0.0)
    for stage in range(plan.depth - 1):
        pair = work[stage] + work[stage + 1] + 2 * times.transfer[stage]
        together = ahead[stage] - ahead[stage + 1] + 1
        period = max(period, pair / together)
    bound = microbatches * period
    for own, cost in zip(work, times.overlap_cost):
        bound = max(bound, microbatches * own + cost)
    if plan.pipeline.late_step:
        bound = max(bound, _chain_of_step(plan, times, ahead))
        if plan.late is not None and plan.late < microbatches:
            bound = max(bound, _chain_of_fresh(plan, times, work))
    return bound


def _chain_of_fresh(
    plan: Plan,
    times: Times,
    work: list[float],
) -> float:
    """From step to step: the microbatches that are not late begin after the one, and
    the other waits for their gradients."""
    down = _sums(times.forward, times.transfer)
    up = _sums(times.backward, times.transfer)
    longest = 0.0
    for stage, each in enumerate(work):
        passed = down[stage] + (plan.microbatches - plan.late) * each + up[stage]
        longest = max(longest, passed)
    return longest + times.reduce[0] + times.step


def _chain_of_step(
    plan: Plan,
    times: Times,
    ahead: list[int],
) -> float:
    """The chain through a step that spans all stages. It completes after the last
    stage's reduction."""
    backward = times.backward
    last = plan.depth - 1
    down = _sums(times.forward, times.transfer)
    above = _sums(backward, times.transfer)
    bound = 0.0
    for s, reduce in enumerate(times.reduce):
        work = times.forward[s] + backward[s]
        below = above[last] - above[s] + (backward[last] - backward[s])
        if plan.memory == "one-slot":
            # the first backward of the next batch, on the last stage first; of that
            # batch only late microbatches run before the step
            waiting = 1 + ahead[s] - plan.pipeline.crossing(plan.shape, s, 1)
            chain = below + plan.microbatches * work - waiting * times.forward[s]
            chain += max(reduce, above[s] + times.reduce[0])
            bound = max(bound, chain + times.step)
        else:
            # the last backward of the next batch; and, in two periods, the batch after
            # that, m + w pairs
            after = below + backward[s] + reduce + times.step
            pairs = (plan.microbatches + ahead[s]) * work
            two = down[s] + pairs + reduce + times.step
            bound = max(bound, after, two / 2)
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
    extra = []
    ahead = 0
    way = works[-1] / cycle  # the longest way down and back so far, in cycles
    for stage in reversed(range(len(works) - 1)):
        work = works[stage]
        way += (work + 2 * transfer[stage]) / cycle
        needed = max(ahead + 1, math.ceil(way - 1 - 1e-9))
        extra.append(needed - ahead - 1)
        ahead = needed
        way = max(way, needed + work / cycle)
    return tuple(reversed(extra))
