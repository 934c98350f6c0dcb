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
from megatron_2bw.tools.planner.find.search import Search
from megatron_2bw.tools.planner.find.space import Space
from megatron_2bw.tools.planner.tell.explain import (
    ESTIMATED,
    MEASURED,
    TERMS,
    Result,
    evidence,
    first,
    plan_table,
    text,
    three,
    time_table,
)
from megatron_2bw.tools.planner.tell.json_out import as_json
from megatron_2bw.tools.planner.tell.no_plan import nothing_fits

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
    plans = itertools.islice(search, count)
    return Result(search, [cost.estimate(plan) for _, plan in plans])


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
    estimates = result.estimates
    plans = rows(plan_table(result), "#")
    for estimate, row in zip(estimates, plans, strict=True):
        plan = estimate.plan
        sizes = (plan.tensor, plan.depth, plan.width, plan.microbatch)
        assert row["schedule"] == plan.schedule_name
        for column, number in zip("tdwbm", (*sizes, plan.microbatches)):
            assert row[column] == str(number)
        assert is_shown(row["samples/s"], estimate.throughput)
        assert is_shown(row["iteration"], estimate.seconds, " s")
        assert is_shown(row["memory"], estimate.heaviest / GIB, " GiB")
    for row, estimate in zip(rows(time_table(result), "#"), estimates, strict=True):
        for term in TERMS:
            share = getattr(estimate.split, term) / estimate.seconds
            assert is_shown(row[term], 100 * share, "%")
        whole = sum(getattr(estimate.split, term) for term in TERMS)
        assert whole == pytest.approx(estimate.seconds)


def test_the_answer_fits_on_one_screen(result):
    assert len(text(result).splitlines()) <= 22 + len(result.estimates)


# --- the first lines
# --------------------------------------------------------------------------------------


def test_the_first_lines_are_the_plan_and_what_2bw_gains_and_costs(result):
    text = " ".join(first(result).split())
    winner = result.estimates[0]
    need = winner.heaviest
    room = winner.capacity
    sizes = f"{need / GIB:.2f} GiB of {room / GIB:.2f} allowed"
    rate = f"{three(winner.throughput)} samples/s"
    assert text.startswith(f"Best: {winner.plan.title}, {rate}, ")
    assert f" an iteration, {sizes} (ESTIMATED: " in text
    found = result.fastest["2bw"], result.fastest["exact"]
    named = [
        f"{estimate.plan.title} ({three(estimate.throughput)} samples/s)"
        for estimate in found
    ]
    ratio = found[0].throughput / found[1].throughput
    assert (
        f"{named[0]} is {ratio:.2f} times as fast as the fastest exact plan, {named[1]}. "
        in text
    )
    plan = found[0].plan
    late = plan.pipeline.late_of(plan.microbatches)
    assert f"{late} of {plan.microbatches} microbatches are late" in text


def test_the_fastest_of_2bw_and_of_the_exact_schedules_are_found(result):
    space = result.search.space
    late = replace(space, schedules=("2bw",))
    for kind, part in (("2bw", late), ("exact", space.exact)):
        seconds, plan = next(iter(Search(result.cost, part)))
        assert 1 / result.fastest[kind].throughput == pytest.approx(seconds)
        assert kind == "2bw" or plan.exact


def test_a_plan_that_may_fit_takes_more_than_is_allowed_and_no_more_than_there_is(
    tight,
):
    found = tight.tight
    assert found.throughput > tight.estimates[0].throughput
    assert not tight.cost.fits(found.plan)
    assert found.heaviest < P3.device.memory_gib * GIB
    assert f"May fit, with --memory-margin 0.05: {found.plan.title}, " in " ".join(
        first(tight).split()
    )


# --- nothing fits
# --------------------------------------------------------------------------------------


def test_where_nothing_fits_the_memory_that_is_named_suffices():
    model = PRESETS["gpt-28.3b"]
    space = Space(16, memory=("two-slots", "one-slot", "shard"))
    cost = Cost(model, P3, "fp16")
    search = Search(cost, space)
    assert not list(search)
    text = nothing_fits(cost, space)
    plan = min(search.too_large, key=cost.gpu_bytes)
    need = cost.memory.heaviest(plan) / GIB
    allowed = cost.allowed(plan) / GIB
    assert (
        f"needs {need:.2f} GiB on its heaviest stage (ESTIMATED), and {allowed:.2f} GiB of 15.8 GiB"
        in text
    )
    memory = float(re.search(r"GPUs of ([\d.]+) GiB or more", text)[1])
    for gib, fits in ((memory, True), (memory - 0.1, False)):
        device = replace(P3.device, memory_gib=gib)
        larger = Cost(model, replace(P3, device=device), "fp16")
        assert any(map(larger.fits, search.too_large)) == fits


def test_where_nothing_is_legal_the_causes_are_reported():
    text = nothing_fits(Cost(GPT, P3, "fp16"), Space(2, depth=(1,), tensor=(1,)))
    assert text.startswith("No plan is legal on 8 GPUs with a global batch of 2: ")
    assert "--global-batch-size gives too few microbatches" in text


# --- evidence and JSON
# --------------------------------------------------------------------------------------


def test_every_source_says_whether_it_was_measured():
    inside = replace(P3.inside, measured=True)
    lines = evidence(Cost(GPT, replace(P3, servers=2, inside=inside), "fp16"))
    tags = dict(re.findall(r"^([a-z, ]+): (\w+), ", lines, re.MULTILINE))
    assert tags.pop("messages inside servers") == MEASURED
    assert "messages between servers" in tags
    assert set(tags.values()) == {ESTIMATED}


def test_the_json_is_plain_and_whole(result):
    written = as_json(result)
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert written["model"] == asdict(result.cost.model)
    assert written["margin"] == result.cost.share_left_free
    for plan, estimate in zip(written["plans"], result.estimates, strict=True):
        fields = asdict(estimate.plan)
        assert {name: plan[name] for name in fields} == json.loads(json.dumps(fields))
        assert plan["seconds"] == estimate.seconds
        assert plan["split"] == asdict(estimate.split)
        assert plan["flags"] == estimate.plan.flags("fp16")
        assert plan["capacity"] == estimate.capacity
