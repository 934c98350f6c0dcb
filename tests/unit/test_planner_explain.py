"""What the planner prints: its numbers are the estimates', its words follow from them, its advice holds."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, fields, replace

import pytest

from megatron_2bw.models import cluster as clusters
from megatron_2bw.models.model import PRESETS
from megatron_2bw.models.plan import Plan
from megatron_2bw.models.profile import BlockTime, Profile
from megatron_2bw.planner.cost.memory import GIB, StageMemory
from megatron_2bw.planner.cost.simulated import Cost, Estimate, Split
from megatron_2bw.planner.find.legality import is_legal
from megatron_2bw.planner.find.search import Search, best, on_fewer
from megatron_2bw.planner.find.space import Space
from megatron_2bw.planner.tell import rejections as left_out
from megatron_2bw.planner.tell.explain import (
    CAVEAT,
    ESTIMATED,
    KINDS,
    MEASURED,
    TERMS,
    Result,
    evidence,
    memory_table,
    on_fewer_gpus,
    reason,
    table,
    terms,
)
from megatron_2bw.planner.tell.jobs import by_flag
from megatron_2bw.planner.tell.json_out import as_json
from megatron_2bw.planner.tell.rejections import changed_flags, changes, nearest, nothing_fits, rejections

GPT, LARGER = PRESETS["gpt-355m"], PRESETS["gpt-1.3b"]
P3 = clusters.preset("p3.16xlarge", 1)


def searched(model=GPT, cluster=P3, batch: int = 64, count: int = 8, precision: str = "fp16", **space) -> Result:
    cost, space = Cost(model, cluster, precision), Space(batch, **space)
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
    return searched(GPT, clusters.preset("p3.16xlarge", 2), 70, 12)


RESULTS = ["small", "tight", "apart"]


@pytest.fixture(params=RESULTS)
def result(request) -> Result:
    return request.getfixturevalue(request.param)


# --- tables ----------------------------------------------------------------------------------------------------------


def rows(text: str, first: str) -> list[dict[str, str]]:
    """The lines of a table, as texts by column; `first` is the name of its first column."""
    lines = text.splitlines()
    head = next(number for number, line in enumerate(lines) if re.match(rf" *{first} ", line))
    names = re.split(r" {2,}", lines[head].strip())
    body = itertools.takewhile(lambda line: re.match(r" *\d[\d-]* ", line), lines[head + 1 :])
    found = [re.split(r" {2,}", line.strip()) for line in body]
    assert found and all(len(cells) == len(names) for cells in found)
    return [dict(zip(names, cells)) for cells in found]


def is_shown(text: str, number: float, unit: str = "") -> bool:
    """Whether `text` is the number as rounded as it is printed."""
    shown = text.removesuffix(unit)
    digits = len(shown.partition(".")[2])
    return text.endswith(unit) and not shown.startswith("-0") and abs(float(shown) - number) <= 0.5001 * 10**-digits


def test_every_number_of_the_table_is_the_estimates(result):
    plans, times = table(result).split("\n\n")
    tokens, flops = result.cost.model.sequence, result.cost.model.sample_flops()
    for rank, (row, estimate) in enumerate(zip(rows(plans, "#"), result.estimates, strict=True), 1):
        plan, each = estimate.plan, estimate.throughput / 8 / result.cost.cluster.servers
        assert (
            row["#"] == str(rank) and row["schedule"] == plan.schedule_name and row["recompute"] == plan.recompute_name
        )
        for column, number in (
            ("t", plan.tensor),
            ("d", plan.depth),
            ("w", plan.width),
            ("b", plan.microbatch),
            ("m", plan.microbatches),
            ("batch", plan.global_batch),
        ):
            assert row[column] == str(number)
        # Algorithm 1: g = B / (N b), where one GPU is one stage of one pipeline.
        assert is_shown(row["g"], plan.global_batch / (plan.width * plan.depth * plan.microbatch))
        assert (row["optim."], row["ranks"]) == (
            "sharded" if plan.distributed_optimizer else "whole",
            "pp-dp" if plan.pipeline_inside else "dp-pp",
        )
        layers = plan.layers_of(result.cost.model)
        named = [int(number) for number in row["layers"].split("/")]
        assert named == layers[:1] if len(set(layers)) == 1 else set(named) == set(layers)
        assert is_shown(row["samples/s"], estimate.throughput) and is_shown(row["tok/s/GPU"], each * tokens)
        assert is_shown(row["TF/s/GPU"], each * flops / 1e12)
    for row, estimate in zip(rows(times, "#"), result.estimates, strict=True):
        assert is_shown(row["iteration"], 1e3 * estimate.seconds, " ms")
        for term in TERMS:
            assert is_shown(row[term], 100 * getattr(estimate.split, term) / estimate.seconds, " %")
        assert is_shown(row["heaviest"], max(stage.total for stage in estimate.memory) / GIB, " GiB")
        assert is_shown(row["headroom"], (estimate.capacity - estimate.heaviest) / GIB, " GiB")


def test_the_tables_of_the_tests_show_every_choice(small, tight, apart):
    plans = [estimate.plan for found in (small, tight, apart) for estimate in found.estimates]
    for name in (
        "schedule",
        "tensor",
        "depth",
        "width",
        "microbatch",
        "gradient_slots",
        "distributed_optimizer",
        "first",
        "global_batch",
        "extra_warmup",
    ):
        assert len({getattr(plan, name) for plan in plans}) > 1, name
    assert list(TERMS) == [field.name for field in fields(Split)]
    assert list(KINDS) == [field.name for field in fields(StageMemory)]


def test_the_plans_are_ranked(result):
    rates = [float(row["samples/s"]) for row in rows(table(result), "#")]
    assert rates == sorted(rates, reverse=True) and len(rates) == len(result.estimates)


@pytest.mark.parametrize(
    "plan, name",
    [
        (Plan(1, 4, 2, 1, 8), "2bw"),
        (Plan(1, 4, 2, 1, 8, gradient_slots=1), "2bw 1 slot"),
        (Plan(1, 4, 2, 1, 8, schedule="megatron", virtual=3), "megatron x3"),
        (Plan(1, 4, 2, 1, 8, schedule="pipedream-flush"), "pipedream-flush"),
        (Plan(1, 4, 2, 1, 8, extra_warmup=(0, 2, 1)), "2bw +3"),
        (Plan(1, 4, 2, 1, 8, extra_warmup=(1,)), "2bw +3"),
        (Plan(1, 4, 2, 1, 8, gradient_slots=1, extra_warmup=(1,)), "2bw 1 slot +3"),
        (Plan(1, 4, 2, 1, 8, extra_warmup=(0,)), "2bw"),
        (Plan(1, 4, 2, 1, 8, schedule="gpipe", gpipe_round=3), "gpipe round 3"),
    ],
)
def test_schedules_are_named_with_chunks_slots_extra_warmup_and_round(plan, name):
    assert plan.schedule_name == name and plan.title == f"{name} t1 d4 w2 b1"


@pytest.fixture(scope="module")
def far() -> Result:
    """Long names and numbers: 1,024 GPUs, uneven stages."""
    cost = Cost(PRESETS["gpt-175b"], clusters.preset("dgx-a100-80", 128), "bf16")
    plans = [
        Plan(8, 32, 4, 128, 32, "selective", "pipedream-flush", distributed_optimizer=True, first=10, last=26),
        Plan(8, 16, 8, 128, 16, "selective", "megatron", virtual=6, distributed_optimizer=True),
        Plan(1, 64, 16, 1, 100, "full", gradient_slots=1, first=17, last=17, extra_warmup=(0, 0, 0, 0, 0, 0, 1) * 9),
    ]
    search = Search(cost, Space(16384, schedules=()))
    search.too_large += plans
    search.rejected["heads not divisible by tensor size"] = 123456
    return Result(cost, search.space, [cost.estimate(plan) for plan in plans], search, 1.0)


def test_no_line_is_longer_than_a_terminal(small, tight, apart, far):
    for found in (small, tight, apart, far):
        for text in (
            table(found),
            reason(found),
            rejections(found),
            evidence(found.cost),
            CAVEAT,
            *(memory_table(estimate) for estimate in found.estimates),
        ):
            assert max(map(len, text.splitlines())) <= 120, text
            assert text == text.strip("\n") and text.isascii()


@pytest.mark.parametrize("schedule, depth, collapsed", [("gpipe", 24, True), ("gpipe", 12, False), ("2bw", 24, False)])
def test_the_memory_of_every_stage_is_shown(schedule, depth, collapsed):
    cost = Cost(GPT, clusters.preset("p3.16xlarge", 3), "fp16")
    estimate = cost.estimate(Plan(1, depth, 24 // depth, 1, 24, schedule=schedule))
    seen = []
    for row in rows(memory_table(estimate), "stage"):
        first, _, last = row["stage"].partition("-")
        for number in range(int(first), int(last or first) + 1):
            stage = estimate.memory[number]
            for kind in KINDS:
                assert is_shown(row[kind], getattr(stage, kind) / GIB)
            assert is_shown(row["total"], stage.total / GIB)
            assert is_shown(row["headroom"], (estimate.capacity - stage.total) / GIB)
            seen.append(number)
    assert seen == list(range(depth))
    assert (len(rows(memory_table(estimate), "stage")) < depth) == collapsed


# --- the reason ------------------------------------------------------------------------------------------------------


def estimated(plan: Plan, *split: float, gib: float = 8) -> Estimate:
    """An estimate with these shares of its time: compute, tensor, pipeline, data, update, bubble."""
    memory = StageMemory(gib * GIB, 0, 0, 0, 0, 0)
    return Estimate(plan, sum(split), Split(*split), (memory,), 14 * GIB)


TWO_BW, FLUSH = Plan(1, 8, 1, 1, 8), Plan(1, 8, 1, 1, 8, schedule="pipedream-flush")


def reason_for(*estimates: Estimate, schedules: tuple[str, ...] = ("2bw", "pipedream-flush")) -> str:
    cost = Cost(GPT, P3, "fp16")
    space = Space(8, schedules=schedules)
    return " ".join(reason(Result(cost, space, list(estimates), Search(cost, space), 0.0)).split())


def test_the_reason_is_the_term_that_differs():
    text = reason_for(estimated(TWO_BW, 0.98, 0, 0, 0, 0.02, 0), estimated(FLUSH, 0.98, 0, 0, 0, 0.02, 0.3, gib=6.5))
    assert "2bw t1 d8 w1 b1 is the fastest: 8.0 samples/s" in text
    assert "1.30 times as fast as the best pipedream-flush plan, pipedream-flush t1 d8 w1 b1 (6.2 samples/s)" in text
    assert "takes less for waiting for other stages (23 % there, 0 % here: no stage waits for a flush)." in text
    assert "more for" not in text and "compute" not in text and "optimizer" not in text
    assert "heaviest stage takes 8.0 GiB, there 6.5 GiB" in text


def test_the_reason_is_the_messages_that_extra_warmup_hides():
    ahead, other = replace(TWO_BW, extra_warmup=(1,)), replace(TWO_BW, depth=4, width=2)
    text = reason_for(estimated(ahead, 1, 0, 0, 0, 0, 0), estimated(other, 1, 0, 0.5, 0, 0, 0), schedules=("2bw",))
    assert text.startswith("2bw +7 t1 d8 w1 b1 is the fastest")
    assert "messages between stages (33 % there, 0 % here: extra warm-up hides them)" in text
    text = reason_for(estimated(TWO_BW, 1, 0, 0, 0, 0, 0), estimated(other, 1, 0, 0.5, 0, 0, 0), schedules=("2bw",))
    assert "messages between stages (33 % there, 0 % here)" in text


def test_the_reason_counts_by_sample_for_batches_may_differ():
    half = replace(FLUSH, microbatches=4)
    text = reason_for(estimated(TWO_BW, 1.0, 0, 0, 0, 0, 0), estimated(half, 0.5, 0, 0, 0.5, 0, 0))
    assert "2.00 times as fast" in text and "the reduction of gradients (50 % there, 0 % here)" in text
    assert "compute" not in text


def test_the_reason_says_what_the_winner_pays():
    text = reason_for(
        estimated(TWO_BW, 0.8, 0.1, 0, 0, 0, 0),
        estimated(replace(TWO_BW, depth=4), 0.5, 0.1, 0.4, 0, 0, 0),
        schedules=("2bw",),
    )
    assert "the best plan of another shape, 2bw t1 d4 w1 b1" in text
    assert "takes less for messages between stages (40 % there, 0 % here), but more for compute (50 % there, 8" in text
    assert "tensor" not in text and "flush" not in text


def test_the_reason_blames_a_flush_only_where_there_is_one():
    waits = reason_for(
        estimated(TWO_BW, 1, 0, 0, 0, 0, 0), estimated(replace(TWO_BW, depth=4), 1, 0, 0, 0, 0, 0.5), schedules=("2bw",)
    )
    assert "waiting for other stages (33 % there, 0 % here)" in waits and "flush" not in waits
    reverse = reason_for(estimated(FLUSH, 0.5, 0, 0, 0, 0, 0.1), estimated(TWO_BW, 0.5, 0, 0, 0, 0, 0.5))
    assert "waiting for other stages (50 % there, 10 % here)" in reverse and "no stage waits" not in reverse
    longer = reason_for(estimated(TWO_BW, 1, 0, 0, 0, 0, 0.2), estimated(FLUSH, 1, 0, 0, 0.4, 0, 0))
    assert "more for waiting for other stages (0 % there, 14 % here)." in longer and "no stage waits" not in longer


def test_plans_as_good_as_equal_are_called_that():
    text = reason_for(estimated(TWO_BW, 1, 0, 0, 0, 0, 0), estimated(FLUSH, 1, 0, 0, 0, 0, 0.001))
    assert "It is hardly faster than the best pipedream-flush plan" in text and "No term differs by 2 %." in text


def test_the_rivals_are_the_best_of_every_other_schedule(result):
    winner, *rivals = [result.estimates[0], *result.rivals]
    shape = (winner.plan.tensor, winner.plan.depth, winner.plan.width)
    assert (rivals[0].plan.tensor, rivals[0].plan.depth, rivals[0].plan.width) != shape
    text = " ".join(reason(result).split())
    for schedule in set(result.space.schedules) - {winner.plan.schedule}:
        plans = (plan for _, plan in Search(result.cost, replace(result.space, schedules=(schedule,))))
        if any(estimate.plan.schedule == schedule for estimate in result.estimates):  # where one stage is Megatron's
            plans = (plan for plan in plans if plan.depth > 1 or schedule in ("2bw", "megatron"))
        fastest = next(plans)
        rate = result.cost.estimate(fastest).throughput
        assert rate in [rival.throughput for rival in rivals if rival.plan.schedule == schedule]
        assert f"{fastest.title} ({rate:.1f} samples/s)" in text
        assert f"{winner.throughput / rate:.2f} times" in text or round(winner.throughput / rate, 2) == 1


def test_a_part_of_the_cluster_that_is_faster_is_named():
    """A batch of five fills five GPUs. Six run only three samples of it, since three do not divide the layers."""
    model, space = replace(GPT, layers=20), dict(batch=5, tensor=(1,), uneven=False)
    each = {n: searched(model, replace(P3, gpus_per_server=n), **space) for n in range(1, 7)}
    rates = {n: result.estimates[0].throughput for n, result in each.items()}
    cluster, estimate = each[6].fewer
    assert max(rates, key=rates.get) == cluster.gpus == 5 and estimate.throughput == rates[5]
    line = " ".join(on_fewer_gpus(each[6]).split())
    assert f"({rates[5]:.1f} samples/s)" in line and line.endswith("--servers 1 --gpus-per-server 5")
    assert as_json(each[6])["fewer_gpus"]["gpus_per_server"] == 5
    assert each[5].fewer is as_json(each[5])["fewer_gpus"] is None and "No part" in on_fewer_gpus(each[5])


@pytest.mark.parametrize("servers", [1, 3, 8, 12])
def test_every_smaller_part_is_searched(servers, monkeypatch):
    searched_on = []
    monkeypatch.setattr(
        "megatron_2bw.planner.find.search.Search", lambda cost, *_, **__: searched_on.append(cost) or []
    )
    assert on_fewer(Cost(GPT, clusters.preset("p3.16xlarge", servers), "fp16"), Space(8)) is None
    sizes = {(cost.cluster.servers, cost.cluster.gpus_per_server) for cost in searched_on}
    whole = {1: set(), 3: {1, 2}, 8: set(range(1, 8)), 12: {8, 6, 3, 1}}[servers]
    assert sizes == {(n, 8) for n in whole} | {(servers, n) for n in range(1, 8)}


def test_a_schedule_without_a_plan_is_named():
    found = searched(LARGER, schedules=("2bw", "pipedream"), depth=(8,), recompute=("none",), microbatch=(4,))
    assert [rival.plan.schedule for rival in found.rivals].count("pipedream") == 0
    assert reason(found).endswith("- No plan of pipedream is legal and fits.")


# --- what was left out -----------------------------------------------------------------------------------------------


def test_rejections_are_counted_by_cause(tight):
    found = searched(replace(GPT, heads=12, groups=12, head_size=64), batch=4)
    text = rejections(found)
    assert found.search.rejected
    for cause, count in found.search.rejected.items():
        assert re.search(rf"^ +{count}  {re.escape(cause)}$", text, re.MULTILINE)
    for cause, message in found.search.examples.items():
        assert cause in found.search.rejected and "--" in message and message in " ".join(text.split())
    assert f"of the table: {len(tight.search.too_large)}\n" in rejections(tight)


def test_the_nearest_change_is_reported_with_its_flags(tight):
    text = " ".join(rejections(tight).split())
    large = next(plan for plan in tight.search.too_large if nearest(tight.cost, plan))
    change = nearest(tight.cost, large)
    need = tight.cost.memory.heaviest(large) / GIB
    assert f"{large.title} would reach {tight.cost.estimate(large).throughput:.1f} samples/s" in text
    assert f"needs {need:.2f} GiB, and {tight.cost.allowed(large) / GIB:.2f} GiB are allowed" in text
    flags = changed_flags(large, change.plan, "fp16")
    assert f"The nearest change that fits: {flags} ({change.throughput:.1f} samples/s, " in text


def test_the_nearest_change_is_the_fastest_single_one_that_is_legal_and_fits(tight):
    cost, told_ = tight.cost, 0
    for plan in tight.search.too_large:
        assert not cost.fits(plan)
        change = nearest(cost, plan)
        usable = [other for other in changes(plan) if is_legal(other, LARGER, 8, "fp16", False) and cost.fits(other)]
        if not usable:
            assert change is None
            continue
        told_ += 1
        assert change.plan in usable and change.headroom >= 0
        assert change.throughput == max(cost.estimate(other).throughput for other in usable)
    assert told_


@pytest.mark.parametrize(
    "plan",
    [
        Plan(2, 2, 2, 4, 8, sequence_parallel=True),
        Plan(1, 2, 4, 4, 8, "selective", first=11, last=13),
        Plan(2, 4, 1, 1, 8, "full", "gpipe", distributed_optimizer=True, sequence_parallel=True),
        Plan(1, 4, 2, 2, 8, schedule="megatron", virtual=2),
        Plan(1, 4, 2, 2, 8, extra_warmup=(0, 1, 0)),
        Plan(1, 4, 2, 2, 8, schedule="gpipe", gpipe_round=3),
    ],
    ids=lambda plan: plan.title,
)
def test_changes_keep_the_gpus_and_the_batch_and_their_flags_say_what_to_type(plan):
    found = list(changes(plan))
    assert len(set(found)) == len(found) >= 2 and plan not in found
    for change in found:
        assert (change.gpus, change.global_batch) == (plan.gpus, plan.global_batch)
        typed, _, without = changed_flags(plan, change, "fp16").partition("without ")
        flags = {flag[0]: flag for flag in by_flag(plan.flags("fp16"))}
        flags |= {flag[0]: flag for flag in by_flag(typed.split())}
        for flag in without.split(" and ") if without else []:
            del flags[flag]
        assert flags == {flag[0]: flag for flag in by_flag(change.flags("fp16"))}


def test_every_kind_of_change_is_tried():
    plan = Plan(2, 2, 2, 4, 8, sequence_parallel=True)
    texts = {changed_flags(plan, change, "bf16") for change in changes(plan)}
    assert texts == {
        "--recompute-granularity selective",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--use-distributed-optimizer",
        "--two-bw-gradient-slots 1",
        "--pipeline-schedule pipedream-flush",
        "--micro-batch-size 2",
        "--pipeline-model-parallel-size 4",
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 without --sequence-parallel",
    }
    ahead = replace(plan, extra_warmup=(1,))
    assert {changed_flags(ahead, change, "bf16") for change in changes(ahead)} - texts == {
        "without --two-bw-extra-warmup",
        "--pipeline-schedule pipedream-flush without --two-bw-extra-warmup",
        "--pipeline-model-parallel-size 4 without --two-bw-extra-warmup",
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 without --sequence-parallel and "
        "--two-bw-extra-warmup",
    }
    corrected = replace(plan, extrapolate=True)
    assert {changed_flags(corrected, change, "bf16") for change in changes(corrected)} - texts == {
        "without --two-bw-correction",
        "--pipeline-schedule pipedream-flush without --two-bw-correction",
    }


def test_a_hopeless_plan_gets_no_advice():
    found = searched(PRESETS["gpt-28.3b"], count=1)
    assert not found.estimates and found.search.too_large
    assert nearest(found.cost, found.search.too_large[0]) is None
    del found.search.too_large[1:]
    assert "No single change of it is legal and fits." in " ".join(rejections(found).split())


# --- nothing fits ----------------------------------------------------------------------------------------------------


def failed(model, cluster, space: Space, precision: str = "fp16") -> tuple[str, Cost, Search]:
    cost = Cost(model, cluster, precision)
    search = Search(cost, space)
    assert not list(search)
    text = nothing_fits(cost, space, search)
    assert "\n" not in text and text.endswith(".")
    return text, cost, search


def test_where_nothing_fits_the_memory_and_the_servers_that_are_named_suffice():
    model, space = PRESETS["gpt-28.3b"], Space(16)
    text, cost, search = failed(model, P3, space)
    plan = min(search.too_large, key=cost.gpu_bytes)
    need, allowed = cost.memory.heaviest(plan) / GIB, cost.allowed(plan) / GIB
    assert f"needs {need:.2f} GiB on its heaviest stage (ESTIMATED), and {allowed:.2f} GiB of 15.8 GiB" in text
    memory = float(re.search(r"GPUs of ([\d.]+) GiB or more", text)[1])
    for gib, fits in ((memory, True), (memory - 0.1, False)):
        larger = Cost(model, replace(P3, device=replace(P3.device, memory_gib=gib)), "fp16")
        assert any(map(larger.fits, search.too_large)) == fits
    servers = int(re.search(r"or (\d+) servers", text)[1])
    for number, fits in ((servers, True), (servers // 2, False)):
        more = Cost(model, replace(P3, servers=number), "fp16")
        assert (left_out._fitting(more, space) is not None) == fits
    assert best(Cost(model, replace(P3, servers=servers), "fp16"), replace(space, microbatch=(1,)))


def test_the_choices_that_the_flags_exclude_may_help():
    text, cost, _ = failed(
        LARGER, P3, Space(64, recompute=("none",), depth=(1,), tensor=(1,), distributed_optimizer=(False,))
    )
    flags = re.search(r"the flags exclude: (--\S.*?); or|the flags exclude: (--\S.*?)\.$", text)
    words = (flags[1] or flags[2]).split()
    assert "servers" not in text
    values = {flag[0]: flag[1:] for flag in by_flag(words)}
    plan = next(plan for plan in _all(cost, Space(64)) if plan.flags("fp16") == words)
    assert cost.fits(plan) and values["--global-batch-size"] == ["64"]


def _all(cost: Cost, space: Space):
    search = Search(cost, space)
    for shape in search.shapes():
        for first, last in search.splits(shape.depth):
            for plan in search.scheduled(replace(shape, first=first, last=last)):
                yield from search.variants(plan)


def test_where_nothing_is_legal_the_causes_are_reported():
    text, _, search = failed(GPT, P3, Space(2, depth=(1,), tensor=(1,)))
    assert text.startswith("No plan is legal on 8 GPUs with a global batch of 2: ") and search.rejected
    assert "the global batch is smaller than the data-parallel size" in text


# --- evidence and JSON -----------------------------------------------------------------------------------------------


def profiled():
    shape = {field.name: getattr(GPT, field.name) for field in fields(Profile) if hasattr(GPT, field.name)}
    points = (BlockTime(1, 1e-3, 2e-3),)
    step = {"optimizer": "Megatron's with apex's FusedAdam", "optimizer_seconds_per_parameter": 1e-10}
    made = {"threads": 1, "made_with": "by hand"}
    times = Profile("a GPU", "fp16", "gpt", **shape, blocks=points, output=points, **step, **made)
    return replace(P3, profile=times)


def measured(cluster, inside: bool, between: bool):
    return replace(
        cluster, inside=replace(cluster.inside, measured=inside), between=replace(cluster.between, measured=between)
    )


LINKED = ("tensor", "pipeline", "data")


@pytest.mark.parametrize(
    "cluster, found",
    [
        (P3, set()),
        (profiled(), {"compute", "update"}),
        (measured(P3, True, False), set(LINKED)),
        (measured(P3, False, True), set()),
        (measured(replace(P3, servers=2), True, False), set()),
        (measured(replace(P3, servers=2), True, True), set(LINKED)),
        (measured(profiled(), True, True), {"compute", "update", *LINKED}),
    ],
)
def test_every_term_says_whether_it_was_measured(cluster, found):
    cost = Cost(GPT, cluster, "fp16")
    tags = {term: tag for term, (tag, _) in terms(cost).items()}
    assert tags == {term: MEASURED if term in found else ESTIMATED for term in (*TERMS, "memory")}
    lines = {line.split()[0]: line.split()[1] for line in evidence(cost).splitlines() if not line.startswith(" ")}
    assert lines == tags
    space = Space(64)
    text = table(Result(cost, space, [cost.estimate(Plan(1, 2, 4, 8, 2))], Search(cost, space), 0.0))
    for term, tag in tags.items():
        assert re.search(rf"{tag}: [a-z, ]*\b{term}\b", text)


def test_the_evidence_names_both_links_and_the_calibration():
    text = " ".join(evidence(Cost(GPT, measured(replace(P3, servers=2), True, False), "fp16")).split())
    links = r"inside servers 135 GB/s \(2 GPUs 22.5, 4 GPUs 85\), 4 us MEASURED; between servers .* us ESTIMATED update"
    assert re.search(f"data ESTIMATED {links}", text)
    assert P3.device.calibration in text
    assert "between" not in evidence(Cost(GPT, P3, "fp16"))


def test_the_json_is_plain_and_whole(result):
    written = as_json(result)
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert written["model"] == asdict(result.cost.model) and written["cluster"]["device"]["name"] == "V100-16GB"
    assert (written["precision"], written["margin"], written["search_seconds"]) == ("fp16", result.cost.margin, 0.25)
    assert written["space"]["batch"] == result.space.batch and written["examined"] == result.search.examined
    assert written["rejected"] == dict(result.search.rejected)
    assert written["too_large"]["count"] == len(result.search.too_large)
    assert set(written["evidence"]) == {*TERMS, "memory"} and written["caveat"] == CAVEAT
    for plan, estimate in zip(written["plans"], result.estimates, strict=True):
        names = [field.name for field in fields(Plan)]
        given = {name: tuple(plan[name]) if isinstance(plan[name], list) else plan[name] for name in names}
        assert Plan(**given) == estimate.plan
        assert (plan["seconds"], plan["samples_per_second"]) == (estimate.seconds, estimate.throughput)
        assert plan["tokens_per_second"] == pytest.approx(estimate.throughput * result.cost.model.sequence)
        assert plan["split"] == asdict(estimate.split) and plan["flags"] == estimate.plan.flags("fp16")
        assert [stage["total"] for stage in plan["memory"]] == [stage.total for stage in estimate.memory]
        assert (plan["global_batch"], plan["headroom"]) == (estimate.plan.global_batch, estimate.headroom)


def test_the_json_holds_the_nearest_change_and_survives_a_profile(tight):
    nearer = as_json(tight)["too_large"]
    assert nearer["fastest"]["headroom"] < 0 <= nearer["nearest"]["headroom"]
    assert json.dumps(as_json(searched(cluster=profiled())), allow_nan=False)
    empty = as_json(replace(tight, estimates=[]))
    assert empty["plans"] == []


def test_the_caveat_names_the_delay_and_the_batch():
    for words in ("largest", "safe for convergence", "late by one update", "learning rate", "larger"):
        assert words in CAVEAT
