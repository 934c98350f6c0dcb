"""Time and memory of a plan by the paper's closed forms, corrected and as printed. Pure Python.

Two texts of the paper differ. `Printed` is section 4.2 of arXiv 2006.09503. Its Appendix A, of the later version,
counts 1/m of the reduction per microbatch, adds compute and messages, and counts the inputs of the stages in flight.
`ClosedForm` is Appendix A, and counts gradients, main weights and the optimizer too, which neither text has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_2bw.models.plan import Plan
from megatron_2bw.planner.cost.compute import Work
from megatron_2bw.planner.cost.memory import BYTES, ELEMENT, StageMemory
from megatron_2bw.planner.cost.simulated import Cost, Estimate, Split

# c_extra: each backward, twice as long as a forward, runs the forward again first (section 4.1).
RECOMPUTE_EXTRA = 4 / 3


class ClosedForm(Cost):
    """As Cost, by the closed forms of Appendix A, with all bytes of a parameter."""

    method = "closed forms"

    def stages(self, plan: Plan) -> list[Work]:
        if plan.recompute != "full" or plan.recompute_block:
            return super().stages(plan)
        return [work * RECOMPUTE_EXTRA for work in super().stages(replace(plan, recompute="none"))]

    def seconds(self, plan: Plan) -> float:
        """A microbatch takes max over stages of max(T_comp + T_comm to the neighbours, T_comm of the replicas / m);
        without pipelining their sum. A flush adds d - 1 microbatches' time, and gpipe has one in each round. Each extra
        warm-up forward of a boundary hides as much of its T_comm as the slowest stage's T_comp."""
        each = self._each(plan)
        if plan.schedule == "no-pipelining":
            return plan.microbatches * sum(each)
        fill = plan.rounds * (plan.depth - 1) / plan.virtual if plan.pipeline.flushes else 0
        return (plan.microbatches + fill) * max(each)

    lower_bound = seconds

    def _hidden(self, plan: Plan) -> float:
        return self.seconds(replace(plan, extra_warmup=(plan.microbatches,)))  # more than the legal maximum

    def waits(self, plan: Plan) -> tuple[float, float, float, float]:
        return 0.0, 0.0, 0.0, 0.0  # `seconds` counts them by microbatch

    def _each(self, plan: Plan) -> list[float]:
        times, works = self.times(plan), self.stages(plan)
        reduce, slowest = times.of("reduce", plan.depth), max(work.total for work in works)
        # Both directions of each boundary; the first stage has none before it, the last none behind it.
        sent = [max(2 * t - k * slowest, 0.0) for t, k in zip(times.of("transfer", plan.depth), plan.extra)]
        neighbours = (before + after for before, after in zip([0.0, *sent], [*sent, 0.0]))
        return [self._stage(plan, work.total, *waits) for work, *waits in zip(works, neighbours, reduce)]

    def _stage(self, plan: Plan, work: float, messages: float, reduce: float) -> float:
        """Seconds of a microbatch on a stage."""
        return max(work + messages, reduce / plan.microbatches)

    def fits(self, plan: Plan) -> bool:
        return self._memory(plan).total <= self.capacity

    def _memory(self, plan: Plan) -> StageMemory:
        """A stage's bytes: without recompute 2|W|/d + d·|A|/d + d·|A_in|, with recompute 2|W|/d + |A|/d + d·|A_in|.

        Two versions and d microbatches in flight are 2BW's numbers; other schedules have others.
        """
        schedule, shape = plan.pipeline, plan.shape
        in_flight = schedule.max_in_flight(shape, 0) / plan.virtual
        each = self.parameter_bytes(
            schedule.max_versions(shape, 0),
            plan.gradient_slots if schedule.late_step else 1,
            plan.replicas if plan.distributed_optimizer else 1,
            plan.extrapolate,
            plan.numerics,
        )
        parameters = self.model.parameters() / plan.depth / plan.tensor
        whole = self.memory.layer(replace(plan, recompute="none"))[0] * self.model.layers / plan.depth
        activations = whole * (1 if plan.recompute == "full" else in_flight) + in_flight * self._inputs(plan)
        return StageMemory(*(size * parameters for size in each), activations, 0.0, 0.0)

    def _inputs(self, plan: Plan) -> float:
        """Bytes of a stage's input, |A_in|."""
        return plan.samples * self.model.sequence * self.model.hidden * ELEMENT[self.precision]

    def estimate(self, plan: Plan) -> Estimate:
        seconds = self.seconds(plan)
        busiest = max(self.stages(plan), key=lambda work: work.total)
        compute = plan.microbatches * (busiest.total - busiest.tensor)
        tensor = plan.microbatches * busiest.tensor
        fill = seconds - plan.microbatches * max(self._each(plan))
        if plan.schedule == "no-pipelining":
            fill = seconds - plan.microbatches * busiest.total
        rest = max(seconds - compute - tensor - fill, 0.0)
        reduced = max(self.times(plan).of("reduce", plan.depth)) >= seconds - fill - 1e-12
        split = Split(compute, tensor, 0.0 if reduced else rest, rest if reduced else 0.0, 0.0, fill)
        return Estimate(plan, seconds, split, (self._memory(plan),) * plan.depth, (self.capacity,) * plan.depth)


class Printed(ClosedForm):
    """As ClosedForm, by section 4.2 of arXiv 2006.09503: weights and activations are all the memory that it counts."""

    method = "the closed forms as printed"

    def _stage(self, plan: Plan, work: float, messages: float, reduce: float) -> float:
        if plan.schedule == "no-pipelining":
            return max(work + messages, reduce)
        return max(work, messages, reduce)

    def _reduce(self, plan: Plan, works: list[Work], messages: list[tuple[float, float]], step: Any) -> list[float]:
        """bwth_width(w) is B_high where w is less than the GPUs of a server, so not for 8 pipelines on 8 GPUs."""
        link = self.cluster.inside if plan.width < self.cluster.gpus_per_server else self.cluster.between
        sent = 2 * (plan.replicas - 1) / plan.replicas * BYTES[self.precision].gradient
        return [sent * count / (link.gb_s * 1e9) for count in self._parameters(plan)]

    def parameter_bytes(self, versions: int, *others: object) -> tuple[float, float, float]:
        return float(BYTES[self.precision].weight * versions), 0.0, 0.0

    def _inputs(self, plan: Plan) -> float:
        return 0.0
