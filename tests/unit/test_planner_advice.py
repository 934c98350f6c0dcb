"""The order of advice: exact and simple plans before delayed and complicated ones of
equal speed."""

from dataclasses import replace

from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import cluster, model
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.find.advice import DELAY, TIE, ranked
from megatron_2bw.tools.planner.find.search import Space

FLUSH = Plan(1, 4, 2, 1, 8, schedule="pipedream-flush")
LATE = replace(FLUSH, schedule="2bw")


class Found:
    """A search whose plans are given, in order of time."""

    def __init__(self, *pairs, error=0.2):
        device = replace(cluster.GPUS["V100-16GB"], error=error)
        self.cost = Cost(
            model.preset("gpt-355m"),
            replace(cluster.preset("p3.16xlarge", 1), device=device),
        )
        self.space = Space(16, schedules=("2bw",))
        self.pairs = pairs

    def __iter__(self):
        return iter(self.pairs)

    def exact(self, limit):
        return iter(())


def first(*pairs, **options):
    plans, ties = ranked(Found(*pairs, **options), 8)
    assert sorted(map(str, plans)) == sorted(str(plan) for _, plan in pairs)
    return plans[0], ties


def test_a_delayed_schedule_must_win_by_more_than_the_error_and_its_cost():
    limit = (1 + TIE) * (1 + DELAY)
    assert first((1.0, LATE), (limit - 1e-6, FLUSH)) == (FLUSH, 2)
    # The exact plan alone is now beyond the tie; the delayed one is alone within.
    assert first((1.0, LATE), (limit + 1e-6, FLUSH)) == (LATE, 1)
    assert first((1.0, LATE), ((1 + DELAY) * 1.03 - 1e-6, FLUSH), error=0.03) == (
        FLUSH,
        2,
    )
    assert first((1.0, LATE), ((1 + DELAY) * 1.03 + 1e-6, FLUSH), error=0.03) == (
        LATE,
        1,
    )
    assert first((1.0, FLUSH), (1.01, LATE)) == (FLUSH, 2)


def test_of_equal_plans_the_simpler_one_is_first():
    for harder in (
        replace(FLUSH, recompute="selective"),
        replace(FLUSH, first=5, last=7),
        replace(FLUSH, tensor=2),
        replace(FLUSH, microbatches=3),
        replace(FLUSH, schedule="megatron", virtual=2),
        replace(FLUSH, pipeline_inside=True),
        replace(FLUSH, schedule="gpipe", gpipe_round=4),
        replace(LATE, extra_warmup=(1,)),
        LATE,
    ):
        assert first((1.0, harder), (1.02, FLUSH)) == (FLUSH, 2)
        assert first((1.0, harder), (1.08, FLUSH)) == (harder, 1)
    # else the faster one
    assert first((1.0, FLUSH), (1.01, replace(FLUSH, microbatch=2)))[0] is FLUSH


def test_nothing_is_recommended_where_nothing_fits():
    assert ranked(Found(), 8) == ([], 0)
