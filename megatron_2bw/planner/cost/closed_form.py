"""Time and memory of a plan by the paper's closed forms. Pure Python.

Two texts of the paper differ (docs/planner_accuracy.md). These are the forms of Appendix A, in the later version of
arXiv 2006.09503. Gradients, main weights and the optimizer count too, which neither text has.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_2bw.models.plan import Plan
from megatron_2bw.planner.cost.compute import Work
from megatron_2bw.planner.cost.memory import ELEMENT, StageMemory
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
        return [max(w.total + sent, r / plan.microbatches) for w, sent, r in zip(works, neighbours, reduce)]

    def fits(self, plan: Plan) -> bool:
        return self._memory(plan).total + self.spare_bytes <= self.capacity

    def _memory(self, plan: Plan) -> StageMemory:
        """A stage's bytes: without recompute 2|W|/d + d·|A|/d + d·|A_in|, with recompute 2|W|/d + |A|/d + d·|A_in|.

        Two versions and d microbatches in flight are 2BW's numbers; other schedules have others.
        """
        schedule, shape = plan.pipeline, plan.shape
        in_flight = schedule.max_in_flight(shape, 0) / plan.virtual
        each = self.memory.a_parameter(plan, schedule.max_versions(shape, 0))
        parameters, whole = (
            count(plan.expert) / plan.depth / plan.tensor
            for count in (self.model.trained_parameters, self.model.parameters)
        )
        frozen = ELEMENT[self.precision] * whole * bool(self.model.adapter_rank)
        kept = self.memory.layer(replace(plan, recompute="none"))[0] * self.model.layers / plan.depth
        entering = plan.samples * self.model.sequence * self.model.hidden * ELEMENT[self.precision]  # |A_in|
        activations = kept * (1 if plan.recompute == "full" else in_flight) + in_flight * entering
        weights, *others = (size * parameters for size in each)
        return StageMemory(weights + frozen, *others, activations, 0.0, 0.0)

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
