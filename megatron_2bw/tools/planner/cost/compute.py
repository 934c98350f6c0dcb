"""Seconds of one GPU's computation: a layer, the output layer, the optimizer. Pure
Python.

A layer takes the longer of two times: the GPU's, for arithmetic and memory traffic, and
the host's, for launching the kernels one by one. The GPU's time has three constants:
the shares of the peak that large matrix products and flash attention reach, and the
share of the bandwidth that the other kernels reach.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_2bw.tools.planner.cost.communication import (
    Layout,
    all_reduce,
    all_to_all,
    half,
    layout,
    ring_step,
)
from megatron_2bw.tools.planner.cost.memory import (
    ELEMENT,
    keys_and_values,
    layer_activations,
    score_activations,
)
from megatron_2bw.tools.planner.descriptions.cluster import Cluster
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.plan import Plan, by_fields


@dataclass(frozen=True)
class Work:
    """Seconds of one microbatch on one stage; `tensor` of them wait for tensor and
    context parallelism's messages."""

    forward: float
    backward: float
    tensor: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.forward + other.forward,
            self.backward + other.backward,
            self.tensor + other.tensor,
        )

    def __mul__(self, count: float) -> Work:
        return Work(self.forward * count, self.backward * count, self.tensor * count)

    @property
    def total(self) -> float:
        return self.forward + self.backward


class Compute:
    """Times of a model's parts on a cluster in a precision. flash: attention that never
    stores its scores."""

    def __init__(self, model: Model, cluster: Cluster, precision: str, flash: bool):
        self.model, self.cluster, self.precision, self.flash = (
            model,
            cluster,
            precision,
            flash,
        )
        self.profile, device = cluster.profile, cluster.device
        peak = device.tflops_fp32 if precision == "fp32" else device.tflops
        self.peak = (peak or device.tflops) * 1e12
        self.flops = self.peak * device.gemm_efficiency
        self.bytes = device.memory_gb_s * 1e9 * device.memory_efficiency
        self.launch = device.layer_launch_us * 1e-6
        self.collective_launch = device.collective_launch_us * 1e-6

    @by_fields(
        "tensor",
        "context",
        "expert",
        "microbatch",
        "recompute",
        "sequence_parallel",
        "pipeline_inside",
    )
    def layer(self, plan: Plan) -> Work:
        """One layer of the plan's microbatch, with tensor-parallel collectives and
        recompute."""
        forward, backward = self._kernels(
            plan.samples, plan.tensor, plan.sequence_parallel, plan.expert
        )
        # A measured block contains the host's time, and the messages between its ranks.
        inside = self._measured_with(plan.tensor)
        more = ADAPTED * bool(self.model.adapter_rank) + ROUTED * bool(
            self.model.experts
        )
        launch, pair = 0.0 if inside else self.launch * (1 + more), 0.0
        size = (
            plan.samples
            * self.model.sequence
            * self.model.hidden
            * ELEMENT[self.precision]
        )
        # two all-reduces per pass, or four all-gathers and reduce-scatters of as many
        # bytes
        if plan.tensor > 1:
            group = self.layout(plan).tensor
            collective, count = (half, 4) if plan.sequence_parallel else (all_reduce, 2)
            pair = count * collective(self.cluster, group, size)
            # each token as often as it has experts, and once for the shared one
            if self.model.experts:
                pair *= (1 + bool(self.model.shared_ffn)) / 2
                pair += (
                    count / 2 * collective(self.cluster, group, self.model.topk * size)
                )
            if inside:
                pair = min(pair, forward, backward)
                forward, backward = forward - pair, backward - pair
            else:
                launch += count * self.collective_launch
        # to the experts and back; with tensor parallelism each rank sends its part of
        # the sequence
        if plan.expert > 1:
            size *= self.model.topk / plan.tensor
            pair += 2 * all_to_all(self.cluster, self.layout(plan).experts, size)
            launch += 2 * self.collective_launch
        ring = self._ring(plan, 1)
        launch += (plan.context - 1) * self.collective_launch
        there, back = pair + ring, pair + self._ring(plan, 2)
        first, last = (
            max(forward + there, launch),
            max(backward + back, BACKWARD_LAUNCH * launch),
        )
        if plan.recompute == "full":
            return Work(first, last + max(forward + there, launch), 2 * there + back)
        if plan.recompute == "selective":  # the core attention
            stored = score_activations(
                self.model, plan.samples, plan.tensor, self.flash, self.precision
            )
            last += (
                self._attention(plan.samples, plan.tensor)
                + TRAFFIC * stored / self.bytes
                + ring
            )
            back += ring
        return Work(first, last, there + back)

    def _measured_with(self, tensor: int) -> bool:
        return self.profile is not None and self.profile.measured_with(tensor)

    def layout(self, plan: Plan) -> Layout:
        sizes = plan.tensor, plan.depth, plan.width
        return layout(
            *sizes,
            plan.pipeline_inside,
            self.cluster.gpus_per_server,
            plan.context,
            plan.expert,
        )

    def _ring(self, plan: Plan, passes: int) -> float:
        """Seconds for which a layer's attention waits for keys and values of the other
        parts of the sequences.

        Megatron's default, --cp-comm-type p2p: in each of `context` steps a rank
        attends to one part and concurrently receives the next. A backward (2 passes)
        takes twice as long, and the parts' gradients travel too.
        """
        if plan.context == 1:
            return 0.0
        attention = passes * self._attention(plan.samples, plan.tensor) / plan.context
        size = passes * keys_and_values(
            self.model, plan.samples, plan.tensor, self.precision
        )
        return (plan.context - 1) * max(
            ring_step(self.cluster, self.layout(plan).context, size) - attention, 0.0
        )

    def _kernels(
        self, microbatch: float, tensor: int, sequence_parallel: bool, expert: int = 1
    ) -> tuple[float, float]:
        """(forward, backward) of one layer's kernels; with messages if they were
        measured with so many ranks."""
        if self.profile:
            share = 1 if self._measured_with(tensor) else tensor
            forward, backward = self.profile.layer(microbatch, tensor // share)
            # the gradients of the inputs alone
            backward = forward if self.model.adapter_rank else backward
            return forward / share, backward / share
        stored = layer_activations(
            self.model,
            microbatch,
            tensor,
            sequence_parallel,
            self.flash,
            self.precision,
        )
        traffic = (
            TRAFFIC * stored / self.bytes
            + KERNELS * self.cluster.device.kernel_us * 1e-6
        )
        attention = self._attention(microbatch, tensor)
        # The forward's products sum over the inputs; the backward's over the outputs
        # (gradient of the inputs) and over the tokens (gradient of the weights).
        tokens, forward, backward = microbatch * self.model.sequence, 0.0, 0.0
        for inputs, outputs in self.model.matrix_sides(tensor):
            forward += self.product(tokens, inputs, outputs)
            backward += self.product(tokens, outputs, inputs)
            weights = self.product(inputs, tokens, outputs)
            # A frozen matrix has no gradient; its adapter has two products in a forward
            # and four in a backward.
            thin = (
                2 * tokens * self.model.adapter_rank * (inputs + outputs) / self.flops
            )
            forward, backward = (
                forward + thin,
                backward + (2 * thin if thin else weights),
            )
        # experts of a rank, with equal parts of the tokens
        own = self.model.experts / expert
        for inputs, outputs in self.model.expert_sides(tensor):
            rows = tokens * self.model.topk / own
            weights = (
                0.0 if self.model.adapter_rank else self.product(inputs, rows, outputs)
            )
            forward += own * self.product(rows, inputs, outputs)
            backward += own * (self.product(rows, outputs, inputs) + weights)
        return forward + attention + traffic, backward + 2 * attention + traffic

    def product(self, rows: float, inner: float, columns: float) -> float:
        """Seconds of a matrix product that sums over `inner`. In the last round of its
        tiles half of the units idle, and each tile takes the time of FILL more sums to
        fill and to empty the pipeline of its unit."""
        return (
            2 * rows * columns * (inner + FILL)
            + TILE * self.cluster.device.units * inner
        ) / self.flops

    def _attention(self, microbatch: float, tensor: int) -> float:
        """Seconds of the forward of the scores and of their product with the values.
        Flash attention omits the half that a causal mask discards."""
        flops = self.model.layer_flops(microbatch, tensor)[1]
        if not self.flash:
            return flops / self.flops
        share = (
            self.cluster.device.attention_efficiency
            or self.cluster.device.gemm_efficiency
        )
        return flops * (1 if self.model.kind == "bert" else 0.5) / (self.peak * share)

    def embedding(self, plan: Plan) -> Work:
        """Look-up, positions and dropout: only memory traffic."""
        size = (
            plan.samples
            * self.model.sequence
            * self.model.hidden
            * ELEMENT[self.precision]
        )
        forward = max(4 * size / self.bytes, 0 if self.profile else self.launch / 4)
        return Work(forward, 2 * forward)

    def output(self, plan: Plan) -> Work:
        """Final norm, output layer and loss."""
        if self.profile:
            profile, ranks = (
                self.profile,
                plan.tensor if self._measured_with(plan.tensor) else 1,
            )
            there = replace(self.model, vocab=profile.vocab).padded_vocab(ranks)
            share = self.model.padded_vocab(plan.tensor) / there * ranks / plan.tensor
            forward, backward = profile.output_layer(plan.samples, ranks)
            return Work(
                forward * share,
                (forward if self.model.adapter_rank else backward) * share,
            )
        logits = (
            plan.samples
            * self.model.sequence
            * self.model.padded_vocab(plan.tensor)
            / plan.tensor
        )
        seconds = self.model.output_flops(plan.samples, plan.tensor) / self.flops
        traffic = LOGIT_TRAFFIC * logits / self.bytes
        back = seconds if self.model.adapter_rank else 2 * seconds
        return Work(
            max(seconds + traffic, self.launch), max(back + traffic, self.launch)
        )

    def update(self, parameters: float, owned: float) -> float:
        """The optimizer's step on one GPU: it reads and writes gradients, two moments
        and main weights of what it owns (Memory.owned)."""
        if self.profile:
            seconds = owned * self.profile.optimizer_seconds_per_parameter
        else:
            seconds = (owned * UPDATE_TRAFFIC + parameters * 6) / self.bytes
        return seconds + self.cluster.device.step_us * 1e-6

    def host_update(self, owned: float, gradient: int, weight: int) -> float:
        """The same in host memory, with the norm, clipping, the conversion to 16 bits
        and the copies in and out."""
        device = self.cluster.device
        copies, cores = (
            (gradient + weight) / device.pcie_gb_s,
            HOST_TRAFFIC / device.host_gb_s,
        )
        return owned * (copies + cores) / 1e9


# Bytes moved for each byte that the backward needs: one write and one read in the
# forward, one read in the backward and one write of a gradient (measured: arXiv
# 2205.05198, Table 4, where a backward takes 1.6 forwards, not 2).
TRAFFIC = 2.0
# Memory-bound kernels of a layer's forward, and of its backward: two norms, two
# additions, positions, activation, and the start of attention.
KERNELS = 7
# Launches of a layer's router, of its permutations and of the experts' grouped
# products, in those of a dense layer. An assumption.
ROUTED = 1.5
# launches of a layer's four adapters, in those of the layer: four kernels each, by
# their count
ADAPTED = 1.0
# Elements of a matrix product that one unit computes per round, and the sums by which
# FILL lengthens each tile: the pair with the least scatter over 168 products that
# SimuMax measured on an A100 (bench/measured/simumax_kernels.csv).
TILE, FILL = 256 * 128, 200
# Bytes moved for each logit: a write and a read of 16 bits, a write and a read of the
# 32-bit exponential, and sums.
LOGIT_TRAFFIC = 16
# Bytes moved for each parameter of an Adam step on 32-bit main weights: gradient 4,
# moments 16, weights 8.
UPDATE_TRAFFIC = 28
# The same on the host, with norm, clipping and conversion: together 2.2 times the time
# of Adam (bench/device.py host).
HOST_TRAFFIC = 62
# Host time of a backward in forwards: twice as many kernels, but launched from C++
# instead of Python.
BACKWARD_LAUNCH = 1.5
