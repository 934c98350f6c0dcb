"""Seconds of one GPU's computation: a layer, the output layer, the optimizer. Pure
Python.

A layer takes the longer of two times: the GPU's, for arithmetic and memory traffic, and
the host's, for launching the kernels one by one. The GPU's time has three constants:
the shares of the peak that large matrix products and flash attention reach, and the
share of the bandwidth that the other kernels reach.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_2bw.tools.planner.cost.communication import (
    Layout,
    all_reduce,
    all_to_all,
    layout,
    ring_step,
    scatter_or_gather,
)
from megatron_2bw.tools.planner.cost.memory import Memory
from megatron_2bw.tools.planner.descriptions.cluster import Cluster
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.plan import Plan, by_fields


@dataclass(frozen=True)
class MicrobatchTime:
    """Seconds of one microbatch on one stage; `tensor` of them wait for tensor and
    context parallelism's messages."""

    forward: float
    backward: float
    tensor: float = 0.0

    def __add__(self, other: MicrobatchTime) -> MicrobatchTime:
        return MicrobatchTime(
            self.forward + other.forward,
            self.backward + other.backward,
            self.tensor + other.tensor,
        )

    def __mul__(self, count: float) -> MicrobatchTime:
        return MicrobatchTime(
            self.forward * count, self.backward * count, self.tensor * count
        )

    @property
    def total(self) -> float:
        return self.forward + self.backward


class Compute:
    """Times of a model's parts on a cluster in a precision. flash: attention that never
    stores its scores."""

    def __init__(self, model: Model, cluster: Cluster, precision: str, flash: bool):
        self.model = model
        self.cluster = cluster
        self.flash = flash
        self.memory = Memory(model, precision, flash)
        device = cluster.device
        peak = device.tflops_fp32 if precision == "fp32" else device.tflops
        self.peak = (peak or device.tflops) * 1e12
        self.flops = self.peak * device.gemm_efficiency
        self.bytes = device.memory_gb_s * 1e9 * device.memory_efficiency
        self.launch = device.layer_launch_us * 1e-6
        self.collective_launch = device.collective_launch_us * 1e-6

    @by_fields(
        "tensor context expert microbatch recompute sequence_parallel pipeline_inside"
    )
    def layer(self, plan: Plan) -> MicrobatchTime:
        """One layer of the plan's microbatch, with tensor-parallel collectives and
        recompute."""
        forward, backward = self._kernels(plan)
        launches = ADAPTED * bool(self.model.adapter_rank)
        launches += ROUTED * bool(self.model.experts)
        launch = self.launch * (1 + launches)
        of_attention, of_mlp = self._tensor_messages(plan)
        if plan.tensor > 1:
            collectives = 4 if plan.sequence_parallel else 2
            launch += collectives * self.collective_launch
        # to the experts and back; with tensor parallelism each rank sends its part of
        # the sequence
        if plan.expert > 1:
            size = self.memory.hidden_states(plan)
            size *= self.model.topk / plan.tensor
            group = self.layout(plan).experts
            of_mlp += 2 * all_to_all(self.cluster, group, size)
            launch += 2 * self.collective_launch
        ring = self._ring(plan, 1)
        launch += (plan.context - 1) * self.collective_launch
        pair = of_attention + of_mlp
        there = pair + ring
        back = pair + self._ring(plan, 2)
        first = max(forward + there, launch)
        last = max(backward + back, BACKWARD_LAUNCH * launch)
        if plan.recompute == "full":
            return MicrobatchTime(first, last + first, 2 * there + back)
        if plan.recompute == "selective":  # the core attention
            traffic = TRAFFIC * self.memory.scores(plan) / self.bytes
            last += self._attention(plan) + traffic + ring
            back += ring
        elif plan.recompute == "mlp":
            traffic = TRAFFIC * self.memory.mlp(plan) / self.bytes
            products = self._products(plan, self.model.mlp_sides(plan.tensor))
            last += products + traffic + of_mlp
            back += of_mlp
        return MicrobatchTime(first, last, there + back)

    def _tensor_messages(self, plan: Plan) -> tuple[float, float]:
        """Seconds of the tensor-parallel collectives of one pass, of the attention and
        of the MLP: an all-reduce each, or an all-gather and a reduce-scatter of as many
        bytes."""
        if plan.tensor == 1:
            return 0.0, 0.0
        group = self.layout(plan).tensor
        size = self.memory.hidden_states(plan)
        count = 2 if plan.sequence_parallel else 1
        collective = scatter_or_gather if plan.sequence_parallel else all_reduce
        each = count * collective(self.cluster, group, size)
        if not self.model.experts:
            return each, each
        # each token as often as it has experts, and once for the shared one
        routed = collective(self.cluster, group, self.model.topk * size)
        return each, count * routed + each * bool(self.model.shared_ffn)

    def layout(self, plan: Plan) -> Layout:
        return layout(
            plan.tensor,
            plan.depth,
            plan.width,
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
        attention = passes * self._attention(plan) / plan.context
        size = passes * self.memory.keys_and_values(plan)
        step = ring_step(self.cluster, self.layout(plan).context, size)
        waits = max(step - attention, 0.0)
        return (plan.context - 1) * waits

    def _kernels(self, plan: Plan) -> tuple[float, float]:
        """(forward, backward) of one layer's kernels."""
        tensor = plan.tensor
        adapters = self.model.adapter_rank
        traffic = TRAFFIC * self.memory.activations(plan) / self.bytes
        traffic += KERNELS * self.cluster.device.kernel_us * 1e-6
        attention = self._attention(plan)
        # The forward's products sum over the inputs; the backward's over the outputs
        # (gradient of the inputs) and over the tokens (gradient of the weights).
        tokens = plan.samples * self.model.sequence
        sides = self.model.matrix_sides(tensor)
        forward = self._products(plan, sides)
        backward = 0.0
        for inputs, outputs in sides:
            backward += self.product(tokens, outputs, inputs)
            # A frozen matrix has no gradient; its adapter has two products in a forward
            # and four in a backward.
            thin = 2 * tokens * adapters * (inputs + outputs) / self.flops
            forward += thin
            backward += 2 * thin if thin else self.product(inputs, tokens, outputs)
        # experts of a rank, with equal parts of the tokens
        experts = self.model.experts / plan.expert
        for inputs, outputs in self.model.expert_sides(tensor):
            rows = tokens * self.model.topk / experts
            weights = 0.0 if adapters else self.product(inputs, rows, outputs)
            gradients = self.product(rows, outputs, inputs) + weights
            backward += experts * gradients
        return forward + attention + traffic, backward + 2 * attention + traffic

    def _products(self, plan: Plan, sides: list[tuple[float, float]]) -> float:
        """Seconds of the forward of products of all tokens, and of the experts'."""
        tokens = plan.samples * self.model.sequence
        seconds = 0.0
        for inputs, outputs in sides:
            seconds += self.product(tokens, inputs, outputs)
        experts = self.model.experts / plan.expert
        for inputs, outputs in self.model.expert_sides(plan.tensor):
            rows = tokens * self.model.topk / experts
            seconds += experts * self.product(rows, inputs, outputs)
        return seconds

    def product(self, rows: float, inner: float, columns: float) -> float:
        """Seconds of a matrix product that sums over `inner`. In the last round of its
        tiles half of the units idle, and each tile takes the time of FILL more sums to
        fill and to empty the pipeline of its unit."""
        tiles = TILE * self.cluster.device.units * inner
        return (2 * rows * columns * (inner + FILL) + tiles) / self.flops

    def _attention(self, plan: Plan) -> float:
        """Seconds of the forward of the scores and of their product with the values.
        Flash attention omits the half that a causal mask discards."""
        _, flops = self.model.layer_flops(plan.samples, plan.tensor)
        if not self.flash:
            return flops / self.flops
        device = self.cluster.device
        share = device.attention_efficiency or device.gemm_efficiency
        if self.model.kind != "bert":
            flops *= 0.5
        return flops / (self.peak * share)

    def embedding(self, plan: Plan) -> MicrobatchTime:
        """Look-up, positions and dropout: only memory traffic."""
        traffic = 4 * self.memory.hidden_states(plan) / self.bytes
        forward = max(traffic, self.launch / 4)
        return MicrobatchTime(forward, 2 * forward)

    def output(self, plan: Plan) -> MicrobatchTime:
        """Final norm, output layer and loss."""
        vocab = self.model.padded_vocab(plan.tensor)
        adapters = self.model.adapter_rank
        logits = plan.samples * self.model.sequence * vocab / plan.tensor
        seconds = self.model.output_flops(plan.samples, plan.tensor) / self.flops
        traffic = LOGIT_TRAFFIC * logits / self.bytes
        back = seconds if adapters else 2 * seconds
        forward = max(seconds + traffic, self.launch)
        backward = max(back + traffic, self.launch)
        return MicrobatchTime(forward, backward)

    def update(self, parameters: float, owned: float) -> float:
        """The optimizer's step on one GPU: it reads and writes gradients, two moments
        and main weights of what it owns (Memory.owned)."""
        traffic = owned * UPDATE_TRAFFIC + parameters * 6
        return traffic / self.bytes + self.cluster.device.step_us * 1e-6

    def prediction(self, owned: float) -> float:
        """The prediction of the next weights of what a GPU owns."""
        return owned * PREDICTION_TRAFFIC / self.bytes

    def host_update(self, owned: float, copied: int, late: bool) -> float:
        """The optimizer's step in host memory, with the copies in and out; a late one
        also with the norm, clipping and the conversion to 16 bits."""
        device = self.cluster.device
        traffic = HOST_TRAFFIC if late else UPDATE_TRAFFIC
        seconds = copied / device.pcie_gb_s + traffic / device.host_gb_s
        return owned * seconds / 1e9


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
TILE = 256 * 128
FILL = 200
# Bytes moved for each logit: a write and a read of 16 bits, a write and a read of the
# 32-bit exponential, and sums.
LOGIT_TRAFFIC = 16
# Bytes moved for each parameter of an Adam step on 32-bit main weights: gradient 4,
# moments 16, weights 8.
UPDATE_TRAFFIC = 28
# A step on copies (mcore/prediction.py): gradient 8, copies 24, step 28, result 18.
PREDICTION_TRAFFIC = 78
# The same on the host, with norm, clipping and conversion: together 2.2 times the time
# of Adam (bench/device.py host). Megatron's --optimizer-cpu-offload has Adam alone
# there: 0.93 s for the 0.6 billion parameters of a Qwen3 on an H100
# (github.com/NVIDIA-NeMo/RL, pull request 3628).
HOST_TRAFFIC = 62
# Host time of a backward in forwards: twice as many kernels, but launched from C++
# instead of Python.
BACKWARD_LAUNCH = 1.5
