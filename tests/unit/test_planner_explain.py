"""What the planner prints: its numbers are the estimates', its words follow from them,
its advice holds."""

import itertools
import json
import re
from dataclasses import asdict, replace

import pytest

from megatron_2bw.tools.planner.cost.memory import GIB
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import cluster as clusters
from megatron_2bw.tools.planner.descriptions.model import PRESETS
from megatron_2bw.tools.planner.find.advice import TIGHT
from megatron_2bw.tools.planner.find.search import Search
from megatron_2bw.tools.planner.find.space import Space
from megatron_2bw.tools.planner.tell.explain import (
    ESTIMATED,
    MEASURED,
    TERMS,
    Result,
    evidence,
    first,
    table,
    terms,
    three,
)
from megatron_2bw.tools.planner.tell.json_out import as_json
from megatron_2bw.tools.planner.tell.no_plan import nothing_fits
from tests.unit.test_planner_profile import PROFILE

GPT = PRESETS["gpt-355m"]
LARGER = PRESETS["gpt-1.3b"]
P3 = clusters.preset("p3.16xlarge", 1)


def searched(
    model=GPT,
    cluster=P3,
    batch: int = 64,
    count: int = 8,
    precision: str = "fp16",
    **space,
) -> Result:
    cost = Cost(model, cluster, precision)
    space = Space(batch, **space)
    search = Search(cost, space)
    estimates = [cost.estimate(plan) for _, plan in itertools.islice(search, count)]
    return Result(cost, space, estimates, search, 0.25)


@pytest.fixture(scope="module")
def small() -> Result:
    return searched()


@pytest.fixture(scope="module")
def tight() -> Result:
    """A model for which the fastest plans do not fit."""
    return searched(LARGER)


@pytest.fixture(scope="module")
def apart() -> Result:
    """Two servers: every column of the table has more than one value."""
    return searched(GPT, clusters.preset("p3.16xlarge", 2), 70, 12, max_gap=100)


@pytest.fixture(params=["small", "tight", "apart"])
def result(request) -> Result:
    return request.getfixturevalue(request.param)


# --- tables
# --------------------------------------------------------------------------------------


def rows(text: str, first: str) -> list[dict[str, str]]:
    """The lines of a table, as texts by column; `first` is the name of its first
    column."""
    names: list[str] = []
    found = []
    for line in text.splitlines():
        cells = re.split(r" {2,}", line.strip())
        if re.match(rf" *{first} ", line):
            names = cells
        elif names and re.match(r" *\d[\d-]* ", line):
            found.append(dict(zip(names, cells, strict=True)))
        elif found:
            break
    assert found
    return found


def is_shown(text: str, number: float, unit: str = "") -> bool:
    """Whether `text` is the number as rounded as it is printed."""
    shown = text.removesuffix(unit)
    digits = len(shown.partition(".")[2])
    return (
        text.endswith(unit)
        and not shown.startswith("-0")
        and abs(float(shown) - number) <= 0.5001 * 10**-digits
    )


def test_every_number_of_the_table_is_the_estimates(result):
    plans, times = table(result).split("\n\n")
    estimates = result.estimates
    for estimate, row in zip(estimates, rows(plans, "#"), strict=True):
        plan = estimate.plan
        sizes = (plan.tensor, plan.depth, plan.width, plan.microbatch)
        assert row["schedule"] == plan.schedule_name
        for column, number in zip("tdwbm", (*sizes, plan.microbatches)):
            assert row[column] == str(number)
        assert is_shown(row["samples/s"], estimate.throughput)
    for row, estimate in zip(rows(times, "#"), estimates, strict=True):
        assert is_shown(row["iteration"], estimate.seconds, " s")
        for term in TERMS:
            share = getattr(estimate.split, term) / estimate.seconds
            assert is_shown(row[term], 100 * share, " %")
        assert is_shown(row["heaviest"], estimate.heaviest / GIB, " GiB")


# --- the first lines
# --------------------------------------------------------------------------------------


def test_the_first_lines_are_the_plan_and_what_2bw_gains_and_costs(result):
    text = " ".join(first(result).split())
    estimates = [*result.estimates, *result.rivals]
    winner = result.estimates[0]
    need = winner.heaviest
    room = winner.capacity
    sizes = f"{need / GIB:.2f} GiB of {room / GIB:.2f} allowed"
    assert text.startswith(
        f"Best: {winner.plan.title}, {three(winner.throughput)} samples/s, {sizes} "
    )
    best = {
        estimate.plan.pipeline.flushes: estimate
        for estimate in sorted(estimates, key=lambda e: e.throughput)
    }
    found = best[False], best[True]
    named = [
        f"{estimate.plan.title} ({three(estimate.throughput)} samples/s)"
        for estimate in found
    ]
    ratio = found[0].throughput / found[1].throughput
    assert f"{named[0]} is {ratio:.2f} times as fast as {named[1]}. " in text
    plan = found[0].plan
    late = plan.pipeline.late_of(plan.microbatches)
    assert f"{late} of {plan.microbatches} microbatches are late" in text


def test_the_rivals_are_the_best_of_every_other_schedule(result):
    found = {rival.plan.schedule: rival.throughput for rival in result.rivals}
    winner = result.estimates[0].plan.schedule
    assert found.keys() == set(result.space.schedules) - {winner}
    for schedule, rate in found.items():
        space = replace(result.space, schedules=(schedule,))
        plans = [plan for _, plan in Search(result.cost, space)]
        # on one stage others are Megatron's
        several = [plan for plan in plans if plan.depth > 1]
        best = [result.cost.estimate(each[0]) for each in (plans, several)]
        assert rate in [estimate.throughput for estimate in best]


def test_faster_plans_that_may_fit_are_told_and_never_first():
    """Their certain bytes fit, and the estimate is at most a tenth of the GPU's memory
    above what is allowed."""
    found = searched(LARGER, replace(P3, gpus_per_server=4), 32)
    (estimate,), cost = found.tight, found.cost
    assert replace(cost, spare=-TIGHT).fits(estimate.plan)
    assert not cost.fits(estimate.plan)
    assert estimate.throughput > found.estimates[0].throughput
    assert estimate.headroom < 0
    for stage in estimate.memory:
        assert stage.certain <= estimate.capacity
    for words in (
        f"tight  {estimate.plan.schedule_name}",
        "tight: faster, and at most 10 % above",
    ):
        assert f"\n{words}" in table(found)
    assert as_json(found)["tight"][0]["name"] == estimate.plan.title


# --- nothing fits
# --------------------------------------------------------------------------------------


def failed(
    model, cluster, space: Space, precision: str = "fp16"
) -> tuple[str, Cost, Search]:
    cost = Cost(model, cluster, precision)
    search = Search(cost, space)
    assert not list(search)
    text = nothing_fits(cost, space, search)
    assert "\n" not in text
    assert text.endswith(".")
    return text, cost, search


def test_where_nothing_fits_the_memory_that_is_named_suffices():
    model = PRESETS["gpt-28.3b"]
    space = Space(16, memory=("two-slots", "one-slot", "shard"))
    text, cost, search = failed(model, P3, space)
    plan = min(search.too_large, key=cost.gpu_bytes)
    need = cost.memory.heaviest(plan) / GIB
    allowed = cost.allowed(plan) / GIB
    assert (
        f"needs {need:.2f} GiB on its heaviest stage (ESTIMATED), and {allowed:.2f} GiB of 15.8 GiB"
        in text
    )
    memory = float(re.search(r"GPUs of ([\d.]+) GiB or more", text)[1])
    for gib, fits in ((memory, True), (memory - 0.1, False)):
        larger = Cost(
            model, replace(P3, device=replace(P3.device, memory_gib=gib)), "fp16"
        )
        assert any(map(larger.fits, search.too_large)) == fits
    gpu = re.search(r"or more, such as (\S+)\.$", text)[1]
    assert clusters.GPUS[gpu].memory_gib >= memory
    # no GPU has that much
    assert "GiB or more" not in failed(PRESETS["gpt-175b"], P3, space)[0]


def test_where_nothing_is_legal_the_causes_are_reported():
    text, _, search = failed(GPT, P3, Space(2, depth=(1,), tensor=(1,)))
    assert text.startswith("No plan is legal on 8 GPUs with a global batch of 2: ")
    assert search.rejected
    assert "--global-batch-size gives too few microbatches" in text


# --- evidence and JSON
# --------------------------------------------------------------------------------------


def profiled():
    return replace(P3, profile=replace(PROFILE, precision="fp16"))


def measured(cluster, *links: bool):
    inside, between = links
    return replace(
        cluster,
        inside=replace(cluster.inside, measured=inside),
        between=replace(cluster.between, measured=between),
    )


@pytest.mark.parametrize(
    "cluster, found",
    [
        (P3, set()),
        (measured(P3, True, False), {"tensor", "pipeline", "data"}),
        (measured(replace(P3, servers=2), True, False), set()),
        (measured(profiled(), True, True), {*TERMS} - {"bubble"}),
    ],
)
def test_every_term_says_whether_it_was_measured(cluster, found):
    cost = Cost(GPT, cluster, "fp16")
    tags = {term: tag for term, (tag, _) in terms(cost).items()}
    assert tags == {
        term: MEASURED if term in found else ESTIMATED for term in (*TERMS, "memory")
    }
    lines = [
        re.match(r"- ([a-z, ]+): (\w+), ", line)
        for line in evidence(cost).splitlines()
        if line[0] == "-"
    ]
    assert {term: line[2] for line in lines for term in line[1].split(", ")} == tags


def test_the_json_is_plain_and_whole(result):
    written = as_json(result)
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert written["model"] == asdict(result.cost.model)
    assert written["margin"] == result.cost.share_left_free
    assert written["search_seconds"] == 0.25
    assert set(written["evidence"]) == {*TERMS, "memory"}
    for plan, estimate in zip(written["plans"], result.estimates, strict=True):
        fields = asdict(estimate.plan)
        assert {name: plan[name] for name in fields} == json.loads(json.dumps(fields))
        assert plan["seconds"] == estimate.seconds
        assert plan["split"] == asdict(estimate.split)
        assert plan["flags"] == estimate.plan.flags("fp16")
        assert plan["headroom"] == estimate.headroom
