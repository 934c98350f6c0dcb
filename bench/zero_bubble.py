"""The schedules of zero-bubble pipeline parallelism (Qi et al. 2023, arXiv 2401.10241),
to check the simulator with.

They split a backward into the inputs' part B and the weights' part W, and let the
iterations follow each other without a common step. Nothing of this project runs them.
"""

from __future__ import annotations

import heapq
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
    lists = [[] for _ in range(stages)]
    arrived = {F: [{} for _ in range(stages)], B: [{} for _ in range(stages)]}
    arrived[F][0] = dict.fromkeys(range(microbatches), 0.0)
    done, held = [{F: 0, B: 0, W: 0} for _ in range(stages)], [0.0] * stages
    free, queue = [0.0] * stages, [(0.0, stage) for stage in range(stages)]
    while queue:
        now, stage = heapq.heappop(queue)
        if now < free[stage]:
            # something arrived while it was busy; it looks again when it is free
            continue
        mine = done[stage]
        came = {
            kind: arrived[kind][stage].get(mine[kind], float("inf")) for kind in (F, B)
        }
        if held[stage] + 1 > limit + 1e-9:
            came[F] = float("inf")
        kind = B if came[B] <= now else F if came[F] <= now else W
        if kind == W and mine[W] == mine[B]:
            # wait for what is under way; or park until something arrives
            if min(came.values()) < float("inf"):
                heapq.heappush(queue, (min(came.values()), stage))
            continue
        x, end = mine[kind], now + took[kind][stage]
        lists[stage].append(Action(kind, x, 0))
        mine[kind] += 1
        held[stage] += {F: 1.0, B: kept - 1.0, W: -kept}[kind]
        free[stage] = end
        heapq.heappush(queue, (end, stage))
        target = (kind, stage + 1) if kind == F else (kind, stage - 1)
        if kind == F and stage == stages - 1:
            target = B, stage
        elif kind == W or target[1] < 0:
            continue
        else:
            end += transfer[min(stage, target[1])]
        arrived[target[0]][target[1]][x] = end
        heapq.heappush(queue, (end, target[1]))
    return lists


def iteration_time(
    stages: int, microbatches: int, times: SplitTimes, limit: int, kept: float
) -> float:
    """The longest that a stage is taken by one iteration; the next one follows on that
    stage at once."""
    events = simulate_lists(
        ZeroBubble(), order(stages, microbatches, times, limit, kept), times
    )
    own = [
        [event for event in events if event.stage == stage] for stage in range(stages)
    ]
    return max(max(e.end for e in mine) - min(e.start for e in mine) for mine in own)
