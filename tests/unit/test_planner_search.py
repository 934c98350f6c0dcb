"""The search against full enumerations that share nothing with it but the rules, the
memory and the times of a plan."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_2bw.run.flags.correction_notes import percent_of
from megatron_2bw.schedules import Shape
from megatron_2bw.tools.planner.cost.communication import layout
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import cluster, model
from megatron_2bw.tools.planner.descriptions.cluster import Cluster, Device, Link
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.plan import RECOMPUTE, Plan
from megatron_2bw.tools.planner.find.legality import violations
from megatron_2bw.tools.planner.find.search import Search
from megatron_2bw.tools.planner.find.space import Space
from megatron_2bw.tools.timelines.simulator import iteration_time, simulate

P3 = cluster.preset("p3.16xlarge", 1)
P3_HALF = replace(P3, gpus_per_server=4)
GPT = model.preset("gpt-355m")


def tiny(layers: int = 6, **changes) -> Model:
    return Model(
        "tiny",
        layers,
        **({"hidden": 256, "heads": 8, "vocab": 1000, "sequence": 128} | changes),
    )


def slow(servers: int, per_server: int = 2, memory_gib: float = 2.0) -> Cluster:
    """Servers with so slow a network that it matters where the ranks lie. No GPU, since
    NCCL alone would fill one."""
    device = Device("cpu", memory_gib, tflops=10, memory_gb_s=200)
    return Cluster(
        "slow", servers, per_server, device, inside=Link(5, 10), between=Link(0.2, 50)
    )


# --- all there is
# --------------------------------------------------------------------------------------


def legal(cost: Cost, plan: Plan) -> bool:
    return not any(
        violations(
            plan,
            cost.model,
            cost.cluster.gpus,
            cost.precision,
            cost.cluster.device.bf16,
        )
    )


def every_split(layers: int, depth: int) -> list[tuple[int, ...]]:
    """Layers by stage that Megatron allows: stages between the first and the last one
    are alike."""
    if depth < 3:
        return (
            [(first, layers - first) for first in range(1, layers)]
            if depth == 2
            else [(layers,)]
        )
    ends = itertools.product(range(1, layers), repeat=2)
    return [
        (first, *[(layers - first - last) // (depth - 2)] * (depth - 2), last)
        for first, last in ends
        if first + last < layers and (layers - first - last) % (depth - 2) == 0
    ]


def is_looked_at(stages: tuple[int, ...], layers: int) -> bool:
    """What Search.splits says of itself; an even split always is."""
    if len(set(stages)) == 1:
        return True
    longest = -(-layers // len(stages)) + 2
    if len(stages) == 2:
        return max(stages) <= max(longest, layers // 2 + layers // 8)
    return max(stages) <= longest and stages[1] >= layers // len(stages) - 1


def kinds(space: Space, stages: tuple[int, ...]) -> list[dict]:
    """Fields of plans. "stage" is full recompute of as many layers as the longest stage
    has."""
    unique = []
    for kind in space.recompute:
        fields = {"recompute": kind, "recompute_layers": 1}
        if kind == "stage":
            fields = {"recompute": "full", "recompute_layers": max(stages)}
        if fields not in unique:
            unique.append(fields)
    return unique


def everything(cost: Cost, space: Space) -> Iterator[Plan]:
    """All legal plans of a space, by loops over all that a plan consists of."""
    gpus = cost.cluster.gpus
    layers = cost.model.layers
    experts = range(1, max(cost.model.experts, 1) + 1)
    for context, expert, tensor, depth, width in itertools.product(
        space.context, experts, *[range(1, gpus + 1)] * 3
    ):
        if context * tensor * depth * width != gpus:
            continue
        splits = [
            stages
            for stages in every_split(layers, depth)
            if is_looked_at(stages, layers)
        ]
        if space.uneven and 1 < depth <= layers + 1:
            splits += without_last(layers, depth)
        split_kinds = [
            (stages, kind) for stages in splits for kind in kinds(space, stages)
        ]
        # with others two are illegal, so all are
        chunks = {"megatron": (1, *(space.virtual or range(2, layers + 1)))}
        for microbatch, (schedule, virtual), memory, distributed, inside, (
            stages,
            kind,
        ) in itertools.product(
            space.microbatch or (2**k for k in range(12)),
            [
                (name, count)
                for name in space.schedules
                for count in chunks.get(name, (1, 2))
            ],
            {"two-slots", "one-slot", space.memory[0]},
            space.distributed_optimizer,
            space.pipeline_inside,
            split_kinds,
        ):
            even = len(set(stages)) == 1
            if 0 in stages and virtual > 1:
                continue
            if (not even and not space.uneven) or (
                memory not in (space.memory if schedule == "2bw" else "two-slots")
            ):
                continue
            microbatches = space.batch // (microbatch * width)
            if virtual > 1:
                microbatches = microbatches // depth * depth
            if not microbatches:
                continue
            first, last = (0, 0) if even else (stages[0], stages[-1])
            layout = ()
            if 0 in stages:
                first, last, layout = 0, 0, stages
            divided = (
                space.sequence_parallel and tensor > 1 and cost.model.kind == "gpt"
            )
            kind = kind | dict(
                schedule=schedule,
                virtual=virtual,
                memory=memory,
                first=first,
                last=last,
                stages=layout,
            )
            kind |= dict(
                distributed_optimizer=distributed,
                pipeline_inside=inside,
                sequence_parallel=divided,
            )
            kind |= dict(context=context, expert=expert)
            plan = Plan(tensor, depth, width, microbatch, microbatches, **kind)
            if not legal(cost, plan):
                continue
            for late in with_late(cost, space, plan):
                plan = leaner(cost, space, in_rounds(cost, late))
                if plan.late != 0:  # else it has two versions for nothing
                    yield plan
                yield from further_ahead(cost, plan)


def without_last(layers: int, depth: int) -> list[tuple[int, ...]]:
    """What Search._without_last says of itself: the longest stages are the last but the
    first, by trying all."""
    found = []
    for each in range(1, layers + 1):
        first = layers - each * (depth - 2)
        if depth == 2 and each == layers:
            found.append((layers, 0))
        elif depth > 2 and 0 < first <= each and each == -(-layers // (depth - 1)):
            found.append((first, *[each] * (depth - 2), 0))
    return found


def with_late(cost: Cost, space: Space, plan: Plan) -> Iterator[Plan]:
    """The plan with each number of late microbatches whose gap is small enough, and
    with none."""
    if plan.schedule != "2bw" or space.max_gap is None:
        yield plan
        return
    yield replace(plan, late=0)
    tokens = plan.global_batch * cost.model.sequence
    for late in range(1, plan.microbatches + 1):
        if percent_of(tokens, late / plan.microbatches) <= space.max_gap:
            yield replace(plan, late=late, corrected=True)
    predicted = replace(plan, corrected=True)
    if predicted.correction == "predict":
        if percent_of(tokens, 1.0, "predict") <= space.max_gap:
            yield predicted


def leaner(cost: Cost, space: Space, plan: Plan) -> Plan:
    """What Search does where a plan of 2bw with two gradient slots does not fit, or one
    of Megatron's schedule."""
    if plan.memory != "two-slots" or cost.fits(plan):
        return plan
    if plan.schedule == "megatron":
        may = plan.distributed_optimizer
        if plan.replicas == 1:  # one of two that are the same
            may = plan.distributed_optimizer == space.distributed_optimizer[0]
        may = may and True in space.distributed_optimizer
        for memory in ("remainders", "host"):
            lean = replace(plan, memory=memory, distributed_optimizer=True)
            if may and memory in space.memory and legal(cost, lean) and cost.fits(lean):
                return lean
        return plan
    if plan.schedule != "2bw":
        return plan
    shard = replace(plan, memory="shard")
    if legal(cost, shard) and cost.fits(shard):
        return shard
    if "host" in space.memory and cost.host_holds(plan):
        return replace(plan, memory="host")
    return plan


def in_rounds(cost: Cost, plan: Plan) -> Plan:
    """What Cost.gpipe_round says of itself, by trying all numbers of rounds, from the
    fewest on."""
    if plan.schedule != "gpipe" or cost.fits(plan):
        return plan
    sizes = (
        math.ceil(plan.microbatches / rounds)
        for rounds in range(2, plan.microbatches + 1)
    )
    plans = (replace(plan, gpipe_round=size) for size in sizes)
    return next(
        (variant for variant in plans if legal(cost, variant) and cost.fits(variant)),
        plan,
    )


def further_ahead(cost: Cost, plan: Plan) -> Iterator[Plan]:
    """What Cost.extra_warmup says of itself, by trying all: the plan with the extra
    warm-up that holds least on every stage and with which no chain of messages makes a
    microbatch more than 2 % longer than the slowest stage or link; or 4 %, and so on,
    if the batch or the memory do not allow that."""
    if plan.schedule != "2bw" or plan.depth == 1 or not cost.fits(plan):
        return
    times = cost.times(plan)
    d = plan.depth
    work = [work.total for work in cost.stages(plan)]
    cycle = max(*work, *times.occupied[: d - 1])
    for steps in itertools.count(1):
        extra = least_extra(
            cycle * 1.02**steps, tuple(work), tuple(times.transfer[: d - 1])
        )
        if not any(extra):
            return
        variant = replace(plan, extra_warmup=extra)
        if d + sum(extra) <= plan.microbatches and cost.fits(variant):
            yield variant
            return


@functools.cache
def least_extra(
    cycle: float, work: tuple[float, ...], transfer: tuple[float, ...]
) -> tuple[int, ...]:
    """From none on: any stage that is not far enough ahead for some chain goes one
    further, until all are."""
    ahead = list(reversed(range(len(work))))

    def is_too_long(a: int, b: int) -> bool:
        return sum(work[a : b + 1]) + 2 * sum(transfer[a:b]) > cycle * (
            ahead[a] - ahead[b] + 1
        ) * (1 + 1e-9)

    changed = True
    while changed:
        changed = False
        for a, b in itertools.combinations(range(len(work)), 2):
            if is_too_long(a, b) or ahead[a] == ahead[a + 1]:
                ahead[a] += 1
                changed = True
    return tuple(before - after - 1 for before, after in itertools.pairwise(ahead))


def is_double(plan: Plan, cost: Cost, space: Space) -> bool:
    """Whether the plan is another one by a choice without effect, or on one stage
    Megatron's schedule."""
    sizes = (plan.tensor, plan.depth, plan.width)
    servers = cost.cluster.gpus_per_server
    same_order = layout(*sizes, False, servers, plan.context) == layout(
        *sizes, True, servers, plan.context
    )
    other = replace(plan, distributed_optimizer=space.distributed_optimizer[0])
    by_layers = plan.recompute_layers > 1 and "full" in space.recompute
    return (
        (
            by_layers
            and (plan.depth == 1 or cost.fits(replace(plan, recompute_layers=1)))
        )
        or (same_order and plan.pipeline_inside != space.pipeline_inside[0])
        or (plan.replicas == 1 and plan != other and legal(cost, other))
        or (
            plan.depth == 1
            and plan.schedule in ("pipedream-flush", "gpipe", "no-pipelining")
        )
    )


def sample_seconds(cost: Cost, plan: Plan) -> float:
    return cost.seconds(plan) / plan.global_batch


def key(plan: Plan) -> tuple:
    schedule = plan.schedule.replace("pipedream-flush", "megatron")
    return plan.tensor, plan.context, plan.depth, plan.width, schedule


EVERY = ("2bw", "pipedream-flush", "gpipe", "no-pipelining", "megatron")
EXPERTS = dict(experts=8, expert_ffn=64, dense=1, bias=False)
SPACES = {
    "gpt-355m that hardly fits": (
        Cost(GPT, replace(P3_HALF, device=replace(P3.device, memory_gib=6)), "fp16"),
        Space(
            32,
            microbatch=(2,),
            recompute=("none", "full"),
            distributed_optimizer=(True,),
        ),
    ),
    "6 layers, 2 servers": (
        Cost(tiny(6), slow(2), "bf16"),
        Space(16, EVERY, recompute=("none", "selective")),
    ),
    "12 layers, 6 servers, inputs that hardly fit": (
        Cost(tiny(12, sequence=512), slow(6, 1, memory_gib=0.15), "bf16"),
        Space(48, ("gpipe", "megatron"), microbatch=(1, 2)),
    ),
    "4 layers, 2 servers of 3, an odd batch": (
        Cost(tiny(4), slow(2, 3), "bf16"),
        Space(17, EVERY),
    ),
    "12 layers, 6 servers, batch and memory that allow few ahead": (
        Cost(tiny(12, hidden=512, sequence=256), slow(6, 1, memory_gib=0.4), "bf16"),
        Space(32, ("2bw",), microbatch=(1, 2, 4), uneven=False),
    ),
    "6 layers, 2 servers, parts of sequences": (
        Cost(tiny(6), slow(2), "bf16", flash=True),
        Space(
            16, microbatch=(1, 2), recompute=("none", "selective"), context=(1, 2, 4)
        ),
    ),
    "8 experts, 2 servers": (
        Cost(replace(tiny(6), **EXPERTS), slow(2, memory_gib=0.4), "bf16"),
        Space(16, ("2bw", "megatron"), microbatch=(1, 2), recompute=("none",)),
    ),
    "even splits, pipeline inside": (
        Cost(tiny(8), slow(2, 4), "bf16"),
        Space(32, uneven=False, pipeline_inside=(True,), memory=("shard",)),
    ),
}


# the search and the enumerations time each plan once for all tests
for timed, _ in SPACES.values():
    timed.seconds = functools.cache(timed.seconds)


@pytest.fixture(scope="module", params=SPACES)
def enumerated(request) -> tuple[Cost, Space, list[tuple[float, Plan]]]:
    """(cost, space, (seconds a sample, plan) of all that fits), fastest first, doubles
    included."""
    cost, space = SPACES[request.param]
    plans = [plan for plan in everything(cost, space) if cost.fits(plan)]
    return (
        cost,
        space,
        sorted(((sample_seconds(cost, p), p) for p in plans), key=lambda pair: pair[0]),
    )


def test_the_search_is_an_enumeration_in_order(enumerated):
    cost, space, known = enumerated
    known = [
        (seconds, plan) for seconds, plan in known if not is_double(plan, cost, space)
    ]
    found = list(Search(cost, space, distinct=False))
    assert len(found) == len(known) > 100
    assert [seconds for seconds, _ in found] == [seconds for seconds, _ in known]
    assert {plan for _, plan in found} == {plan for _, plan in known}


def test_the_search_finds_the_best_of_each_key(enumerated):
    cost, space, known = enumerated
    fastest: dict[tuple, float] = {}
    for seconds, plan in known:
        if plan.depth > 1 or not is_double(plan, cost, space):
            fastest.setdefault(key(plan), seconds)
    found = list(Search(cost, space))
    assert {key(plan): seconds for seconds, plan in found} == fastest
    assert len(found) == len(fastest)
    assert [seconds for seconds, _ in found] == sorted(fastest.values())


def test_the_search_has_the_best_number_of_late_microbatches_within_a_gap():
    cost = Cost(tiny(8), slow(2), "bf16")
    space = Space(16, ("2bw",), microbatch=(2,), recompute=("none",), max_gap=0.1)
    fastest: dict[tuple, float] = {}
    for plan in everything(cost, space):
        seconds = sample_seconds(cost, plan) if cost.fits(plan) else math.inf
        fastest[key(plan)] = min(seconds, fastest.get(key(plan), math.inf))
    found = {key(plan): seconds for seconds, plan in Search(cost, space)}
    assert found == {
        place: pytest.approx(best, rel=1e-3) for place, best in fastest.items()
    }


# --- all splits of the layers
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cost, shape",
    [
        # 5, 3, ..., 3, 1: the output layer is worth four of this model's layers. 21 %
        # faster
        (Cost(GPT, P3, "fp16"), Plan(1, 8, 1, 2, 16, schedule="pipedream-flush")),
        # 2, 1, 1, 2: only one message at a time can be on its way between the two in
        # the middle. 4 % faster
        (Cost(tiny(6), slow(4), "bf16"), Plan(1, 4, 2, 2, 4)),
    ],
)
def test_no_other_split_of_a_shape_is_faster(cost, shape):
    space = Space(
        shape.global_batch,
        (shape.schedule,),
        (shape.tensor,),
        (shape.depth,),
        (shape.microbatch,),
    )
    known = []
    for stages in every_split(cost.model.layers, shape.depth):
        if max(stages) <= 2 * cost.model.layers // shape.depth:
            split = (
                replace(shape, first=stages[0], last=stages[-1])
                if len(set(stages)) > 1
                else shape
            )
            variants = itertools.product((False, True), (False, True), RECOMPUTE)
            for inside, distributed, recompute in variants:
                plan = replace(
                    split,
                    pipeline_inside=inside,
                    distributed_optimizer=distributed,
                    recompute=recompute,
                )
                if legal(cost, plan) and cost.fits(plan):
                    known.append(sample_seconds(cost, plan))
    assert next(iter(Search(cost, space)))[0] <= min(known) * 1.01


# --- properties
# --------------------------------------------------------------------------------------

MODELS = st.builds(
    tiny,
    st.sampled_from([4, 5, 6, 8]),
    hidden=st.sampled_from([128, 512, 2048]),
    vocab=st.sampled_from([500, 50000]),
    sequence=st.sampled_from([64, 512]),
    tied=st.booleans(),
    kind=st.sampled_from(["gpt", "bert"]),
)
DEVICES = st.builds(
    lambda *given: Device(
        "any", *given[:3], layer_launch_us=given[3], step_us=given[4]
    ),
    *map(
        st.sampled_from, ([0.5, 2, 1000], [10, 300], [200, 2000], [1, 500], [1, 5000])
    ),
)
BETWEEN = st.builds(
    Link, st.sampled_from([0.1, 1, 100]), st.just(50), st.sampled_from([1, 2])
)


@st.composite
def clusters(draw) -> Cluster:
    servers, per_server = draw(
        st.sampled_from([(1, 2), (1, 4), (2, 2), (4, 1), (2, 4), (4, 2)])
    )
    return Cluster(
        "any",
        servers,
        per_server,
        draw(DEVICES),
        Link(draw(st.sampled_from([1, 200])), 5),
        draw(BETWEEN),
    )


COSTS = st.builds(Cost, MODELS, clusters(), st.sampled_from(["bf16", "fp32"]))
SCHEDULED = st.sampled_from(
    [*((name, 2, 1) for name in EVERY), ("2bw", 1, 1), ("megatron", 2, 2)]
)


@st.composite
def planned(
    draw, schedules=SCHEDULED, rounds: int = 3, ahead: bool = False
) -> tuple[Cost, Plan]:
    """A cost and a legal plan of it, whether it fits or not, with up to `rounds` times
    d microbatches, and a few; with any extra warm-up if `ahead`."""
    cost = draw(COSTS)
    gpus = cost.cluster.gpus
    layers = cost.model.layers
    tensor = draw(st.sampled_from([t for t in (1, 2) if gpus % t == 0]))
    depth = draw(
        st.sampled_from(
            [d for d in (1, 2, 4, 8) if gpus // tensor % d == 0 and d <= layers]
        )
    )
    schedule, slots, virtual = draw(schedules)
    stages = draw(st.sampled_from(every_split(layers, depth)))
    even = len(set(stages)) == 1
    more = 0 if virtual > 1 else draw(st.integers(0, depth))
    extra = ()
    if ahead and schedule == "2bw" and depth > 1:
        extra = draw(st.tuples(*[st.integers(0, 2)] * (depth - 1)))
        more += sum(extra)
    microbatches = depth * draw(st.integers(1, rounds)) + more
    size = (
        draw(st.none() | st.integers(1, microbatches)) if schedule == "gpipe" else None
    )
    sizes = (
        tensor,
        depth,
        gpus // (tensor * depth),
        draw(st.sampled_from([1, 4, 16])),
        microbatches,
    )
    ends = (0, 0) if even else (stages[0], stages[-1])
    choices = (
        draw(st.sampled_from(RECOMPUTE)),
        schedule,
        virtual,
        slots,
        draw(st.booleans()),
        *ends,
    )
    divided = tensor > 1 and draw(st.booleans())
    late = draw(st.none() | st.integers(0, microbatches))
    inside = draw(st.booleans())
    plan = Plan(*sizes, *choices, inside, divided, extra, late, gpipe_round=size)
    assume(legal(cost, plan))
    return cost, plan


def property_of(examples: int):
    """Hypothesis's settings: the same examples in every run, as many as the file's time
    allows."""
    slow = [HealthCheck.filter_too_much, HealthCheck.too_slow]
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=slow,
    )


def simulated(cost: Cost, plan: Plan) -> float:
    """Seconds of an iteration without any short cut: of 24 in a row where they
    overlap."""
    times = cost.times(plan)
    if plan.pipeline.flushes:
        return iteration_time(plan.pipeline, plan.depth, plan.microbatches, times)
    events = simulate(plan.pipeline, Shape(plan.depth, plan.microbatches, 0, 40), times)
    ends = [
        event.end for event in events if event.stage == 0 and event.action.kind == "S"
    ]
    return (ends[38] - ends[14]) / 24


@property_of(200)
@given(planned(ahead=True))
def test_bounds(case):
    """Bounds of the shape, of its split, of the plan, of its simulation: each below the
    next."""
    cost, plan = case
    search = Search(cost, Space(plan.global_batch))
    bounds = [
        search._shape_bound(plan),
        search._split_bound(plan),
        cost.lower_bound(plan) / plan.global_batch,
        simulated(cost, plan) / plan.global_batch,
    ]
    assert all(
        below <= above * (1 + 1e-6) for below, above in itertools.pairwise(bounds)
    ), bounds
    assert search._work_bound(plan) <= bounds[3] * (1 + 1e-6)
