"""Finds the fastest plans that are legal and fit: an exact best-first search. Pure
Python.

Invariant: `Search` yields the first plans of a full enumeration of the space, in its
order. One queue holds the plans by a lower bound on their time per sample. The bound
tightens in steps: shape, stages, schedule, plan, simulation.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from megatron_2bw.tools.planner.cost.bounds import work_bound
from megatron_2bw.tools.planner.cost.compute import Work
from megatron_2bw.tools.planner.cost.memory import GIB
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions.plan import Plan, by_fields
from megatron_2bw.tools.planner.find.legality import may_divide_sequences, violations
from megatron_2bw.tools.planner.find.space import Space

# layers by which a stage may differ from its share, on clusters of different GPUs
WIDER = 2


class Search:
    """An iterable of (seconds per sample, plan), fastest first.

    rejected   cause (legality.RULES) -> number of shapes (tensor, context, depth,
               microbatch) and plans that it forbids
    too_large  the plans that do not fit and whose bound is below the last plan yielded,
               lowest bound first
    examined   number of simulated plans
    distinct   whether to yield only the fastest plan of each (tensor, context, depth,
               width, schedule)
    limit      seconds per sample; only faster plans are yielded
    """

    def __init__(
        self, cost: Cost, space: Space, distinct: bool = True, limit: float = math.inf
    ):
        self.cost, self.space, self.distinct, self.limit = cost, space, distinct, limit
        self._host = (
            cost.model,
            cost.cluster.gpus,
            cost.precision,
            cost.cluster.device.bf16,
        )
        # plans with equal bounds leave the queue in the order of enumeration
        self._number = itertools.count()
        self._clear()

    def _clear(self) -> None:
        self.rejected: Counter[str] = Counter()
        self.too_large: list[Plan] = []
        self.examined = 0

    def __iter__(self) -> Iterator[tuple[float, Plan]]:
        self._clear()
        queue: list[tuple[float, int, str, Plan, tuple]] = []

        def put(bound: float, state: str, plan: Plan, choice: tuple = ()) -> None:
            heapq.heappush(queue, (bound, next(self._number), state, plan, choice))

        for plan in self.shapes():
            put(self._shape_bound(plan), "shape", plan)

        def bounded(plan: Plan) -> None:
            put(
                max(self.cost.lower_bound(plan) / plan.global_batch, bound),
                "bound",
                plan,
            )

        def enter(plan: Plan) -> None:
            bounded(plan)
            ahead = self.cost.bound_ahead(plan) if self.space.extra_warmup else None
            if ahead is not None:
                put(max(ahead / plan.global_batch, bound), "ahead", plan)

        found: set[tuple] = set()
        while queue:
            bound, _, state, plan, choice = heapq.heappop(queue)
            if bound >= self.limit:
                return
            if (
                state == "shape"
                and self._least_memory(plan) > self.cost.fastest.capacity
            ):
                self.too_large.append(self._leanest(plan))
            elif state == "shape":
                for split in self.split(plan):
                    put(self._split_bound(split), "split", split)
            elif state == "split":
                for choice in self._schedules(plan):
                    put(self._work_bound(plan, *choice), "schedule", plan, choice)
            elif state == "schedule":
                plan = self._scheduled(plan, *choice)
                for variant in self.variants(plan) if plan else ():
                    enter(self._leaner(variant))
            elif self.distinct and self._key(plan) in found:
                continue
            elif state == "ahead":
                extra = self.cost.extra_warmup(plan)
                if extra:
                    bounded(plan.changed(extra_warmup=extra))
            elif state == "bound":
                plan = plan.changed(late=self.cost.late(plan))
                keeps_inputs = (
                    plan.recompute_layers > 1 and "full" in self.space.recompute
                )
                if keeps_inputs and self.cost.fits(plan.changed(recompute_layers=1)):
                    continue  # that takes as long
                if not self.cost.fits(plan):
                    size = self.cost.gpipe_round(plan)
                    if size is not None:
                        bounded(plan.changed(gpipe_round=size))
                    else:
                        self.too_large.append(plan)
                else:
                    self.examined += 1
                    put(self.cost.seconds(plan) / plan.global_batch, "exact", plan)
            else:
                found.add(self._key(plan))
                yield bound, plan

    def _leaner(self, plan: Plan) -> Plan:
        """Where two gradient slots of 2bw do not fit: one and a shard, or the optimizer
        on a host that holds it."""
        if (plan.schedule, plan.gradient_slots) != ("2bw", 2) or self.cost.fits(plan):
            return plan
        shard = plan.changed(gradient_slots="shard")
        if plan.distributed_optimizer and self.cost.fits(shard):
            return shard
        return (
            plan.changed(host=True)
            if self.space.host and self.cost.host_holds(plan)
            else plan
        )

    @staticmethod
    def _key(plan: Plan) -> tuple[int, int, int, int, str]:
        return plan.tensor, plan.context, plan.depth, plan.width, plan.schedule

    def _shape_bound(self, plan: Plan) -> float:
        """Seconds per sample if the stages had equal work and never waited."""
        works = self.cost.fastest.stages(
            replace(plan, depth=1, width=plan.width * plan.depth)
        )
        return works[0].total / (plan.depth * plan.microbatch * plan.width)

    def _leanest(self, shape: Plan) -> Plan:
        """The shape with the space's choices that need the fewest weights, gradients
        and optimizer states."""
        schedules = sorted(
            self.space.schedules, key=lambda name: name in ("2bw", "pipedream")
        )
        sharded = max(self.space.distributed_optimizer) and shape.replicas > 1
        slots = 1 if 1 in self.space.gradient_slots else "shard" if sharded else 2
        plan = shape.changed(
            schedule=schedules[0],
            gradient_slots=slots if schedules[0] == "2bw" else 2,
            distributed_optimizer=sharded,
            extrapolate=False,
        )
        room = (
            max(
                each.host_memory_gib
                for each in (self.cost.cluster.devices or [self.cost.cluster.device])
            )
            * GIB
        )
        # With more bytes than that no division of the layers fits.
        late = (
            self.space.host
            and "2bw" in schedules
            and sum(self.cost.memory.host_bytes(plan)) <= plan.depth * room
        )
        return (
            min(
                plan,
                plan.changed(schedule="2bw", gradient_slots=2, host=True),
                key=self._bytes,
            )
            if late
            else plan
        )

    def _bytes(self, plan: Plan) -> float:
        """Of a parameter, on the GPU."""
        return sum(
            self.cost.memory.a_parameter(plan, 2 if plan.schedule == "2bw" else 1)
        )

    def _least_memory(self, shape: Plan) -> float:
        """Bytes of weights, gradients and optimizer on equal stages. Every plan of the
        shape needs at least these."""
        plan, memory = self._leanest(shape), self.cost.memory
        versions = 2 if plan.schedule == "2bw" else 1
        stages = enumerate(shape.layers_of(self.cost.model))
        return (
            sum(
                sum(memory.state(plan, *s, versions)) + memory.frozen(plan, *s)
                for s in stages
            )
            / plan.depth
        )

    def _split_bound(self, plan: Plan) -> float:
        """Seconds per sample if the busiest stage never waited."""
        return max(work.total for work in self._works(plan)) / (
            plan.microbatch * plan.width
        )

    def _works(self, split: Plan) -> list[Work]:
        """Work of one microbatch on each stage, in the rank order that puts it on the
        faster GPUs."""
        if not self.cost.cluster.devices:
            return self.cost.stages(split)
        orders = [
            self.cost.stages(split.changed(pipeline_inside=inside))
            for inside in self.space.pipeline_inside
        ]
        return [
            Work(min(w.forward for w in works), min(w.backward for w in works))
            for works in zip(*orders)
        ]

    def _work_bound(
        self, split: Plan, schedule: str, slots: int, virtual: int
    ) -> float:
        """Seconds per sample of the schedule, with the shortest steps and messages of
        all `variants`."""
        works = self._works(split)
        seconds = work_bound(works, split.microbatches, schedule, virtual)
        reduce, update, messages, taken = self._least_waits(split)
        if schedule == "2bw":
            in_flight = split.microbatches if self.space.extra_warmup else split.depth
            around = (sum(work.total for work in works) + 2 * messages) / in_flight
            seconds = max(seconds, split.microbatches * max(around, taken), reduce)
        elif schedule != "pipedream":
            seconds += update if schedule == "megatron" else update + reduce
        return seconds / split.global_batch

    @by_fields(
        "tensor",
        "context",
        "expert",
        "depth",
        "width",
        "microbatch",
        "first",
        "last",
        "stages",
    )
    def _least_waits(self, split: Plan) -> tuple[float, float, float, float]:
        """The minimum of `Cost.waits` over all `variants`, term by term."""
        choices = itertools.product(
            self.space.pipeline_inside, self.space.distributed_optimizer
        )
        plans = (
            split.changed(pipeline_inside=inside, distributed_optimizer=sharded)
            for inside, sharded in choices
        )
        return tuple(map(min, zip(*map(self.cost.waits, plans))))

    def shapes(self) -> Iterator[Plan]:
        """One plan for each legal (tensor, context, depth, width, expert, microbatch,
        recompute), with Megatron's schedule."""
        space, gpus = self.space, self.cost.cluster.gpus
        for tensor in _divisors(gpus, space.tensor):
            across = itertools.product(
                _divisors(gpus // tensor, space.context),
                _divisors(gpus // tensor, space.depth),
            )
            for context, depth in across:
                width, rest = divmod(gpus, tensor * context * depth)
                if rest:
                    continue
                sizes = space.microbatch or tuple(
                    2**k for k in range(12) if 2**k * width <= space.batch
                )
                parts = (
                    math.gcd(self.cost.model.experts, context * width)
                    if self.cost.model.experts
                    else 1
                )
                for microbatch, expert in itertools.product(
                    sizes or (1,), _divisors(parts, space.expert)
                ):
                    plan = self._shape(
                        tensor, context, depth, width, microbatch, expert
                    )
                    if plan is not None:
                        yield from self._recomputes(plan)

    def _shape(
        self,
        tensor: int,
        context: int,
        depth: int,
        width: int,
        microbatch: int,
        expert: int,
    ) -> Plan | None:
        microbatches = self.space.batch // (microbatch * width)
        if not microbatches:
            self.rejected[
                "the global batch is smaller than the data-parallel size"
            ] += 1
            return None
        splits = self.splits(depth)
        if not splits:
            self.rejected["more stages than the layers divide into"] += 1
            return None
        divided = (
            self.space.sequence_parallel
            and tensor > 1
            and may_divide_sequences(self.cost.model)
        )
        plan = Plan(
            *(tensor, depth, width, microbatch, microbatches),
            schedule="megatron",
            first=splits[0][0],
            last=splits[0][1],
            sequence_parallel=divided,
            context=context,
            expert=expert,
            grad_reduce_in_bf16=self.space.grad_reduce_in_bf16,
        )
        return plan if self._legal(plan) else None

    def _legal(self, plan: Plan) -> bool:
        """Whether the plan is legal. Counts the plans that are not."""
        for cause in violations(plan, *self._host):
            self.rejected[cause] += 1
            return False
        return True

    def _recomputes(self, plan: Plan) -> Iterator[Plan]:
        for kind in self.space.recompute:
            if kind == "block":
                yield plan.changed(recompute="full", recompute_block=1)
            elif kind != "stage":
                yield plan.changed(recompute=kind)
            elif plan.depth > 1 or "full" not in self.space.recompute:
                yield plan.changed(
                    recompute="full", recompute_layers=self.cost.model.layers
                )

    def split(self, shape: Plan) -> Iterator[Plan]:
        """The shape with its layers divided."""
        for split in self.layouts(shape):
            if split.recompute_block:
                longest = max(split.layers_of(self.cost.model))
                yield from (
                    split.changed(recompute_block=block) for block in range(1, longest)
                )
                continue
            if split.recompute_layers > 1:
                split = split.changed(
                    recompute_layers=max(split.layers_of(self.cost.model))
                )
            if (
                split.recompute_layers > 1
                or shape.recompute_layers == 1
                or "full" not in self.space.recompute
            ):
                yield split

    def layouts(self, shape: Plan) -> Iterator[Plan]:
        """The shape with layers on each stage. Stages between the ends have as many as
        the others on the same GPUs."""
        depth, layers = shape.depth, self.cost.model.layers
        devices = (
            [self.cost.device(shape, stage) for stage in range(depth)]
            if self.cost.cluster.devices
            else []
        )
        if len({*devices}) < 2 or not self.space.uneven:
            yield from (
                shape.changed(first=first, last=last)
                for first, last in self.splits(depth)
            )
            return
        # By its speed each GPU has a share of the layers; a stage may have up to WIDER
        # more or less.
        totals = {
            device: self.cost._compute(device).layer(shape).total
            for device in dict.fromkeys(devices)
        }
        each = layers / sum(1 / totals[device] for device in devices)
        near = {
            device: range(
                max(math.floor(each / total) - WIDER, 1),
                math.ceil(each / total) + WIDER + 1,
            )
            for device, total in totals.items()
        }
        middle = [*dict.fromkeys(devices[1:-1])]
        for counts in itertools.product(*(near[device] for device in middle)):
            given = dict(zip(middle, counts))
            between = [given[device] for device in devices[1:-1]]
            for first in near[devices[0]]:
                last = layers - sum(between) - first
                if last in near[devices[-1]]:
                    yield shape.with_layers([first, *between, last])

    def splits(self, depth: int) -> list[tuple[int, int]]:
        """(first, last) layers of uneven stages; (0, 0) for an even split.

        The embedding on the first stage takes memory, and the output layer on the last
        stage as long as several layers. So either stage may have fewer layers, and the
        others up to two more than an even split.
        """
        layers = self.cost.model.layers
        found = [(0, 0)] if layers % depth == 0 else []
        if depth == 1 or not self.space.uneven:
            return found
        longest = -(-layers // depth) + 2
        if depth == 2:
            longest = max(longest, layers // 2 + layers // 8)
            firsts = range(max(layers - longest, 1), min(longest, layers - 1) + 1)
            return found + [
                (first, layers - first) for first in firsts if 2 * first != layers
            ]
        for middle in range(max(layers // depth - 1, 1), longest + 1):
            ends = layers - middle * (depth - 2)
            pairs = (
                (first, ends - first)
                for first in range(max(ends - longest, 1), min(longest, ends - 1) + 1)
            )
            found += [pair for pair in pairs if pair != (middle, middle)]
        return found

    def _scheduled(
        self, split: Plan, schedule: str, slots: int, virtual: int
    ) -> Plan | None:
        microbatches = split.microbatches
        if virtual > 1:
            microbatches -= microbatches % split.depth
        if not microbatches:
            return None
        plan = split.changed(
            schedule=schedule,
            gradient_slots=slots,
            virtual=virtual,
            microbatches=microbatches,
            extrapolate=self.space.extrapolate and schedule == "2bw",
        )
        return plan if self._legal(plan) else None

    def variants(self, plan: Plan) -> Iterator[Plan]:
        """The plan in each rank order, with and without the distributed optimizer;
        without extra warm-up."""
        for inside, distributed in itertools.product(
            self._orders(plan), self._optimizers(plan)
        ):
            yield plan.changed(
                pipeline_inside=inside, distributed_optimizer=distributed
            )

    def _schedules(self, shape: Plan) -> Iterator[tuple[str, int, int]]:
        """(schedule, gradient slots, chunks per stage)."""
        for schedule in self.space.schedules:
            if schedule == "2bw":
                yield from ((schedule, slots, 1) for slots in self.space.gradient_slots)
                continue
            if (
                shape.depth == 1
                and schedule not in ("megatron", "pipedream")
                and "megatron" in self.space.schedules
            ):
                # on one stage they equal Megatron's schedule without its overlap
                continue
            yield schedule, 2, 1
            if (
                schedule == "megatron"
                and shape.depth > 1
                and not shape.stages
                and not shape.recompute_block
            ):
                each = math.gcd(*shape.layers_of(self.cost.model))
                yield from (
                    (schedule, 2, virtual)
                    for virtual in _divisors(each, self.space.virtual)
                    if virtual > 1
                )

    def _orders(self, shape: Plan) -> tuple[bool, ...]:
        """The rank orders of the space; only the first if all put the ranks on the same
        servers."""
        one, other = (
            self.cost.compute.layout(shape.changed(pipeline_inside=inside))
            for inside in (False, True)
        )
        return self.space.pipeline_inside[
            : 1 if one == other or shape.expert > 1 else 2
        ]

    def _optimizers(self, plan: Plan) -> tuple[bool, ...]:
        choices = self.space.distributed_optimizer
        if plan.replicas == 1:
            return choices[:1]
        return tuple(
            choice
            for choice in choices
            if not (choice and plan.schedule == "pipedream")
        )


def _divisors(number: int, allowed: tuple[int, ...] | None) -> list[int]:
    return [
        k
        for k in range(1, number + 1)
        if number % k == 0 and (allowed is None or k in allowed)
    ]


def on_fewer(
    cost: Cost, space: Space, limit: float = math.inf
) -> tuple[Cost, float, Plan] | None:
    """(costs there, seconds per sample, plan) on the part of the cluster with the
    fastest plan, if it takes less than `limit` seconds per sample.

    The parts: fewer servers (of many servers, counts with more factors of two), or
    fewer GPUs of every server.
    """
    servers, per_server = cost.cluster.servers, cost.cluster.gpus_per_server
    counts = (
        {n for k in range(20) for n in (servers >> k, servers >> k << k)}
        if servers > 8
        else range(1, servers)
    )
    parts = [(n, per_server) for n in counts if 0 < n < servers] + [
        (servers, n) for n in range(1, per_server)
    ]
    found = None
    for part in sorted(parts, key=math.prod, reverse=True):
        on = cost.on(cost.cluster.part(*part))
        for seconds, plan in itertools.islice(
            Search(on, space, limit=found[1] if found else limit), 1
        ):
            found = on, seconds, plan
    return found
