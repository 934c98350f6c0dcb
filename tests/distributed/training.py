"""One training run of the real entry path in a test world, observed from outside, and
the models' names.

`train(rank, argv)` runs what pretrain_gpt_2bw.py runs, or the script that `argv` starts
with. The weights depend on the parameters' names alone, so that every split of a model
over stages and tensor ranks starts from the same weights.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron_2bw.run.flags.plain_torch import PLAIN_TORCH
from megatron_2bw.tools.gpu_check import entry

BERT = "pretrain_bert_2bw.py"
EXPERT = r"local_experts\.(\d+)\."

DEVICE = os.environ.get("MEGATRON_2BW_WORLD_DEVICE", "cpu")  # pytest --device
# On a GPU what the CPU runs anyway: without Transformer Engine and Apex, and nothing is
# compiled.
OF_GPU = [*PLAIN_TORCH, "--no-bias-gelu-fusion", "--no-bias-dropout-fusion"] * (
    DEVICE == "cuda"
)

_TINY = f"""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --train-iters 6 --lr 0.01 --lr-decay-style linear --lr-warmup-iters 2 --min-lr 0.001
    --clip-grad 1.0 --weight-decay 0.1 --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer
    --vocab-size 127 --make-vocab-size-divisible-by 32 --num-workers 0 --eval-iters 0 --eval-interval 1000
    --log-interval 1 --split 98,1,1 --seed 7 --device {DEVICE}
""".split()
TINY = dict(zip(_TINY[::2], _TINY[1::2]))


def command(
    stages: int,
    microbatches: int,
    schedule: str = "2bw",
    *flags: str,
    width: int = 1,
    **changes,
) -> list[str]:
    """The command line of a tiny GPT; `changes` are flags in snake case, None leaves a
    flag out."""
    options = TINY | {
        "--pipeline-model-parallel-size": stages,
        "--pipeline-schedule": schedule,
        "--global-batch-size": 2 * microbatches * width,
    }
    options |= {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    options = {name: value for name, value in options.items() if value is not None}
    if "--fp16" not in flags:  # else they have no effect
        for name in ("--initial-loss-scale", "--loss-scale-window", "--hysteresis"):
            options.pop(name, None)
    return [
        *(str(word) for pair in options.items() for word in pair),
        "--mock-data",
        *OF_GPU,
        *flags,
    ]


@dataclass
class Run:
    """What a rank saw: one entry an iteration, and the final weights by canonical
    name."""

    # float32 scalars, last stage only; a BERT has two
    losses: list[torch.Tensor] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)  # after the iteration's step
    iterations: list[int] = field(default_factory=list)  # as the log lines name them
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    # in the order in which the optimizer adds up the norm
    names: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)  # the runtime's actions


def train(rank: int, argv: list[str], prepare=None, finish=None) -> Run:
    """Train with `argv`. `prepare(model, optimizer)` runs after setup, `finish(run,
    model)` before the end."""
    from megatron.training import get_args, training
    from megatron.training.checkpointing import checkpoint_exists

    run, models, log = Run(), [], training.training_log

    def after_setup(model, optimizer):
        given = get_args()
        if not (
            checkpoint_exists(given.load)
            or given.pretrained_checkpoint
            or given.lora_base
        ):
            for chunk in model:
                initialise(chunk)
            optimizer.reload_model_params()
        models.extend(model)
        if optimizer is None:  # --skip-train
            return
        names = {
            id(owner): name
            for chunk in model
            for name, owner in optimizer_params(chunk).items()
        }
        # A tied output layer is `shared`: its copy of the embedding does not count in
        # the norm. The distributed optimizer steps nameless shards.
        counted = [
            param
            for param in optimizer.get_parameters()
            if not getattr(param, "shared", False)
        ]
        run.names += [names[id(param)] for param in counted if id(param) in names]
        if prepare is not None:
            prepare(model, optimizer)

    def after_step(losses):
        run.losses += [loss.detach().clone() for loss in losses.values()]

    @functools.wraps(log)
    def observed_log(*args, **kwargs):
        values = inspect.signature(log).bind(*args, **kwargs).arguments
        run.iterations.append(values["iteration"])
        run.skipped.append(values["skipped_iter"])
        run.grad_norms.append(values["grad_norm"])
        run.scales.append(values["loss_scale"])
        return log(*args, **kwargs)

    training.training_log = observed_log
    bert = argv[0] == BERT
    try:
        entry.train(argv[bert:], after_setup, after_step, "bert" if bert else "gpt")
    except SystemExit as end:  # so Megatron leaves before the last iteration
        if end.code:
            raise
    run.weights = {
        name: param.detach().clone()
        for chunk in models
        for name, param in canonical(chunk, True)
    }
    if finish is not None:
        finish(run, models[0])
    return run


def canonical(model, biases: bool = False) -> list[tuple[str, torch.Tensor]]:
    """Parameters with names that do not depend on how the model is split; the tied
    output layer is the embedding.

    biases: those of experts too, which are no parameters.
    """
    from megatron.core import mpu
    from megatron.core.utils import unwrap_model

    inner = unwrap_model(model)
    # a GPT's, a BERT's
    layers = (inner.decoder if hasattr(inner, "decoder") else inner.encoder).layers
    numbers = {str(i): layer.layer_number - 1 for i, layer in enumerate(layers)}
    named = []
    more = [
        pair
        for pair in inner.named_buffers()
        if biases and pair[0].endswith("expert_bias")
    ]
    for name, param in [*inner.named_parameters(), *more]:
        if not name.startswith("mtp."):
            name = re.sub(
                r"layers\.(\d+)\.", lambda m: f"layers.{numbers[m[1]]}.", name
            )
        if name == "output_layer.weight" and inner.share_embeddings_and_output_weights:
            if hasattr(inner, "embedding"):  # --mtp-num-layers: that is used instead
                continue
            name = "embedding.word_embeddings.weight"
        experts = len(
            {
                found[1]
                for other, _ in inner.named_parameters()
                if (found := re.search(EXPERT, other))
            }
        )
        # experts may be split over ranks
        first = experts * mpu.get_expert_model_parallel_rank()
        name = re.sub(
            EXPERT,
            lambda found, first=first: f"local_experts.{int(found[1]) + first}.",
            name,
        )
        named.append((name, param))
    return named


def optimizer_params(model) -> dict[str, torch.Tensor]:
    """Canonical name -> the tensor that the optimizer steps (main parameters in mixed
    precision)."""
    return {
        name: getattr(param, "main_param", param) for name, param in canonical(model)
    }


def initialise(model) -> None:
    """Weights from the names alone; a tensor-parallel rank takes its slice of the full
    tensor."""
    from megatron.core import mpu

    for name, param in canonical(model):
        shape, dim = list(param.shape), None
        if getattr(param, "tensor_model_parallel", False):
            dim = param.partition_dim
            size, rank = (
                mpu.get_tensor_model_parallel_world_size(),
                mpu.get_tensor_model_parallel_rank(),
            )
            if not getattr(param, "allreduce", True):
                size, rank = (
                    mpu.get_expert_tensor_parallel_world_size(),
                    mpu.get_expert_tensor_parallel_rank(),
                )
            shape[dim] *= size
        full = initial_value(name, shape)
        if dim is not None:
            full = full.chunk(size, dim)[rank]
        param.data.copy_(full)


def initial_value(name: str, shape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(list(shape), generator=generator) * 0.1
    return (
        noise + 1 if name.endswith(("layernorm.weight", "layer_norm.weight")) else noise
    )


def delayed(owner: type, name: str, delay: Callable[[], None]) -> None:
    """Each call of the method begins with `delay`."""
    call = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: (delay(), call(*args, **kwargs))[1])


def full_weights(runs: list[Run]) -> dict[str, torch.Tensor]:
    """The weights of all stages together. A parameter that two stages hold (tied
    embeddings) must agree."""
    weights: dict[str, torch.Tensor] = {}
    for run in runs:
        for name, value in run.weights.items():
            if name in weights:
                assert torch.equal(weights[name], value), (
                    f"the copies of {name} have drifted apart"
                )
            weights[name] = value
    return weights
