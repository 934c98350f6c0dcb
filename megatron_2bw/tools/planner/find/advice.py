"""The order in which plans are recommended: among ties exact and simple plans come
first. Pure Python.

Invariant: a plan with gradient delay is first only if it is faster than every exact
plan by more than the error and the delay's cost in convergence.
"""

import itertools

from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.find.search import Search

# Two plans whose times differ by less are a tie: the ratios of zero-bubble's schedules
# have errors up to 4.0 % (bench/planner_accuracy.py). A cluster with a smaller error of
# its own has that.
TIE = 0.05
# The share of a run's iterations that a delay of one update is charged with,
# --two-bw-correction auto: a choice. With a part of the batch late no cost was measured
# up to 8,192 tokens a batch, with all late more (docs/convergence.md).
DELAY = 0.02


def tie(error: float) -> float:
    return min(error, TIE)


def ranked(search: Search, count: int) -> tuple[list[Plan], int]:
    """(`count` plans of the search in the order of advice, the number of plans among
    them that tie with the first)."""
    fastest = list(itertools.islice(search, count))
    if not fastest:
        return [], 0
    within = 1 + tie(search.cost.cluster.device.error)
    seconds, plan = fastest[0]
    if not plan.exact:
        limit = seconds * (1 + DELAY) * within
        fastest += itertools.islice(search.exact(limit), count)
    scores = {}
    for seconds, plan in fastest:
        delay = 0 if plan.exact else DELAY
        scores[plan] = seconds * (1 + delay)
    limit = min(scores.values()) * within
    plans = sorted(scores, key=scores.__getitem__)
    ties = [plan for plan in plans if scores[plan] <= limit]
    others = plans[len(ties) :]
    advised = sorted(ties, key=_burden) + others
    return advised[:count], min(len(ties), count)


def _burden(plan: Plan) -> tuple[bool, int]:
    """(whether gradients are late, the number of choices apart from the plainest)."""
    choices = (
        plan.tensor > 1,
        plan.depth > 1,
        plan.depth > plan.microbatches,  # most stages wait
        plan.virtual > 1,
        plan.recompute != "none",
        plan.first or plan.last or plan.stages,
        plan.context > 1,
        plan.pipeline_inside,
        any(plan.extra),
        plan.memory != "two-slots",
        plan.gpipe_round,
    )
    return not plan.exact, sum(map(bool, choices))
