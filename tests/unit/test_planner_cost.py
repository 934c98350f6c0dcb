"""The planner's times: places by Megatron's rank order, links and layers by hand, and
the parts of an iteration."""

import functools
import itertools
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from pytest import approx

from megatron_2bw.tools.planner.cost.communication import (
    START,
    Group,
    all_reduce,
    all_to_all,
    layout,
    message,
    scatter_or_gather,
)
from megatron_2bw.tools.planner.cost.compute import FILL, Compute, MicrobatchTime
from megatron_2bw.tools.planner.cost.memory import LINK, PAIR
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions.cluster import Cluster, Device, Link
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.plan import Plan
from tests.unit.test_planner_search import SCHEDULED, planned, property_of

GPT = Model("gpt", 8, 1024, 16, vocab=50304, sequence=512)
# Round numbers: 10¹² operations and 10¹¹ bytes a second, one unit, and a host that
# takes no time.
HOST = dict(layer_launch_us=0.0, collective_launch_us=0.0, exchange_us=0.0, step_us=0.0)
SHARES = dict(gemm_efficiency=0.5, memory_efficiency=0.5)
DEVICE = Device("round", 80, 2.0, 200, tflops_fp32=1.0, units=1, **SHARES, **HOST)
CLUSTER = Cluster("round", 2, 8, DEVICE, Link(100, 10), Link(25, 50))
PLAN = Plan(1, 4, 2, 2, 8)
QUARTER = dict(tensor=4, depth=2, width=2)
HIDDEN = 2 * 512 * 1024 * 2  # bytes of a message


# --- where ranks lie
# --------------------------------------------------------------------------------------

# initialize.py's, and with --use-tp-pp-dp-mapping
ORDERS = {False: "tp-cp-ep-dp-pp", True: "tp-cp-ep-pp-dp"}


@functools.cache
def groups(
    tensor: int, depth: int, width: int, inside: bool, context: int = 1, expert: int = 1
) -> dict[str, list[list[int]]]:
    """Ranks of Megatron's groups: of tensor, context, expert and data parallelism,
    replicas, and pipelines."""
    from megatron.core.parallel_state import RankGenerator

    made = RankGenerator(
        tp=tensor, ep=expert, dp=width, pp=depth, cp=context, order=ORDERS[inside]
    )
    return {name: made.get_ranks(name) for name in ("tp", "cp", "ep", "dp-cp", "pp")}


def described(kind: list[list[int]], per_server: int) -> Group:
    """The group of rank 0, and how many of its kind leave one server at once."""
    places = [{rank // per_server for rank in ranks} for ranks in kind]
    sharing = [
        sum(server in servers and len(servers) > 1 for servers in places)
        for server in set().union(*places)
    ]
    return Group(len(kind[0]), len(places[0]), max(max(sharing), 1))


def leaving(pipelines: list[list[int]], stage: int, per_server: int) -> int:
    """Messages from `stage` to the next one that leave the same server, at most."""
    counts: dict[int, int] = {}
    for ranks in pipelines:
        source = ranks[stage] // per_server
        target = ranks[(stage + 1) % len(ranks)] // per_server
        if source != target:
            counts[source] = counts.get(source, 0) + 1
    return max(counts.values(), default=0)


SIZES = [*itertools.product((1, 2, 4, 8), (1,), (1, 2, 4, 8, 16), (1, 2, 4, 8))]
SIZES += itertools.product((1, 2), (2, 4), (1, 4), (1, 2, 4))


@pytest.mark.parametrize("per_server", [1, 4, 8])
@pytest.mark.parametrize("inside", ORDERS)
def test_groups_and_boundaries_lie_as_in_megatrons_rank_order(inside, per_server):
    for tensor, context, depth, width in SIZES:
        if tensor * context * depth * width > 64:
            continue
        made = groups(tensor, depth, width, inside, context)
        place = layout(tensor, depth, width, inside, per_server, context)
        assert place.tensor == described(made["tp"], per_server), (tensor, depth, width)
        assert place.data == described(made["dp-cp"], per_server), (
            tensor,
            depth,
            width,
        )
        assert context == 1 or place.context == described(made["cp"], per_server)
        for expert in (2, 4):
            if not inside and context * width % expert == 0:
                routed = groups(
                    tensor, depth, context * width // expert, inside, expert=expert
                )
                place = layout(
                    tensor, depth, width, inside, per_server, context, expert
                )
                kinds = (
                    described(routed["ep"], per_server),
                    described(routed["dp-cp"], per_server),
                )
                assert (place.experts, place.same) == kinds, (
                    tensor,
                    context,
                    depth,
                    width,
                    expert,
                )
        crossings = [leaving(made["pp"], stage, per_server) for stage in range(depth)]
        assert list(place.boundaries) == crossings, (tensor, depth, width)
        if depth > 1:
            ends = described(
                [[ranks[0], ranks[-1]] for ranks in made["pp"]], per_server
            )
            assert (place.ends.size, place.ends.servers, place.ends.sharers) == (
                2,
                ends.servers,
                ends.sharers,
            )


# --- links
# --------------------------------------------------------------------------------------


def test_all_reduces_by_hand():
    # Inside a server a ring: 2 · 7/8 of 8 GB at 100 GB/s, 14 steps of 10 µs, and the
    # start of a collective. Of one rank of each server: the network has it alone (25
    # GB/s), and a tree has 2 log₂ 4 steps of 50 µs. With both the slower link decides,
    # the latencies add.
    begin = START * 1e-6
    latency = (14 * 10 + 2 * 50) * 1e-6 + begin
    fast = replace(CLUSTER, between=Link(1000, 50))
    for cluster, group, seconds in (
        (CLUSTER, (1, 1, 1), 0),
        (CLUSTER, (8, 1, 1), 14 / 100 + 14 * 10e-6 + begin),
        (CLUSTER, (4, 4, 1), 12 / 25 + 4 * 50e-6),
        (CLUSTER, (4, 4, 8), 12 / 25 * 8 + 4 * 50e-6),
        (CLUSTER, (16, 2, 1), 15 / 25 + latency),
        (fast, (16, 2, 1), 15 / 100 + latency),
    ):
        assert all_reduce(cluster, Group(*group), 8e9) == approx(seconds, rel=1e-9)


def test_all_gathers_by_hand():
    # They have half of the bytes; of the 15 steps of a ring one is between the servers.
    ring = (14 * 10 + 50 + START) * 1e-6
    assert scatter_or_gather(CLUSTER, Group(16, 2, 1), 8e9) == approx(
        7.5 / 25 + ring, rel=1e-9
    )
    # over 16 servers or more; geometric before
    shared = replace(CLUSTER, between=Link(25, 0, many_gb_s=6.4))
    for servers, rate in ((2, 25), (4, 15.874), (16, 6.4), (64, 6.4)):
        seconds = (servers - 1) / servers * 8 / rate
        assert scatter_or_gather(shared, Group(servers, servers, 1), 8e9) == approx(
            seconds, rel=1e-4
        )


def test_megatron_overlaps_all_buckets_but_one():
    """Buckets of 40 million parameters; with more than 40 replicas of a million for
    each."""
    # 202 million parameters: 6 buckets
    model = Model("one layer", 1, 4096, 32, vocab=128, tied=False)
    for width, buckets in ((8, 6), (128, 2)):
        cost = Cost(model, replace(CLUSTER, servers=width // 8))
        plan = Plan(1, 1, width, 1, 1, schedule="megatron", distributed_optimizer=True)
        own = cost._step(plan).reduce[0]
        whole = own + (buckets - 1) * scatter_or_gather(
            CLUSTER, cost.compute.layout(plan).data, 0
        )
        for hidden, shown in (
            (1e9, whole / buckets),
            (whole / 9, whole - whole / 9 * (buckets - 1) / buckets),
        ):
            assert cost._exposed(plan, 0, own, hidden) == approx(shown)


def test_rails():
    """A server with 8 cards: a message takes one."""
    railed = replace(CLUSTER, between=Link(160, 20, rails=8))
    # inside; 20 GB/s of one card; each has a card of its own; two share one
    for leaving, seconds, latency in (
        (0, 0.02, 10e-6),
        (1, 0.1, 20e-6),
        (8, 0.1, 20e-6),
        (16, 0.2, 20e-6),
    ):
        assert message(railed, leaving, 2e9) == approx((seconds + latency, seconds))
    # without cards that are counted all share
    assert message(CLUSTER, 8, 2e9)[1] == approx(8 * 2 / 25)
    for sharers in (1, 8):
        seconds = all_reduce(railed, Group(2, 2, sharers), 2e9)
        assert seconds == approx(0.1 + 2 * 20e-6)


# --- compute
# --------------------------------------------------------------------------------------

# One layer of GPT on 2 samples: 1024 tokens, h 1024, 16 heads, flash attention.
# Operations of the forward: the products, each sum longer by FILL, and half of the
# scores.
SCORES = 2 * 2**10 * 2**9 * 2**10
FILLED = 2 * 2**10 * FILL * (3072 + 1024 + 4096 + 1024)
ARITHMETIC = 24 * 2**10 * 2**20 + SCORES
# bytes: what the backward needs, written and read
TRAFFIC = 2 * (34 * 2**20 + 4 * 2**10 * 16)
# operations in which half of the units idle
LAST_FORWARD = 2**15 * (1024 + 1024 + 1024 + 4096)
LAST_BACKWARD = 2**15 * (3072 + 1024 + 4096 + 1024 + 4 * 1024)
# gradients of inputs and of weights
FILLED_BACK = 2 * FILL * (2**10 * (1024 + 1024 + 1024 + 4096) + 12 * 2**20)


def compute(model: Model = GPT, precision="bf16", flash=True, **cluster) -> Compute:
    return Compute(model, replace(CLUSTER, **cluster), precision, flash)


def layer(
    device: Device = DEVICE, precision="bf16", flash=True, model: Model = GPT, **plan
) -> MicrobatchTime:
    there = compute(model, precision, flash, device=device)
    return there.layer(replace(PLAN, **plan))


def test_a_layers_roofline_by_hand():
    work = layer()
    forward = ARITHMETIC + FILLED + LAST_FORWARD
    assert work.forward == approx(forward / 1e12 + TRAFFIC / 1e11, rel=1e-12)
    backward = 2 * ARITHMETIC + FILLED_BACK + LAST_BACKWARD
    assert work.backward == approx(backward / 1e12 + TRAFFIC / 1e11, rel=1e-12)
    assert work.tensor == 0
    assert work.forward == approx(31.5e-3, rel=2e-2)

    def longer(**changes) -> float:
        return layer(**changes).forward - work.forward

    assert longer(device=replace(DEVICE, units=100)) == approx(99 * LAST_FORWARD / 1e12)
    stored = 2 * (5 * 16 * 512**2 * 2 - 65536) / 1e11
    # without the mask's half
    assert longer(flash=False) == approx(SCORES / 1e12 + stored)
    assert longer(model=replace(GPT, kind="bert")) == approx(SCORES / 1e12)
    # of the peak, 2 · 10¹²
    faster = layer(device=replace(DEVICE, attention_efficiency=0.75))
    saved = work.forward - faster.forward
    assert saved == approx(SCORES / 1e12 - SCORES / 1.5e12)
    assert work.backward - faster.backward == approx(2 * saved)
    # half the peak, and 66 bytes instead of 34
    further = forward / 1e12 + 2 * 32 * 2**20 / 1e11
    assert longer(precision="fp32") == approx(further)


def test_the_host_bounds_a_short_layer():
    slow = replace(DEVICE, layer_launch_us=1e6, collective_launch_us=1e5)
    assert astuple(layer(slow)) == (1.0, 1.5, 0.0)
    work = layer(slow, tensor=2, depth=2, width=2, sequence_parallel=True)
    assert (work.forward, work.backward) == approx((1.4, 2.1))


def test_recompute_adds_a_forward_of_what_it_leaves_out():
    none = layer(flash=False)
    selective = layer(recompute="selective", flash=False)
    assert none.forward == selective.forward
    scores = 4 * 2**10 * 2**9 * 2**10 / 1e12 + 2 * 5 * 16 * 512**2 * 2 / 1e11
    assert selective.backward - none.backward == approx(scores, rel=1e-9)
    none = layer(**QUARTER)
    full = layer(**QUARTER, recompute="full")
    assert full.backward - none.backward == approx(none.forward, rel=1e-12)
    assert full.tensor == approx(1.5 * none.tensor)
    assert none.tensor > 0


def test_tensor_parallelism_divides_a_layer_and_adds_two_all_reduces_a_pass():
    quarter = layer(**QUARTER)
    pair = 2 * all_reduce(CLUSTER, Group(4, 1, 1), HIDDEN)
    assert quarter.tensor == approx(2 * pair)
    traffic = 2 * ((10 + 24 / 4) * 2**20 + 2**16 / 4)
    idle = 2**15 * (1024 + 256 + 1024 + 1024)
    filled = 2 * 2**10 * FILL * (768 + 1024 + 1024 + 1024)
    seconds = ARITHMETIC / 4e12 + traffic / 1e11 + (idle + filled) / 1e12 + pair
    assert quarter.forward == approx(seconds, rel=1e-12)
    parted = layer(**QUARTER, sequence_parallel=True)
    assert parted.tensor == approx(
        8 * scatter_or_gather(CLUSTER, Group(4, 1, 1), HIDDEN)
    )


def test_experts_by_hand():
    """Two experts, with all tokens each, and the router's product; on two ranks each
    has one."""
    mixture = replace(GPT, experts=2, bias=False)
    whole = layer(model=mixture)
    parted = layer(model=mixture, expert=2)
    dense = layer(model=replace(GPT, bias=False))
    compute = Compute(mixture, CLUSTER, "bf16", True)
    tokens = 2**10
    mlp = compute.product(tokens, 1024, 4096) + compute.product(tokens, 4096, 1024)
    # a second expert; what goes there and back; the router
    stored = tokens * (2 * (2 * 4096 + 2 * 2 * 1024) + 8 * 2)
    more = mlp + compute.product(tokens, 1024, 2) + 2 * stored / 1e11
    assert whole.forward - dense.forward == approx(more)
    assert whole.tensor == 0
    sent = all_to_all(CLUSTER, Group(2, 1, 1), 2 * tokens * 1024 * 2)
    assert parted.tensor == approx(4 * sent)
    # eight ranks send 8 GB each over 25 GB/s
    apart = all_to_all(CLUSTER, Group(16, 2, 1), 16e9)
    assert apart == approx(8 * 8 / 25, rel=1e-3)
    plan = Plan(1, 2, 8, 1, 4, expert=4, distributed_optimizer=True)
    stage = Cost(replace(mixture, experts=8), CLUSTER).memory.stage(plan, 1, 4)
    each = 4 * 2 * (2 * 1024 * 4096)
    rest = 4 * (4 * 1024**2 + 8 * 1024 + 2 * 2 * 1024) + 2 * 1024 + 50304 * 1024
    assert stage.weights == 4 * (each + rest)
    assert stage.gradients == 8 * (each + rest)
    assert stage.optimizer == 12 * (each / 2 + rest / 8)


# --- a plan's time
# --------------------------------------------------------------------------------------


def test_what_the_simulator_is_given_by_hand():
    cost = Cost(GPT, CLUSTER, flash=True)
    times = cost.times(PLAN)
    each = cost.compute.layer(PLAN)
    h = 1024
    assert times.forward[1] == times.forward[2] == approx(2 * each.forward)
    assert times.forward[0] > times.forward[1] < times.forward[3]
    # all on one server
    assert times.transfer == approx([HIDDEN / 100e9 + 10e-6] * 4)
    parameters = 2 * (12 * h * h + 13 * h)
    # Of 4 bytes, 2 · 1/2 of them sent; two steps, and the start of a collective.
    latency = (2 * 10 + START) * 1e-6
    assert times.reduce[1] == approx(4 * parameters / 100e9 + latency)
    pair = Group(2, 1, 1)
    words = all_reduce(CLUSTER, pair, 50304 * h * 4)
    first = all_reduce(CLUSTER, pair, 4 * (parameters + 50304 * h + 512 * h))
    assert times.reduce[0] == approx(first + words)
    assert times.overlap_cost[1] == approx(34 * parameters / 1e11)
    flush = cost.times(replace(PLAN, schedule="pipedream-flush"))
    assert not any(flush.overlap_cost)
    assert flush.step == max(times.overlap_cost)


def test_messages_between_servers_and_megatrons_exchange():
    cluster = replace(CLUSTER, device=replace(DEVICE, exchange_us=100.0))
    cost = Cost(GPT, cluster, flash=True)
    plan = Plan(1, 4, 4, 2, 8)
    # four replicas send at once
    inside = HIDDEN / 100e9 + 10e-6
    between = HIDDEN * 4 / 25e9 + 50e-6
    times = cost.times(plan)
    assert times.transfer == approx([inside, between] * 2)
    assert times.occupied == approx([HIDDEN / 100e9, 4 * HIDDEN / 25e9] * 2)
    megatron = replace(plan, schedule="megatron")
    sending = cost.times(megatron).sending
    assert sending == approx([inside + 1e-4, between + 1e-4] * 2)
    interleaved = cost.times(replace(megatron, virtual=2))
    assert interleaved.sending == approx([1e-4] * 4)
    plan = Plan(2, 4, 2, 2, 8)
    part = HIDDEN / 2 / 100e9
    assert cost.times(plan).occupied[0] == approx(2 * part)
    divided = replace(plan, sequence_parallel=True)
    assert cost.times(divided).occupied[0] == approx(part)


def test_the_distributed_optimizer_halves_the_reduction_and_gathers():
    cost = Cost(replace(GPT, tied=False), CLUSTER, flash=True)
    plan = replace(PLAN, width=4)
    whole = cost.times(plan)
    sharded = cost.times(replace(plan, distributed_optimizer=True))
    halves = [(seconds + START * 1e-6) / 2 for seconds in whole.reduce]
    assert sharded.reduce == approx(halves)
    most = max(cost.memory.parameters(PLAN, stage, 2) for stage in range(4))
    gather = scatter_or_gather(CLUSTER, Group(4, 1, 1), 2 * most)
    assert sharded.step - whole.step == approx(gather)
    share = (28 / 4 + 6) / 34
    assert sharded.overlap_cost[1] == approx(share * whole.overlap_cost[1])


@property_of(120)
@given(planned(SCHEDULED.filter(lambda schedule: schedule[0] != "pipedream")))
def test_the_parts_of_an_iteration_sum_to_its_seconds(case):
    """2bw with two gradient slots has no bubble, and a schedule with a flush has one
    where all stages are alike."""
    cost, plan = case
    estimate = cost.estimate(plan)
    split = estimate.split
    assert estimate.seconds == cost.seconds(plan) >= cost.lower_bound(plan)
    assert min(astuple(split)) >= 0
    assert sum(astuple(split)) == approx(estimate.seconds, rel=0.01)
    work = plan.microbatches * max(work.total for work in cost.stages(plan))
    assert split.compute + split.tensor == approx(work)
    assert cost.fits(plan) == (estimate.heaviest <= estimate.capacity)
    if plan.schedule != "2bw":
        assert split.bubble > 0 or plan.depth == 1 or plan.first
    elif plan.memory == "two-slots" or plan.depth == 1:
        assert split.bubble <= 1e-9 * estimate.seconds


@pytest.mark.parametrize("memory, width", [("host", 1), ("two-slots", 4)])
def test_a_plan_has_as_many_late_microbatches_as_hide_its_step(memory, width):
    cost = Cost(
        GPT, replace(CLUSTER, between=Link(2, 50), device=replace(DEVICE, tflops=40.0))
    )
    plan = Plan(1, 4, width, 1, 64, late=64, corrected=True, memory=memory)
    late = cost.enough_late(plan)
    hidden = cost.seconds(plan.changed(late=late))
    assert hidden == approx(cost.seconds(plan), rel=1e-3)
    assert cost.seconds(plan.changed(late=late // 2)) > 1.01 * hidden


@pytest.mark.parametrize("gb_s, hidden", [(400, True), (0.1, False)])
def test_a_microbatch_hides_the_sums_of_a_prediction(gb_s, hidden):
    cost = Cost(GPT, replace(CLUSTER, inside=Link(gb_s, 10)))
    plan = Plan(1, 4, 4, 1, 16, corrected=True)
    plain = cost.times(plan.changed(corrected=False))
    predicted = cost.times(plan)
    alone = cost.compute.prediction(cost.memory.owned(plan, 3, plan.layers_of(GPT)[3]))
    more = predicted.overlap_cost[3] - plain.overlap_cost[3]
    assert hidden == (more == approx(alone))
    slowest = max(work.total for work in cost.stages(plan))
    assert predicted.step == plain.step + slowest


def fits(plan: Plan, memory: float, **options: float) -> bool:
    return Cost(
        GPT,
        replace(CLUSTER, device=replace(DEVICE, memory_gib=memory / 2**30)),
        **options,
    ).fits(plan)


def test_without_a_margin_context_fragmentation_and_communicators_are_counted():
    # a width of two: Megatron's and 2BW's data-parallel groups
    plan = replace(PLAN, microbatch=32)
    cost = Cost(GPT, CLUSTER)
    # both have one for the ends too; half of an A100's channels
    held = 3 * LINK + 2 * (PAIR + PAIR) / 2
    assert cost.capacity - cost.allowed(plan) == approx(held)
    least = 1.12 * (cost.memory.heaviest(plan) + held) + 0.75 * 2**30
    assert cost.gpu_bytes(plan) == approx(least)
    assert fits(plan, least + 1e6)
    assert not fits(plan, least - 1e6)
    alone = Cost(GPT, replace(CLUSTER, device=replace(DEVICE, name="cpu")))
    usable = DEVICE.memory_gib * 2**30 / 1.12
    assert alone.allowed(plan) == alone.capacity == approx(usable)


# --- context parallelism
# --------------------------------------------------------------------------------------


def parts(
    context: int,
    between: float = 25.0,
    per_server: int = 8,
    sequence: int = 512,
    **fields,
) -> Cost:
    servers = replace(
        CLUSTER,
        servers=8 // per_server,
        gpus_per_server=per_server,
        between=Link(between, 0.0),
    )
    return Cost(
        replace(GPT, sequence=sequence, groups=4),
        replace(servers, inside=Link(1e9, 0.0)),
        flash=True,
    )


def test_a_part_of_the_sequences_takes_its_share_of_work_and_memory_where_links_take_no_time():
    cost = parts(1)
    whole = Plan(1, 2, 4, 4, 8)
    part = Plan(1, 2, 1, 4, 8, context=4)
    # 4 samples in 4 parts
    one = cost.compute.layer(replace(whole, microbatch=1))
    four = cost.compute.layer(part)
    assert four.total == approx(one.total)
    assert four.tensor == approx(0, abs=1e-9)
    kept, working = cost.memory.layer(replace(whole, microbatch=1))
    assert cost.memory.layer(part)[0] == kept
    # K, V and their gradients, two parts
    assert cost.memory.layer(part)[1] == working + 4 * (2 * 512 * 4 * 64 * 2)
    assert cost.memory.heaviest(part) < cost.memory.heaviest(whole)
    assert cost.messages(part)[0][1] == approx(cost.messages(whole)[0][1] / 4)


def test_the_ring_of_keys_and_values_takes_what_the_attention_does_not_hide():
    slow_links = parts(4, between=0.01, per_server=1)
    plan = Plan(1, 1, 2, 2, 1, context=4, schedule="megatron")
    # keys and values of two samples' quarters, in 16 bits
    sent = 2 * (2 / 4 * 512) * 4 * 64 * 2 / 0.01e9
    # of one step, masked
    scores = 4 * (2 / 4 * 512) * 512 * 1024 / 2 / (2e12 * 0.5) / 4
    work = slow_links.compute.layer(plan)
    free = parts(4).compute.layer(plan)
    waits = 3 * (sent - scores) + 3 * (2 * sent - 2 * scores)
    assert work.tensor == approx(waits)
    assert work.total == approx(free.total + waits)
    # scores grow with the square
    assert parts(4, 0.01, 1, sequence=2**20).compute.layer(plan).tensor == 0
