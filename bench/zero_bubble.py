"""The schedules of zero-bubble pipeline parallelism (Qi et al. 2023, arXiv 2401.10241),
to check the simulator with.

They split a backward into the inputs' part B and the weights' part W, and let the
iterations follow each other without a common step. Nothing of this project runs them.
"""

import heapq
import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from megatron_2bw.schedules import Action, B, F, Schedule
from megatron_2bw.tools.timelines.simulator import PerStage, Times, simulate_lists

W = "W"  # the weights' part of a backward; B is the inputs' part


@dataclass(frozen=True)
class SplitTimes(Times):
    weight: PerStage = 0.0  # of W for one microbatch

    def computations(self, stages: int) -> dict[str, list[float]]:
        return super().computations(stages) | {W: self.of("weight", stages)}


class ZeroBubble(Schedule):
    name = "zero-bubble"
    summary = "backwards split in two, no common step"


def order(
    stages: int, microbatches: int, times: SplitTimes, limit: int, kept: float
) -> list[list[Action]]:
    """Lists of a greedy schedule: a backward as soon as its gradient is there, else a
    forward, else a W.

    limit  microbatches whose activations a stage may hold (p for ZB-1p, 2p for ZB-2p)
    kept   share of a microbatch's activations that stays from its B to its W
    """
    took = times.computations(stages)
    transfer = times.of("transfer", stages)
    lists = defaultdict(list)
    arrived = {(F, 0, x): 0.0 for x in range(microbatches)}  # by kind, stage, number
    done = Counter()  # by kind and stage
    held = [0.0] * stages
    free = [0.0] * stages
    changes = {F: 1.0, B: kept - 1.0, W: -kept}  # of `held`
    queue = [(0.0, stage) for stage in range(stages)]
    while queue:
        now, stage = heapq.heappop(queue)
        if now < free[stage]:
            # something arrived while it was busy; it looks again when it is free
            continue
        gradient = arrived.get((B, stage, done[B, stage]), math.inf)
        activation = arrived.get((F, stage, done[F, stage]), math.inf)
        if held[stage] + 1 > limit + 1e-9:
            activation = math.inf
        kind = W
        if gradient <= now:
            kind = B
        elif activation <= now:
            kind = F
        elif done[W, stage] == done[B, stage]:
            # wait for what is under way; or park until something arrives
            first = min(gradient, activation)
            if first < math.inf:
                heapq.heappush(queue, (first, stage))
            continue
        x = done[kind, stage]
        end = now + took[kind][stage]
        lists[stage].append(Action(kind, x, 0))
        done[kind, stage] += 1
        held[stage] += changes[kind]
        free[stage] = end
        heapq.heappush(queue, (end, stage))
        if kind == W or (kind == B and stage == 0):
            continue
        target = stage
        if kind == F and stage == stages - 1:
            kind = B
        else:
            target += 1 if kind == F else -1
            end += transfer[min(stage, target)]
        arrived[kind, target, x] = end
        heapq.heappush(queue, (end, target))
    return [lists[stage] for stage in range(stages)]


def iteration_time(
    stages: int, microbatches: int, times: SplitTimes, limit: int, kept: float
) -> float:
    """The longest that a stage is taken by one iteration; the next one follows on that
    stage at once."""
    events = simulate_lists(
        ZeroBubble(), order(stages, microbatches, times, limit, kept), times
    )
    starts = {}
    ends = {}
    for event in events:
        stage = event.stage
        starts[stage] = min(event.start, starts.get(stage, math.inf))
        ends[stage] = max(event.end, ends.get(stage, 0.0))
    return max(ends[stage] - starts[stage] for stage in range(stages))
