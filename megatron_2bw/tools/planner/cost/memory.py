"""Bytes of each stage: weights by version, gradients by slot, optimizer, activations,
logits, buffers. Pure Python.

The terms of a layer are those of Korthikanti et al. 2022 (arXiv 2205.05198, section 4),
with the attention scores, extended to any MLP width, grouped queries and SwiGLU.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_2bw.schedules import B, F, Shape
from megatron_2bw.schedules.interleaved import Interleaved
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.plan import Plan, by_fields

GIB = 2**30
# The fields of a plan on which its memory depends.
SIZES = (
    "tensor context expert depth width microbatch microbatches recompute "
    "recompute_layers sequence_parallel schedule virtual memory distributed_optimizer "
    "first last stages extra_warmup gpipe_round corrected grad_reduce_in_bf16"
)
ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes


@dataclass(frozen=True)
class Bytes:
    """Bytes per parameter: one version of the weights, one slot of gradients, 32-bit
    main weights, a 32-bit copy of the gradients, and the optimizer's two moments
    (Megatron's docs/dist_optimizer.md)."""

    weight: int
    gradient: int
    main: int
    copy: int
    moments: int = 8


BYTES = {
    "bf16": Bytes(2, 4, 4, 0),
    "fp16": Bytes(2, 2, 4, 4),
    "fp32": Bytes(4, 4, 0, 0),
}


def bytes_of(precision: str, grad_reduce_in_bf16: bool = False) -> Bytes:
    """BYTES; gradients in 16 bits are copied into 32 for the step."""
    if grad_reduce_in_bf16:
        return replace(BYTES[precision], gradient=2, copy=4)
    return BYTES[precision]


# bytes a parameter of torch's Adam on a GPU: the square roots of all second moments,
# during its step
ROOTS = 4

# Bytes of a communicator of NCCL, as users report them; not measured here. Two A100 on
# NVLink take 544 MB, more of them 688 MB (github.com/NVIDIA/nccl, issue 964). For
# messages over 32 channels, an H100 takes 3.28 GB with seven others (issue 1685): 235
# MB for one direction to one neighbour. The bytes are linear in the channels (issue
# 864): a run has 4 for messages (flags/environment.py), and PAIR and GROUP have
# CHANNELS. Collectives over a network take less.
LINK = 235e6 * 4 / 32
PAIR = 544e6
GROUP = 688e6
CHANNELS = 24
# Bytes of a CUDA context with the libraries' workspaces (a typical value), and the
# share on top of the allocated bytes that a GPU must have: in 43 runs of SimuMax on
# B200 torch reserved at most 9.3 % (docs/b200), and the estimates were wrong by at most
# 1.7 % (bench/planner_accuracy.py).
CONTEXT = 0.75 * GIB
FRAGMENTS = 0.12


def communicators(plan: Plan, stage: int, tied: bool = True) -> list[float]:
    """Bytes of each communicator of NCCL with several ranks that a GPU of the stage
    holds for this project's schedules.

    One for each neighbour and direction, and one more for each forward of extra
    warm-up; the pipeline's, over which Megatron's evaluations send; with a late step,
    twins of the data-parallel group and of the tied embeddings'. Megatron's other
    communicators come on top, and those of one rank.
    """
    if plan.schedule == "megatron":
        return []
    # with context parallelism a run leaves NCCL its channels
    link = LINK if plan.context == 1 else LINK * 32 / 4
    links = []
    boundaries = 0
    for boundary in (stage - 1, stage):
        if 0 <= boundary < plan.depth - 1:
            boundaries += 1
            extra = max(plan.extra[boundary % 2 :: 2])
            links += [link] * (2 + 2 * extra)
    if boundaries:
        links.append(link * boundaries)
    if not plan.pipeline.late_step:
        return links
    return links + _replicas(plan) + _ends(plan, stage, tied)


def megatrons_communicators(plan: Plan, stage: int, tied: bool = True) -> list[float]:
    """Bytes of Megatron's own communicators: tensor, context, expert and data
    parallelism, and the tied embeddings' at both ends."""
    held = []
    for ranks in (plan.tensor, plan.context, plan.expert):
        held += _among(ranks)
    return held + _replicas(plan) + _ends(plan, stage, tied)


def _replicas(plan: Plan) -> list[float]:
    """The groups of replicas of all weights, and of experts."""
    held = _among(plan.replicas)
    if plan.expert > 1:
        held += _among(plan.replicas // plan.expert)
    return held


def _among(ranks: int) -> list[float]:
    if ranks == 1:
        return []
    return [PAIR if ranks == 2 else GROUP]


def _ends(plan: Plan, stage: int, tied: bool) -> list[float]:
    at_end = plan.depth > 1 and stage in (0, plan.depth - 1)
    return [PAIR] if tied and at_end else []


def _shards(plan: Plan, experts: bool) -> int:
    """GPUs that share the optimizer's states of the same weights, which are those of
    experts or others."""
    if not plan.distributed_optimizer:
        return 1
    return plan.replicas // plan.expert if experts else plan.replicas


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one GPU of a stage."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float

    @property
    def total(self) -> float:
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.logits + self.buffers


@dataclass(eq=False)
class Memory:
    """Bytes of a model's plans in a precision.

    flash       attention that never stores its scores
    torch_adam  Adam is torch's, on a GPU. Its temporaries are in use while the next
                batch computes, if the step is late
    engine      layers are Transformer Engine's, which adds the gradients of the
                matrices to Megatron's buffers and returns dummies instead, the same for
                all layers
    """

    model: Model
    precision: str
    flash: bool
    torch_adam: bool = False
    engine: bool = False

    @property
    def element(self) -> int:
        return ELEMENT[self.precision]

    def hidden_states(self, plan: Plan) -> float:
        """Bytes of a microbatch's hidden states, which a message carries."""
        return plan.samples * self.model.sequence * self.model.hidden * self.element

    def activations(self, plan: Plan) -> float:
        """Bytes that one layer keeps for one microbatch's backward, without recompute.

        For a GPT in 16 bits: sbh (10 + 24/t + 5as/(ht)), or sbh (34/t + 5as/(ht)) with
        sequence parallelism.
        """
        model = self.model
        element = self.element
        tensor = plan.tensor
        tokens = plan.samples * model.sequence
        # inputs of two norms and two linear layers, two masks
        of_norms = 4 * element + 2 * model.dropout
        whole = tokens * model.hidden * of_norms
        # Q, K, V, and the projection's input
        attention = element * (2 * model.query_size + 2 * model.key_size)
        # the part of Q and K with positions, and what keys and values come from
        if model.latent:
            positions = 2 * model.heads * model.rotary_head
            sources = tensor * (model.latent + model.rotary_head)
            attention += element * (positions + sources)
        norms = whole / plan.sequence_ranks
        linear = norms + tokens * attention / tensor
        return linear + self.mlp(plan) + self.scores(plan)

    def mlp(self, plan: Plan) -> float:
        """The part of the MLP, with the experts: inputs of the activation function and
        of the second matrix."""
        model = self.model
        tokens = plan.samples * model.sequence
        each = self.element * (3 if model.gated else 2) * tokens / plan.tensor
        if not model.experts:
            return each * model.ffn
        # each token as often as it has experts, before them and behind; the router's
        # probabilities
        routed = 2 * self.element * model.topk * model.hidden + 8 * model.experts
        width = model.shared_ffn + model.topk * model.expert_ffn
        return each * width + tokens * routed

    def scores(self, plan: Plan) -> float:
        """The part that selective recompute frees: softmax, its dropout's mask and
        output (5as²b/t in 16 bits)."""
        model = self.model
        if self.flash:  # one number per row
            rows = 4 * plan.samples * model.sequence * model.heads
            return rows / plan.tensor
        each = 2 * self.element + 1 if model.dropout else self.element
        scores = each * model.heads * model.sequence**2 * plan.samples
        return scores / plan.tensor

    def keys_and_values(self, plan: Plan) -> float:
        """Bytes of one layer's keys and values."""
        elements = 2 * plan.samples * self.model.sequence * self.model.key_size
        return elements / plan.tensor * self.element

    def stages(self, plan: Plan) -> list[StageMemory]:
        """Every stage, first to last."""
        stages = enumerate(plan.layers_of(self.model))
        return [self.stage(plan, stage, layers) for stage, layers in stages]

    @by_fields(SIZES)
    def heaviest(self, plan: Plan) -> float:
        """Bytes of the heaviest stage. Of the stages between the ends the second has
        most microbatches in flight."""
        layers = plan.layers_of(self.model)
        last = plan.depth - 1
        stages = {0, min(1, last), last}
        if plan.stages:
            stages = range(plan.depth)
        totals = []
        for stage in stages:
            totals.append(self.stage(plan, stage, layers[stage]).total)
        return max(totals)

    def stage(self, plan: Plan, stage: int, layers: int) -> StageMemory:
        shape = plan.shape
        schedule = plan.pipeline
        versions = schedule.max_versions(shape, stage)
        weights, gradients, optimizer = self.state(plan, stage, layers, versions)
        in_flight = schedule.max_in_flight(shape, stage)
        activations, logits = self._activations(plan, stage, layers, in_flight)
        sides = (stage > 0) + (stage < plan.depth - 1)
        # Received and not yet computed, because of extra warm-up.
        waiting = 0
        if plan.extra_warmup:
            above = max(stage - 1, 0)
            waiting = sum(plan.extra[above : stage + 1])
        # two slots, two directions
        buffers = (4 * sides + 2 * waiting) * self.hidden_states(plan)
        buffers /= plan.sequence_ranks
        if self.torch_adam and plan.memory != "host":
            roots = ROOTS * self.owned(plan, stage, layers)
            # a step that is not late may take what the activations had
            if not schedule.late_step:
                roots = max(0.0, roots - activations - logits - buffers)
            buffers += roots
        if self.engine:
            tensor = plan.tensor
            sides = self.model.matrix_sides(tensor) + self.model.expert_sides(tensor)
            buffers += self.element * sum(map(math.prod, sides))
        return StageMemory(
            weights + self.frozen(plan, stage, layers),
            gradients,
            optimizer,
            activations,
            logits,
            buffers,
        )

    def state(self, plan: Plan, stage: int, layers: int, versions: int) -> list[float]:
        """Bytes of (weights, gradients, optimizer) of the trained parameters on one GPU
        of the stage."""
        sizes = [0, 0, 0]
        for experts, count in self._kinds(plan, stage, layers):
            each = self.a_parameter(plan, versions, experts)
            for place, size in enumerate(each):
                sizes[place] += count * size
        return sizes

    def owned(self, plan: Plan, stage: int, layers: int) -> float:
        """Trained parameters of whose optimizer's states one GPU of the stage has its
        share."""
        owned = 0.0
        for experts, count in self._kinds(plan, stage, layers):
            owned += count / _shards(plan, experts)
        return owned

    def _kinds(self, plan: Plan, stage: int, layers: int) -> list[tuple[bool, float]]:
        """(whether they are of experts, count) of the trained parameters."""
        count = self.parameters(plan, stage, layers)
        experts = self.experts(plan, stage, layers)
        if not experts:
            return [(False, count)]
        return [(False, count - experts), (True, experts)]

    def a_parameter(
        self, plan: Plan, versions: int, experts: bool = False
    ) -> tuple[float, float, float]:
        """Bytes of (weights, gradients, optimizer). The distributed optimizer divides
        main weights, copies and moments. With extrapolation a step keeps 32-bit weights
        from before it; in fp32 these are the only main weights."""
        each = bytes_of(self.precision, plan.grad_reduce_in_bf16)
        if plan.memory == "host":
            return each.weight * versions, each.gradient, 0.0
        shards = _shards(plan, experts)
        slots = 1.0
        if plan.memory == "shard":
            slots += 1 / shards
        elif plan.pipeline.late_step and plan.memory == "two-slots":
            slots += 1
        if plan.replicas > 1 and plan.correction == "predict":
            slots += 1  # the gradient so far
        main = each.main
        if plan.memory == "remainders" and not self.torch_adam:
            main = each.weight
        optimizer = main + each.copy + each.moments + 4 * plan.corrected
        return each.weight * versions, each.gradient * slots, optimizer / shards

    def host_bytes(self, plan: Plan) -> list[float]:
        """Bytes of host memory for one GPU of each stage: gradients, main weights,
        moments, and new weights."""
        each = bytes_of(self.precision, plan.grad_reduce_in_bf16)
        # in fp32 the main weights are copies too
        optimizer = 4 + each.copy + each.moments + 4 * plan.corrected
        size = each.gradient + optimizer + each.weight
        stages = enumerate(plan.layers_of(self.model))
        return [size * self.owned(plan, *stage) for stage in stages]

    def parameters(self, plan: Plan, stage: int, layers: int) -> float:
        """Trained parameters on one GPU of the stage."""
        if self.model.adapter_rank:
            return layers * self.model.adapter_parameters(plan.tensor)
        return self._all_parameters(plan, stage, layers)

    def experts(self, plan: Plan, stage: int, layers: int) -> float:
        """Trained parameters of experts on one GPU of the stage."""
        if not self.model.experts or self.model.adapter_rank:
            return 0.0
        each = self.model.expert_parameters(plan.tensor, plan.expert)
        return (layers - self._dense(stage, layers)) * each

    def _dense(self, stage: int, layers: int) -> int:
        """Layers without experts among the `layers` of a stage of a mixture; none is
        behind the first stage."""
        return 0 if stage else min(self.model.dense, layers)

    def frozen(self, plan: Plan, stage: int, layers: int) -> float:
        """Bytes of the weights on one GPU of the stage that are not trained."""
        if not self.model.adapter_rank:
            return 0.0
        return self.element * self._all_parameters(plan, stage, layers)

    def _all_parameters(self, plan: Plan, stage: int, layers: int) -> float:
        layer, embedding, output, tied = self._parts(plan)
        count = layers * layer
        if stage == 0:
            count += embedding
            dense = self._dense(stage, layers)
            if dense:
                plain = self.model.without_experts.layer_parameters(plan.tensor)
                count += dense * (plain - layer)
        if stage == plan.depth - 1:
            count += output - (tied if plan.depth == 1 else 0.0)
        return count

    @by_fields("tensor expert")
    def _parts(self, plan: Plan) -> tuple[float, float, float, float]:
        """Parameters of a layer, the embedding, the output layer, and the words that
        two stages would both hold."""
        model = self.model
        tensor = plan.tensor
        tied = 0.0
        if model.tied:
            tied = model.padded_vocab(tensor) * model.hidden / tensor
        layer = model.layer_parameters(tensor, plan.expert)
        embedding = model.embedding_parameters(tensor)
        return layer, embedding, model.output_parameters(tensor), tied

    def _activations(
        self, plan: Plan, stage: int, layers: int, in_flight: int
    ) -> tuple[float, float]:
        """(bytes kept by layers and embedding, bytes kept and used by the output
        layer)."""
        kept, working = self.layer(plan)
        chunk = layers / plan.virtual
        # of so many layers the first one's input is kept, and all are recomputed at
        # once
        if plan.recompute_layers > 1:
            together = max(min(plan.recompute_layers, chunk), 1)
            layer, _ = self.layer(plan.changed(recompute="none"))
            working += (together - 1) * layer
            chunk = math.ceil(chunk / together)
        activations = in_flight * kept * chunk + working
        tokens = plan.samples * self.model.sequence
        # The first of a stage's chunks has the embedding, the last one the output
        # layer.
        chunk_in_flight = in_flight
        if plan.virtual > 1:
            microbatches = min(plan.microbatches, 4 * plan.depth)
            in_flight = _first_chunk(plan.depth, plan.virtual, microbatches)
            chunk_in_flight = 1
        if stage == 0 and self.model.dropout:
            masks = in_flight * tokens * self.model.hidden
            activations += masks / plan.sequence_ranks
        if stage < plan.depth - 1:
            return activations, 0.0
        logits = tokens * self.model.padded_vocab(plan.tensor) / plan.tensor
        output = 2 * self.element * tokens * self.model.hidden
        normed = output * chunk_in_flight
        # The loss computes its softmax in place, in a 32-bit copy of the logits, and
        # its gradient in place of that. At both ends 16-bit logits, or their gradient,
        # exist too (Megatron's vocab-parallel cross entropy).
        copies = 4 * chunk_in_flight
        if self.element < 4:
            copies += self.element
        return activations, logits * copies + normed

    @by_fields("tensor context microbatch recompute sequence_parallel")
    def layer(self, plan: Plan) -> tuple[float, float]:
        """(bytes that one layer keeps for a microbatch, bytes of one layer's backward
        and recompute)."""
        whole = self.activations(plan)
        # The gradients of a layer's tensors; two or three exist at a time.
        working = whole / 2
        # the parts at hand and to come of keys and values, and of their gradients
        if plan.context > 1:
            working += 4 * self.keys_and_values(plan)
        if plan.recompute == "full":  # keeps the input of each layer
            kept = self.hidden_states(plan) / plan.sequence_ranks
            return kept, working + whole
        if plan.recompute != "none":
            mlp = plan.recompute == "mlp"
            freed = self.mlp(plan) if mlp else self.scores(plan)
            return whole - freed, working + freed
        return whole, working


@lru_cache(maxsize=1024)
def _first_chunk(depth: int, virtual: int, microbatches: int) -> int:
    """The most microbatches whose first chunk is in flight on the first stage, with
    interleaved stages."""
    now = most = 0
    shape = Shape(depth, microbatches)
    for action in Interleaved(virtual).actions(shape, 0, 0):
        if action.chunk == 0 and action.kind in (F, B):
            now += 1 if action.kind == F else -1
            most = max(most, now)
    return most
