"""Finds the fastest plans that are legal and fit: an exact best-first search. Pure
Python.

Invariant: `Search` yields the first plans of a full enumeration of the space, in its
order. One queue holds the plans by a lower bound on their time per sample. The bound
tightens in steps: shape, stages, schedule, plan, simulation.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter

from megatron_2bw.run.flags.correction_notes import most_late, percent_of
from megatron_2bw.tools.planner.cost.bounds import lower_bound
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions.plan import Plan, by_fields
from megatron_2bw.tools.planner.find.legality import (
    may_divide_sequences,
    violations,
)
from megatron_2bw.tools.planner.find.space import LEANER, Space
from megatron_2bw.tools.timelines.simulator import Times

_most_late = lru_cache(most_late)


class Search:
    """An iterable of (seconds per sample, plan), fastest first.

    causes     why shapes (tensor, context, depth, microbatch) and plans are illegal
    too_large  the plans that do not fit and whose bound is below the last plan yielded,
               lowest bound first
    distinct   whether to yield only the fastest plan of each (tensor, context, depth,
               width, schedule), where Megatron's schedule and pipedream-flush are one
    limit      seconds per sample; only faster plans are yielded
    """

    def __init__(
        self,
        cost: Cost,
        space: Space,
        distinct: bool = True,
        limit: float = math.inf,
    ):
        self.cost = cost
        self.space = space
        self.distinct = distinct
        self.limit = limit
        self.model = cost.model
        cluster = cost.cluster
        self._host = (cluster.gpus, cost.precision, cluster.device.bf16)
        # plans with equal bounds leave the queue in the order of enumeration
        self._number = itertools.count()
        self._queue = []
        self._aside = []  # what a call has left for the next
        self.causes = set()
        self.too_large = []
        for plan in self.shapes():
            self._put(self._shape_bound(plan), "shape", plan)

    def __iter__(self) -> Iterator[tuple[float, Plan]]:
        return self.plans(limit=self.limit)

    def exact(self, limit: float = math.inf) -> Iterator[tuple[float, Plan]]:
        """The plans without late gradients."""
        if self.space.max_gap is None:  # there all of 2bw are late
            return iter(Search(self.cost, self.space.exact, limit=limit))
        return self.plans(attrgetter("exact"), limit)

    def plans(
        self,
        wanted: Callable[[Plan], bool] | None = None,
        limit: float = math.inf,
    ) -> Iterator[tuple[float, Plan]]:
        """The wanted plans. The next call continues with the bounds and times of this
        one, which ends then."""
        for entry in self._aside:
            heapq.heappush(self._queue, entry)
        self._aside = []
        yielded = set()
        while self._queue and self._queue[0][0] < limit:
            entry = heapq.heappop(self._queue)
            bound, _, state, plan = entry
            if state == "shape":
                self._divide(plan)
            elif state == "split":
                for scheduled in self._schedules(plan):
                    least = self._work_bound(scheduled)
                    self._put(least, "schedule", scheduled)
            elif _key(plan) in yielded or (wanted and not wanted(plan)):
                self._aside.append(entry)
            elif state == "schedule":
                self._vary(bound, plan)
            elif state == "ahead":
                extra = self.cost.extra_warmup(plan)
                if extra:
                    self._put_bound(bound, plan.changed(extra_warmup=extra))
            elif state == "bound":
                if plan.late is not None:
                    plan = plan.changed(late=self.cost.enough_late(plan))
                self._simulate(bound, plan)
            else:
                self._aside.append(entry)
                if self.distinct:
                    yielded.add(_key(plan))
                yield bound, plan

    def _put(self, bound: float, state: str, plan: Plan) -> None:
        entry = (bound, next(self._number), state, plan)
        heapq.heappush(self._queue, entry)

    def _put_bound(self, bound: float, plan: Plan) -> None:
        least = self.cost.lower_bound(plan) / plan.global_batch
        self._put(max(least, bound), "bound", plan)

    def _divide(self, shape: Plan) -> None:
        """Enter the divisions of a shape's layers."""
        if self._least_memory(shape) > self.cost.capacity:
            self.too_large.append(self._leanest(shape))
            return
        for split in self.split(shape):
            self._put(self._split_bound(split), "split", split)

    def _vary(self, bound: float, scheduled: Plan) -> None:
        """Enter the legal variants of a schedule."""
        for variant in filter(self._legal, self.variants(scheduled)):
            plan = self._leaner(variant)
            # Without extra warm-up pipedream-flush is the same with less memory.
            if plan.late != 0:
                self._put_bound(bound, plan)
            if plan.schedule == "2bw" and self.space.extra_warmup:
                self._put(bound, "ahead", plan)

    def _simulate(self, bound: float, plan: Plan) -> None:
        """Enter the plan with its time, if it fits."""
        fits = self.cost.fits
        if plan.recompute_layers > 1 and "full" in self.space.recompute:
            if fits(plan.changed(recompute_layers=1)):
                return  # that takes as long
        if fits(plan):
            seconds = self.cost.seconds(plan) / plan.global_batch
            self._put(seconds, "exact", plan)
            return
        size = self.cost.gpipe_round(plan)
        if size is None:
            self.too_large.append(plan)
        else:
            self._put_bound(bound, plan.changed(gpipe_round=size))

    def _leaner(self, plan: Plan) -> Plan:
        """The plan; where it does not fit, the first of LEANER that does."""
        if plan.memory != "two-slots" or self.cost.fits(plan):
            return plan
        leaner = plan
        sharded = plan.distributed_optimizer
        if plan.schedule == "megatron" and plan.replicas == 1:
            sharded = True in self.space.distributed_optimizer
        for memory in LEANER.get(plan.schedule, ()):
            other = plan.changed(memory=memory, distributed_optimizer=sharded)
            if memory not in self.space.memory or not self._legal(other):
                continue
            if other.correction == plan.correction:
                leaner = other
                if self.cost.fits(other):
                    break
        return leaner

    def _shape_bound(self, plan: Plan) -> float:
        """Seconds per sample if the stages had equal work and never waited."""
        one_stage = replace(plan, depth=1, width=plan.width * plan.depth)
        (work,) = self.cost.stages(one_stage)
        samples = plan.depth * plan.microbatch * plan.width
        return work.total / samples

    def _leanest(self, shape: Plan) -> Plan:
        """A plan of the shape with little memory, which may be the smallest of all."""
        return shape.changed(
            schedule=min(self.space.schedules, key="2bw".__eq__),
            distributed_optimizer=shape.replicas > 1
            and True in self.space.distributed_optimizer,
        )

    def _least_memory(self, shape: Plan) -> float:
        """Bytes of weights and gradients on equal stages. Every plan of the shape needs
        at least these."""
        memory = self.cost.memory
        total = 0.0
        for stage in enumerate(shape.layers_of(self.model)):
            weights, gradients, _ = memory.state(shape, *stage, 1)
            frozen = memory.frozen(shape, *stage)
            total += weights + gradients + frozen
        return total / shape.depth

    def _split_bound(self, plan: Plan) -> float:
        """Seconds per sample if the busiest stage never waited."""
        longest = max(work.total for work in self.cost.stages(plan))
        return longest / (plan.microbatch * plan.width)

    def _work_bound(self, plan: Plan) -> float:
        """Seconds per sample of the stages' computation and of the end of a batch, with
        any extra warm-up: no message takes time."""
        works = self.cost.stages(plan)
        step, update = self._least_end(plan)
        if plan.pipeline.flushes:
            step += update
        if plan.schedule == "megatron":
            # overlaps a microbatch at both ends of the batch
            step = max(step - works[0].total, update)
        none = [0.0] * plan.depth
        times = Times(
            forward=[work.forward for work in works],
            backward=[work.backward for work in works],
            transfer=none,
            occupied=none,
            reduce=none,
            step=step,
            overlap_cost=none,
        )
        return lower_bound(plan, times) / plan.global_batch

    @by_fields("tensor context expert depth width first last stages memory schedule")
    def _least_end(self, plan: Plan) -> tuple[float, float]:
        """The minimum of `Cost.end` over all variants, term by term."""
        ends = map(self.cost.end, self.variants(plan))
        return tuple(map(min, zip(*ends)))

    def shapes(self) -> Iterator[Plan]:
        """One plan for each legal (tensor, context, depth, width, expert, microbatch,
        recompute), with Megatron's schedule."""
        space = self.space
        gpus = self.cost.cluster.gpus
        for tensor in _divisors(gpus, space.tensor):
            for context in _divisors(gpus // tensor, space.context):
                for depth in _divisors(gpus // tensor, space.depth):
                    width, rest = divmod(gpus, tensor * context * depth)
                    if not rest:
                        yield from self._batches(tensor, context, depth, width)

    def _batches(
        self, tensor: int, context: int, depth: int, width: int
    ) -> Iterator[Plan]:
        space = self.space
        powers = []
        for k in range(12):
            if 2**k * width <= space.batch:
                powers.append(2**k)
        parts = 1
        if self.model.experts:
            parts = math.gcd(self.model.experts, context * width)
        for microbatch in space.microbatch or powers or [1]:
            for expert in _divisors(parts, space.expert):
                plan = Plan(
                    tensor,
                    depth,
                    width,
                    microbatch,
                    microbatches=space.batch // (microbatch * width),
                    schedule="megatron",
                    context=context,
                    expert=expert,
                    grad_reduce_in_bf16=space.grad_reduce_in_bf16,
                )
                yield from self._legal_shapes(plan)

    def _legal_shapes(self, plan: Plan) -> Iterator[Plan]:
        splits = [*self.splits(plan.depth), (0, 0)]
        first, last = splits[0]
        divided = self.space.sequence_parallel and plan.tensor > 1
        plan = plan.changed(
            first=first,
            last=last,
            sequence_parallel=divided and may_divide_sequences(self.model),
        )
        if not self._legal(plan):
            return
        for kind in self.space.recompute:
            if kind != "stage":
                yield plan.changed(recompute=kind)
            elif plan.depth > 1 or "full" not in self.space.recompute:
                yield plan.changed(recompute="full", recompute_layers=self.model.layers)

    def _legal(self, plan: Plan) -> bool:
        """Whether the plan is legal. Keeps the cause if it is not."""
        for cause in violations(plan, self.model, *self._host):
            self.causes.add(cause)
            return False
        return True

    def split(self, shape: Plan) -> Iterator[Plan]:
        """The shape with its layers divided."""
        whole_stages = shape.recompute_layers > 1
        splits = []
        for first, last in self.splits(shape.depth):
            splits.append(shape.changed(first=first, last=last))
        stages = self._without_last(shape.depth)
        if stages:
            splits.append(shape.changed(first=0, last=0, stages=stages))
        for split in splits:
            longest = max(split.layers_of(self.model))
            if not whole_stages:
                yield split
            # with one layer a stage it is "full"
            elif longest > 1 or "full" not in self.space.recompute:
                yield split.changed(recompute_layers=longest)

    def splits(self, depth: int) -> list[tuple[int, int]]:
        """(first, last) layers of uneven stages; (0, 0) for an even split.

        The embedding on the first stage takes memory, and the output layer on the last
        stage as long as several layers. So either stage may have fewer layers, and the
        others up to two more than an even split.
        """
        layers = self.model.layers
        splits = [(0, 0)] if layers % depth == 0 else []
        if depth == 1 or not self.space.uneven:
            return splits
        longest = math.ceil(layers / depth) + 2
        if depth == 2:
            longest = max(longest, layers // 2 + layers // 8)
            for first, last in _ends(layers, longest):
                if first != last:
                    splits.append((first, last))
            return splits
        shortest = max(layers // depth - 1, 1)
        for middle in range(shortest, longest + 1):
            rest = layers - middle * (depth - 2)
            for pair in _ends(rest, longest):
                if pair != (middle, middle):
                    splits.append(pair)
        return splits

    def _without_last(self, depth: int) -> tuple[int, ...]:
        """The layers of stages of which the last one has the output layer alone, which
        takes as long as several layers with a large vocabulary; () for none."""
        layers = self.model.layers
        others = depth - 1
        if not others or not self.space.uneven or layers < others:
            return ()
        each = math.ceil(layers / others)
        first = layers - each * (others - 1)
        return (first, *[each] * (others - 1), 0) if first > 0 else ()

    def variants(self, plan: Plan) -> Iterator[Plan]:
        """The plan in each rank order, with and without the distributed optimizer;
        without extra warm-up."""
        for inside in self._orders(plan):
            for distributed in self._optimizers(plan):
                yield plan.changed(
                    pipeline_inside=inside, distributed_optimizer=distributed
                )

    def _schedules(self, split: Plan) -> Iterator[Plan]:
        """The division with each schedule, its memory and its chunks."""
        schedules = self.space.schedules
        for schedule in schedules:
            plan = split.changed(schedule=schedule)
            if schedule == "2bw":
                yield from self._two_bw(plan)
            elif schedule == "megatron":
                yield plan
                yield from self._interleaved(plan)
            # on one stage the others equal Megatron's schedule without its overlap
            elif plan.depth > 1 or "megatron" not in schedules:
                yield plan

    def _two_bw(self, plan: Plan) -> Iterator[Plan]:
        """The plan with each memory and number of late microbatches."""
        # the others are tried where these do not fit
        slots = [memory for memory in self.space.memory if "slot" in memory]
        for memory in slots or self.space.memory:
            yield from self._late(plan.changed(memory=memory))

    def _late(self, plan: Plan) -> list[Plan]:
        """The plan with the most late microbatches whose gap is small enough, with all
        on predicted weights, and with none."""
        most = self.space.max_gap
        if most is None:
            return [plan]
        plans = [plan.changed(late=0)]
        tokens = plan.global_batch * self.model.sequence
        late = _most_late(tokens, plan.microbatches, most)
        if late:
            plans.append(plan.changed(late=late, corrected=True))
        predicted = plan.changed(corrected=True)
        if predicted.correction == "predict":
            if percent_of(tokens, 1.0, "predict") <= most:
                plans.append(predicted)
        return plans

    def _interleaved(self, plan: Plan) -> Iterator[Plan]:
        """The plan with each number of chunks."""
        microbatches = plan.microbatches - plan.microbatches % plan.depth
        if plan.depth == 1 or plan.stages or not microbatches:
            return
        layers = math.gcd(*plan.layers_of(self.model))
        for virtual in _divisors(layers, self.space.virtual):
            if virtual > 1:
                yield plan.changed(virtual=virtual, microbatches=microbatches)

    def _orders(self, shape: Plan) -> tuple[bool, ...]:
        """The rank orders of the space; only the first if all put the ranks on the same
        servers."""
        layout = self.cost.compute.layout
        one = layout(shape.changed(pipeline_inside=False))
        other = layout(shape.changed(pipeline_inside=True))
        orders = self.space.pipeline_inside
        return orders[:1] if one == other or shape.expert > 1 else orders

    def _optimizers(self, plan: Plan) -> tuple[bool, ...]:
        choices = self.space.distributed_optimizer
        if plan.replicas == 1 and plan.memory != "shard":
            return choices[:1]
        return choices


def _key(plan: Plan) -> tuple[int, int, int, int, str]:
    schedule = plan.schedule.replace("pipedream-flush", "megatron")
    return plan.tensor, plan.context, plan.depth, plan.width, schedule


def _ends(layers: int, longest: int) -> Iterator[tuple[int, int]]:
    """(first, last) of two stages with so many layers together."""
    least = max(layers - longest, 1)
    most = min(longest, layers - 1)
    for first in range(least, most + 1):
        yield first, layers - first


def _divisors(number: int, allowed: tuple[int, ...] | None) -> list[int]:
    divisors = []
    for k in allowed or range(1, number + 1):
        if number % k == 0:
            divisors.append(k)
    return divisors


def on_fewer(
    cost: Cost, space: Space, limit: float = math.inf
) -> tuple[Cost, float, Plan] | None:
    """(costs there, seconds per sample, plan) on the part of the cluster with the
    fastest plan, if it takes less than `limit` seconds per sample.

    The parts: fewer servers (of many servers, powers of two), or fewer GPUs of every
    server.
    """
    servers = cost.cluster.servers
    per_server = cost.cluster.gpus_per_server
    parts = [(servers, count) for count in range(1, per_server)]
    for count in range(1, servers):
        if servers <= 8 or math.log2(count).is_integer():
            parts.append((count, per_server))
    best = None
    for part in sorted(parts, key=math.prod, reverse=True):
        on_part = replace(cost, cluster=cost.cluster.part(*part))
        fastest = next(iter(Search(on_part, space, limit=limit)), None)
        if fastest is not None:
            limit, plan = fastest
            best = on_part, limit, plan
    return best
