"""Time and memory of a plan, by simulation of its schedule. Pure Python.

Invariant: `lower_bound` is never above `seconds`, so a search that discards plans by it
misses none.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

from megatron_2bw.tools.planner.cost.bounds import lower_bound, warmup_for
from megatron_2bw.tools.planner.cost.communication import (
    Message,
    all_reduce,
    message,
    scatter_or_gather,
)
from megatron_2bw.tools.planner.cost.compute import Compute, MicrobatchTime
from megatron_2bw.tools.planner.cost.memory import (
    CHANNELS,
    CONTEXT,
    FRAGMENTS,
    GIB,
    GROUP,
    PAIR,
    Memory,
    StageMemory,
    bytes_of,
    communicators,
    megatrons_communicators,
)
from megatron_2bw.tools.planner.descriptions.cluster import Cluster
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.plan import Plan, by_fields
from megatron_2bw.tools.timelines.simulator import Times, long_iteration_time

# The first GPU for which Transformer Engine has kernels, by compute capability.
ENGINE_FROM = 8.0
# Parameters of a bucket of Megatron's overlapped collectives, at least, and for each
# replica (--ddp-bucket-size).
BUCKET = 40e6
BUCKET_OF_REPLICA = 1e6
# Messages that add a smaller share to a microbatch's time are not worth extra warm-up
# of 2bw.
MIN_HIDDEN_SHARE = 0.02

# The fields of a plan on which the work of its stages and its messages depend.
STAGES = (
    "tensor context expert depth width microbatch recompute sequence_parallel "
    "pipeline_inside first last stages"
)
# The fields on which its step depends.
STEP = (
    "tensor context expert depth width pipeline_inside distributed_optimizer "
    "first last stages grad_reduce_in_bf16 memory schedule"
)


@dataclass(frozen=True)
class Split:
    """Seconds of an iteration by cause: the work of the busiest stage, and its waiting
    times."""

    compute: float
    tensor: float
    pipeline: float
    data: float
    update: float
    bubble: float


@dataclass(frozen=True)
class Estimate:
    """A plan with its predicted seconds per iteration, their causes, and by stage the
    bytes taken; `capacity` bytes are allowed."""

    plan: Plan
    seconds: float
    split: Split
    memory: tuple[StageMemory, ...]
    capacity: float

    @property
    def throughput(self) -> float:
        """Samples a second."""
        return self.plan.global_batch / self.seconds

    @property
    def heaviest(self) -> float:
        """Bytes of the heaviest stage."""
        return max(stage.total for stage in self.memory)


@dataclass(frozen=True)
class _Step:
    """Seconds at the end of a batch, by stage: the gradients' reduction over the
    replicas, the tied embeddings' reduction over the first and the last stage, the
    optimizer's step, and the largest gather of parameters."""

    reduce: list[float]
    ends: float
    update: list[float]
    gather: float


def _beside(seconds: float, most: float, occupied: float, free: float) -> float:
    """Seconds of a transfer of which others take `occupied` of each `occupied + free`
    seconds of the link, and `most` in all."""
    if free * most <= seconds * occupied:
        return seconds + most
    return seconds * (1 + occupied / free)


def _simulated(plan: Plan, times: Times) -> float:
    return long_iteration_time(plan.pipeline, plan.depth, plan.microbatches, times)


@dataclass(eq=False)
class Cost:
    """Times and memory of plans of one model on one cluster.

    flash           attention that never stores its scores; the device's in 16 bits if
                    None
    margin          share of the memory for the CUDA context, the communication library
                    and fragmentation. What this project's communicators need beyond it
                    a plan must have free. None: each of the three is counted
    old_exchange    messages of Megatron-LM in 2021 to 2023, for tables published then:
                    each tensor rank sends its part also without sequence parallelism
                    (arXiv 2104.04473, section 4.1), and interleaved stages wait for a
                    message as others do
    torch_adam      Adam is torch's, not a fused one
    """

    model: Model
    cluster: Cluster
    precision: str = "bf16"
    flash: bool | None = None
    margin: float | None = None
    old_exchange: bool = False
    torch_adam: bool = False

    def __post_init__(self) -> None:
        device = self.cluster.device
        on_gpus = device.name != "cpu"
        if self.flash is None:
            self.flash = device.flash and self.precision != "fp32"
        self.channels = self.cluster.inside.channels
        self._seconds = {}
        self.compute = Compute(
            model=self.model,
            cluster=self.cluster,
            precision=self.precision,
            flash=self.flash,
        )
        engine = on_gpus and device.capability >= ENGINE_FROM
        self.memory = Memory(
            model=self.model,
            precision=self.precision,
            flash=self.flash,
            torch_adam=self.torch_adam,
            engine=engine,
        )
        whole = device.memory_gib * GIB
        share = self.margin or 0.0
        self._fixed = 0.0
        self._share = 1 - share
        if self.margin is None:
            self._fixed = CONTEXT if on_gpus else 0.0
            self._share = 1 / (1 + FRAGMENTS)
        self.capacity = (whole - self._fixed) * self._share
        self.share_left_free = 1 - self.capacity / whole
        self._nccl_free = whole * share if on_gpus else math.inf

    def fits(self, plan: Plan) -> bool:
        if plan.memory == "host" and not self.host_holds(plan):
            return False
        return self.memory.heaviest(plan) <= self.allowed(plan)

    def host_holds(self, plan: Plan) -> bool:
        """Whether the host has memory for the plan's optimizer."""
        room = self.cluster.device.host_memory_gib * GIB
        return max(self.memory.host_bytes(plan)) <= room

    def allowed(self, plan: Plan) -> float:
        """Bytes that a stage of the plan may take: the capacity, less the communicators
        that no margin holds."""
        return self.capacity - max(0.0, self._nccl(plan) - self._nccl_free)

    @by_fields("schedule virtual memory tensor expert depth width extra_warmup")
    def _nccl(self, plan: Plan) -> float:
        """Bytes of the communicators on a GPU of the stage with most. With a given
        margin Megatron's are in that."""
        share = self.channels / CHANNELS
        most = 0.0
        for stage in {0, min(1, plan.depth - 1)}:
            held = communicators(plan, stage, self.model.tied)
            if self.margin is None:
                held += megatrons_communicators(plan, stage, self.model.tied)
            total = 0.0
            for size in held:
                total += size * share if size in (PAIR, GROUP) else size
            most = max(most, total)
        return most

    def gpu_bytes(self, plan: Plan) -> float:
        """Memory of the smallest GPU on which the plan fits."""
        taken = self.memory.heaviest(plan) + self.capacity - self.allowed(plan)
        taken += self._fixed * self._share
        return taken / self._share

    def seconds(self, plan: Plan) -> float:
        """Simulated seconds of an iteration in the steady state."""
        if plan not in self._seconds:
            times = self.times(plan)
            simulated = _simulated(plan, times)
            self._seconds[plan] = max(simulated, lower_bound(plan, times))
        return self._seconds[plan]

    def lower_bound(self, plan: Plan) -> float:
        """Seconds that the plan's dependencies alone take (bounds.py)."""
        return lower_bound(plan, self.times(plan))

    def estimate(self, plan: Plan) -> Estimate:
        times = self.times(plan)
        seconds = self.seconds(plan)
        none = [0.0] * plan.depth
        no_reduce = replace(times, reduce=none)
        only_work = replace(no_reduce, transfer=none, occupied=none, sending=none)
        busiest = max(self.stages(plan), key=attrgetter("total"))
        work = plan.microbatches * busiest.total
        # An interleaved batch may take less where its messages take longer: the orders
        # of actions are fixed.
        alone = min(max(_simulated(plan, only_work), work), seconds)
        without_reduce = min(max(_simulated(plan, no_reduce), alone), seconds)
        # Time that a late step overlaps with the next batch is no stage's waiting time.
        step = times.step + max(times.overlap_cost)
        update = min(step, alone - work)
        split = Split(
            compute=plan.microbatches * (busiest.total - busiest.tensor),
            tensor=plan.microbatches * busiest.tensor,
            pipeline=without_reduce - alone,
            data=seconds - without_reduce,
            update=update,
            bubble=alone - work - update,
        )
        stages = tuple(self.memory.stages(plan))
        return Estimate(
            plan=plan,
            seconds=seconds,
            split=split,
            memory=stages,
            capacity=self.allowed(plan),
        )

    @by_fields(STAGES)
    def stages(self, plan: Plan) -> list[MicrobatchTime]:
        """Work of one microbatch on each stage."""
        layer = self.compute.layer(plan)
        works = [layer * layers for layers in plan.layers_of(self.model)]
        works[0] = works[0] + self.compute.embedding(plan)
        works[-1] = works[-1] + self.compute.output(plan)
        return works

    def times(self, plan: Plan) -> Times:
        """The simulator's durations."""
        works = self.stages(plan)
        messages = self.messages(plan)
        step = self._step(plan)
        late = plan.pipeline.late_step and plan.memory != "host"
        costs = self._release(plan, works, step.reduce)
        seconds = step.gather
        if plan.schedule == "megatron":
            # overlaps the first microbatch's forward, but for the first bucket
            seconds = self._exposed(plan, 0, seconds, works[0].forward)
        if late:
            costs = [cost + update for cost, update in zip(costs, step.update)]
            if plan.correction == "predict":
                for stage, (_, _, owned) in enumerate(self._parameters(plan)):
                    costs[stage] += self.compute.prediction(owned)
                if plan.replicas > 1:
                    # a microbatch hides the sums, and the step has as much less time
                    for stage, work in enumerate(works):
                        sums = step.reduce[stage] + step.gather
                        costs[stage] += max(sums - work.total, 0.0)
                    seconds += max(work.total for work in works)
        else:
            seconds += max(step.update)
        return Times(
            forward=[work.forward for work in works],
            backward=[work.backward for work in works],
            transfer=[each.seconds for each in messages],
            occupied=[each.occupied for each in messages],
            sending=self._sending(plan, messages),
            reduce=self._reduce(plan, works, messages, step),
            step=seconds,
            overlap_cost=costs,
        )

    def end(self, plan: Plan) -> tuple[float, float]:
        """Seconds of the first stage's reduction with the largest gather, and of the
        slowest update."""
        step = self._step(plan)
        return step.reduce[0] + step.ends + step.gather, max(step.update)

    def enough_late(self, plan: Plan) -> int:
        """So many of the plan's late microbatches that more hide no more of the bubble,
        nor of the step ([Note: the late step's window])."""
        each = max(work.total for work in self.stages(plan))
        ahead = plan.pipeline.ahead(plan.shape, 0)
        times = self.times(plan)
        behind = max(ahead * each, sum(times.backward))
        step = max(times.reduce) + times.step
        window = plan.late * each - behind
        spare = math.floor((window - step) / each + 0.05)
        return min(max(plan.late - spare, ahead + 1), plan.late)

    def extra_warmup(self, plan: Plan) -> tuple[int, ...]:
        """The extra warm-up of 2bw that hides the plan's messages, or as much of them
        as batch and memory allow.

        () if they allow none, or if it would hide too little.
        """
        if not self.fits(plan):
            return ()
        for extra in self._warmups(plan):
            if plan.depth + sum(extra) <= plan.microbatches:
                hiding = plan.changed(extra_warmup=extra)
                if self.fits(hiding):
                    return extra
        return ()

    def gpipe_round(self, plan: Plan) -> int | None:
        """The smallest round of gpipe with the fewest rounds that fit: the paper's
        GPipe admits as many microbatches as fit. None if the whole batch fits, if not
        even one microbatch does, and for other schedules."""
        if plan.schedule != "gpipe" or self.fits(plan):
            return None

        def too_large(size: int) -> bool:
            return not self.fits(plan.changed(gpipe_round=size))

        most = bisect_left(range(1, plan.microbatches), True, key=too_large)
        if not most:
            return None
        rounds = math.ceil(plan.microbatches / most)
        return math.ceil(plan.microbatches / rounds)

    def _warmups(self, plan: Plan) -> Iterator[tuple[int, ...]]:
        """The least extra warm-up for each of several times of a microbatch, until none
        is needed.

        The first time exceeds that of the slowest stage or link by MIN_HIDDEN_SHARE;
        each time exceeds the one before by the same share.
        """
        works = [work.total for work in self.stages(plan)]
        messages = self.messages(plan)[: plan.depth - 1]
        transfer = [each.seconds for each in messages]
        cycle = max(works + [each.occupied for each in messages])
        while True:
            cycle *= 1 + MIN_HIDDEN_SHARE
            extra = warmup_for(cycle, works, transfer)
            if not any(extra):
                return
            yield extra

    @by_fields(
        "tensor context depth width pipeline_inside microbatch sequence_parallel"
    )
    def messages(self, plan: Plan) -> list[Message]:
        """A message over the boundary behind each stage."""
        if plan.depth == 1:
            return [Message(0.0, 0.0)]
        size = self.memory.hidden_states(plan)
        size /= plan.tensor if self.old_exchange else plan.sequence_ranks
        boundaries = self.compute.layout(plan).boundaries
        return [message(self.cluster, leaving, size) for leaving in boundaries]

    def _sending(self, plan: Plan, messages: list[Message]) -> list[float] | float:
        """Seconds of the sender's own time per message.

        Megatron's exchange blocks until the message has arrived, and the host then
        launches kernels on an idle GPU. Between interleaved stages only the host's time
        counts. This project's exchange does not block.
        """
        if plan.schedule != "megatron" or plan.depth == 1:
            return 0.0
        exchange = self.cluster.device.exchange_us * 1e-6
        if plan.virtual > 1 and not self.old_exchange:
            return [exchange] * plan.depth
        return [exchange + each.seconds for each in messages]

    @by_fields(
        "tensor context expert depth width distributed_optimizer first last stages"
    )
    def _parameters(self, plan: Plan) -> list[tuple[float, float, float]]:
        """(parameters, those of experts, those of whose optimizer's states a GPU has
        its share) of each stage."""
        memory = self.memory
        counts = []
        for stage in enumerate(plan.layers_of(self.model)):
            parameters = memory.parameters(plan, *stage)
            experts = memory.experts(plan, *stage)
            counts.append((parameters, experts, memory.owned(plan, *stage)))
        return counts

    @by_fields(STEP)
    def _step(self, plan: Plan) -> _Step:
        size = bytes_of(self.precision, plan.grad_reduce_in_bf16)
        sharded = plan.distributed_optimizer
        collective = scatter_or_gather if sharded else all_reduce
        ends = 0.0
        if self.model.tied and plan.depth > 1 and not self.model.adapter_rank:
            words = self.model.padded_vocab(plan.tensor) * self.model.hidden
            words = words / plan.tensor * size.gradient
            group = self.compute.layout(plan).ends
            ends = all_reduce(self.cluster, group, words)
        compute = self.compute
        update = []
        for parameters, _, owned in self._parameters(plan):
            if plan.memory == "host":
                copied = size.gradient + size.weight
                update.append(
                    compute.host_update(owned, copied, plan.pipeline.late_step)
                )
            else:
                update.append(compute.update(parameters, owned))
        gather = 0.0
        if sharded:
            gather = max(self._over_replicas(plan, scatter_or_gather, size.weight))
        reduce = self._over_replicas(plan, collective, size.gradient)
        return _Step(
            reduce=reduce,
            ends=ends,
            update=update,
            gather=gather,
        )

    def _over_replicas(
        self, plan: Plan, collective: Callable, size: int
    ) -> list[float]:
        """Seconds of a collective over the replicas of each stage, of `size` bytes a
        parameter."""
        place = self.compute.layout(plan)
        seconds = []
        for parameters, experts, _ in self._parameters(plan):
            others = (parameters - experts) * size
            taken = collective(self.cluster, place.data, others)
            if experts:
                taken += collective(self.cluster, place.same, experts * size)
            seconds.append(taken)
        return seconds

    def _reduce(
        self,
        plan: Plan,
        works: list[MicrobatchTime],
        messages: list[Message],
        step: _Step,
    ) -> list[float]:
        """Seconds from a stage's last backward until its gradients are reduced over its
        replicas."""
        seconds = [*step.reduce]
        # overlaps the last microbatch's backward, but for the last bucket
        if plan.schedule == "megatron":
            for stage, work in enumerate(works):
                seconds[stage] = self._exposed(
                    plan, stage, seconds[stage], work.backward
                )
        place = self.compute.layout(plan)
        ends = step.ends
        if plan.pipeline.late_step:
            # It overlaps the late microbatches of the next batch, whose messages take
            # their share of the network first.
            leaving = itertools.compress(messages, place.boundaries)
            occupied = max((each.occupied for each in leaving), default=0.0)
            # With one gradient slot only the warm-up forwards send messages in that
            # time.
            sent = plan.pipeline.late_of(plan.microbatches)
            if plan.memory != "two-slots":
                sent = min(sent, plan.pipeline.ahead(plan.shape, 0))
            free = max(work.total for work in works) - occupied
            ends = _beside(ends, sent * occupied, occupied, free)
            if place.data.servers > 1:
                ends = step.ends
                seconds = [
                    _beside(time, sent * occupied, occupied, free) for time in seconds
                ]
        seconds[0] += ends
        seconds[-1] += ends
        return seconds

    def _release(
        self, plan: Plan, works: list[MicrobatchTime], reduce: list[float]
    ) -> list[float]:
        """Seconds for which a batch's first backward waits for the one slot: until the
        gradients of the batch before are reduced, and copied to the host by portions.
        The first forward overlaps it."""
        if plan.memory not in ("host", "shard") or not plan.pipeline.late_step:
            return [0.0] * plan.depth
        rate = self.cluster.device.pcie_gb_s * 1e9
        size = bytes_of(self.precision, plan.grad_reduce_in_bf16).gradient
        waits = []
        for stage, (_, _, owned) in enumerate(self._parameters(plan)):
            seconds = reduce[stage]
            work = works[stage]
            copies = owned * size / rate if plan.memory == "host" else 0.0
            hidden = max(0.0, seconds - work.forward)
            waits.append(max(hidden, seconds + copies - work.total))
        return waits

    def _exposed(self, plan: Plan, stage: int, seconds: float, hidden: float) -> float:
        """Seconds of a stage's collective over the replicas that Megatron does not
        overlap with computation: it has buckets of BUCKET parameters or more, and one
        of them is before or behind all computation."""
        parameters, _, _ = self._parameters(plan)[stage]
        least = max(BUCKET, BUCKET_OF_REPLICA * plan.replicas)
        buckets = parameters // least + 1
        collective = scatter_or_gather if plan.distributed_optimizer else all_reduce
        group = self.compute.layout(plan).data
        start = collective(self.cluster, group, 0.0)
        seconds += (buckets - 1) * start
        overlapped = hidden * (1 - 1 / buckets)
        return max(seconds - overlapped, seconds / buckets)
