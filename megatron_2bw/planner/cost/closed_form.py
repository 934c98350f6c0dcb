"""Time and memory of a plan by the paper's closed forms (Appendix A), with the errata of its text. Pure Python.

A quick check of the simulation, and the paper's own planner: it knows no stall but the replicas' exchange. What is
corrected: the exchange counts 1/m a microbatch, compute and messages add up, the inputs of the layers in flight take
memory, and so do gradients, main weights and the optimizer.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_2bw.planner.cost.compute import ELEMENT, Work
from megatron_2bw.planner.cost.memory import BYTES, StageMemory
from megatron_2bw.planner.cost.simulated import Cost, Estimate, Split
from megatron_2bw.planner.describe.plan import Plan

# c_extra: a forward again before each backward, which takes twice as long (section 4.1).
RECOMPUTE_EXTRA = 4 / 3


class ClosedForm(Cost):
    """As Cost, by closed forms."""

    method = "closed forms"

    def stages(self, plan: Plan) -> list[Work]:
        if plan.recompute != "full":
            return super().stages(plan)
        return [work * RECOMPUTE_EXTRA for work in super().stages(replace(plan, recompute="none"))]

    def seconds(self, plan: Plan) -> float:
        """A microbatch takes max over stages of max(T_comp + T_comm to the neighbours, T_comm of the replicas / m);
        without pipelining their sum. A flush adds the time of d - 1 of them. Each extra forward that runs ahead over a
        boundary hides its T_comm by the T_comp of the slowest stage."""
        each = self._each(plan)
        if plan.schedule == "no-pipelining":
            return plan.microbatches * sum(each)
        fill = (plan.depth - 1) / plan.virtual if plan.pipeline.flushes else 0
        return (plan.microbatches + fill) * max(each)

    lower_bound = seconds

    def _hidden(self, plan: Plan) -> float:
        return self.seconds(replace(plan, extra_warmup=(plan.microbatches,)))  # more than is legal

    def waits(self, plan: Plan) -> tuple[float, float, float, float]:
        return 0.0, 0.0, 0.0, 0.0  # they are counted by microbatch

    def _each(self, plan: Plan) -> list[float]:
        times, works = self.times(plan), self.stages(plan)
        reduce, slowest = times.of("reduce", plan.depth), max(work.total for work in works)
        # Both ways over each boundary, and over none before the first stage and behind the last.
        sent = [max(2 * t - k * slowest, 0.0) for t, k in zip(times.of("transfer", plan.depth), plan.extra)]
        neighbours = (before + after for before, after in zip([0.0, *sent], [*sent, 0.0]))
        return [
            max(work.total + both, seconds / plan.microbatches)
            for work, both, seconds in zip(works, neighbours, reduce)
        ]

    def fits(self, plan: Plan) -> bool:
        return self._memory(plan).total <= self.capacity

    def _memory(self, plan: Plan) -> StageMemory:
        """Of a stage: without recompute 2|W|/d + d·|A|/d + d·|A_in|, with it 2|W|/d + |A|/d + d·|A_in|.

        The two versions and the d microbatches in flight are 2BW's; another schedule has its own numbers.
        """
        schedule, shape = plan.pipeline, plan.shape
        in_flight = schedule.max_in_flight(shape, 0) / plan.virtual
        each = BYTES[self.precision].a_parameter(
            schedule.max_versions(shape, 0),
            plan.gradient_slots if schedule.late_step else 1,
            plan.width if plan.distributed_optimizer else 1,
            plan.extrapolate,
        )
        parameters = self.model.parameters() / plan.depth / plan.tensor
        whole = self.memory.layer(replace(plan, recompute="none"))[0] * self.model.layers / plan.depth
        inputs = plan.microbatch * self.model.sequence * self.model.hidden * ELEMENT[self.precision]
        activations = whole * (1 if plan.recompute == "full" else in_flight) + in_flight * inputs
        return StageMemory(*(size * parameters for size in each), activations, 0.0, 0.0)

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
        return Estimate(plan, seconds, split, (self._memory(plan),) * plan.depth, self.capacity)
