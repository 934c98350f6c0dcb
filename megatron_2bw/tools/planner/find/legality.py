"""Whether a plan is one that Megatron 0.19 and this project's schedules run, and if
not, why. Pure Python.

Invariant: what is legal here trains; Megatron's own check of its arguments
(validate_args) accepts much that fails, or builds another model, later.
"""

from collections.abc import Iterator

from megatron_2bw.run.flags.rule import installed
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.plan import LEVERS, Plan

PRECISIONS = ("bf16", "fp16", "fp32")


def violations(
    plan: Plan,
    model: Model,
    gpus: int,
    precision: str = "bf16",
    bf16: bool = True,
) -> Iterator[str]:
    """The causes for which `plan` is illegal; none if it is legal. bf16: whether the
    GPUs have it. The rules that a search breaks most often come first."""
    if plan.gpus != gpus:
        yield "the sizes do not use every GPU"
    yield from _tensor_parallel(plan, model)
    yield from _context_and_experts(plan, model)
    yield from _stages(plan, model)
    if precision == "bf16" and not bf16:
        yield "the GPU has no bf16: use --precision fp16"
    if plan.memory != "two-slots" and plan.schedule != "2bw":
        if plan.memory not in LEVERS or plan.schedule != "megatron":
            yield "--two-bw-memory without 2bw"
        elif not plan.distributed_optimizer or precision != "bf16":
            yield "--use-precision-aware-optimizer without the distributed optimizer or bf16"
    elif plan.memory == "shard" and not plan.distributed_optimizer:
        yield "--two-bw-memory shard without the distributed optimizer"
    if model.bias and plan.recompute == "mlp":
        # The backward of Megatron's checkpoint does not end (docs/upstream.md).
        yield "--recompute-modules mlp with biases"


def may_divide_sequences(model: Model) -> bool:
    """Whether a run divides sequences over tensor-parallel ranks: a BERT's only where
    Apex is installed."""
    return model.kind != "bert" or installed("apex")


def _tensor_parallel(plan: Plan, model: Model) -> Iterator[str]:
    size = "--tensor-model-parallel-size"
    if model.heads % plan.tensor:
        yield f"{size} does not divide --num-attention-heads"
    # Fewer groups than ranks are allowed, but the columns of queries, keys and values
    # must divide.
    groups = model.groups
    if groups != model.heads and groups % plan.tensor and plan.tensor % groups:
        yield f"--num-query-groups is neither a multiple nor a divisor of {size}"
    if 2 * model.key_size % plan.tensor:
        yield f"{size} does not divide the columns of keys and values"
    if model.ffn % plan.tensor:
        yield f"{size} does not divide --ffn-hidden-size"
    if plan.sequence_parallel:
        if model.sequence % plan.tensor:
            yield f"--sequence-parallel, and {size} does not divide --seq-length"
        if plan.tensor == 1:
            yield "--sequence-parallel with one tensor rank"
        if not may_divide_sequences(model):
            yield "--sequence-parallel of a BERT without Apex"


def _context_and_experts(plan: Plan, model: Model) -> Iterator[str]:
    if plan.context > 1:
        parts = plan.context * plan.tensor if plan.sequence_parallel else 1
        if model.sequence % (2 * plan.context) or model.sequence % parts:
            twice = "--seq-length is no multiple of twice --context-parallel-size"
            yield f"{twice}, or of it times the tensor ranks"
        if model.kind == "bert":
            yield "--context-parallel-size with a BERT"
    if plan.expert > 1 and (
        not model.experts or model.experts % plan.expert or plan.replicas % plan.expert
    ):
        yield "--expert-model-parallel-size does not divide --num-experts and the replicas"
    if model.experts and plan.tensor > 1 and not plan.sequence_parallel:
        yield "--num-experts with tensor parallelism and without --sequence-parallel"
    if plan.expert > 1 and plan.pipeline_inside:
        yield "--expert-model-parallel-size with --use-tp-pp-dp-mapping"


def _stages(plan: Plan, model: Model) -> Iterator[str]:
    if not _share_layers(plan, model):
        yield "the stages do not share --num-layers"
    if _too_few_microbatches(plan):
        yield "--global-batch-size gives too few microbatches, or a part of a round of chunks"
    if plan.virtual > 1:
        if plan.schedule != "megatron" or plan.depth == 1:
            yield "virtual stages only with Megatron's schedule and several stages"
        if any(layers % plan.virtual for layers in plan.layers_of(model)):
            yield "virtual stages do not divide the layers of a stage"


def _share_layers(plan: Plan, model: Model) -> bool:
    if plan.stages:
        return sum(plan.stages) == model.layers and len(plan.stages) == plan.depth
    layers = model.layers - plan.first - plan.last
    stages = plan.depth - bool(plan.first) - bool(plan.last)
    if stages == 0:
        return layers == 0
    return plan.depth <= model.layers and layers >= stages > 0 and layers % stages == 0


def _too_few_microbatches(plan: Plan) -> bool:
    # By default an interleaved chunk runs as many microbatches in a row as there are
    # stages; fewer would make it wait for itself.
    if plan.virtual > 1:
        return plan.microbatches % plan.depth > 0
    return plan.microbatches == 0
