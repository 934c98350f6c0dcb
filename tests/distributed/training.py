"""One training run of the real entry path in a test world, observed from outside, and
the models' names.

`train(rank, argv)` runs what pretrain_gpt_2bw.py runs, or the script that `argv` starts
with. The weights depend on the parameters' names alone, so that every split of a model
over stages and tensor ranks starts from the same weights.
"""

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
    *flags: object,
    width: int = 1,
    script: str | None = None,
    **changes,
) -> list[str]:
    """The command line of a tiny GPT, or of the script's model.

    flags    may be several in a text
    changes  flags in snake case; None leaves a flag out
    """
    words = " ".join(map(str, flags)).split()
    options = TINY | {
        "--pipeline-model-parallel-size": stages,
        "--pipeline-schedule": schedule,
        "--global-batch-size": 2 * microbatches * width,
    }
    if schedule == "2bw" and "--pipeline-schedule" not in words:  # the paper's rule
        options["--two-bw-late"] = "all"
        options["--two-bw-correction"] = "none"
    for name, value in changes.items():
        options["--" + name.replace("_", "-")] = value
    if "--fp16" not in words:  # else they have no effect
        for name in ("--initial-loss-scale", "--loss-scale-window", "--hysteresis"):
            options.pop(name, None)
    argv = [script] if script else []
    for name, value in options.items():
        if value is not None:
            argv += [name, str(value)]
    return [*argv, "--mock-data", *OF_GPU, *words]


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

    run = Run()
    models = []
    log = training.training_log

    def after_setup(model, optimizer):
        args = get_args()
        loaded = checkpoint_exists(args.load) or args.pretrained_checkpoint
        if not (loaded or args.lora_base):
            for chunk in model:
                initialise(chunk)
            optimizer.reload_model_params()
        models.extend(model)
        if optimizer is None:  # --skip-train
            return
        run.names += names_of_norm(model, optimizer)
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
    task = "gpt"
    if argv[0] == BERT:
        task = "bert"
        argv = argv[1:]
    try:
        entry.train(argv, after_setup, after_step, task)
    except SystemExit as end:  # so Megatron leaves before the last iteration
        if end.code:
            raise
    for chunk in models:
        for name, param in canonical(chunk, True):
            run.weights[name] = param.detach().clone()
    if finish is not None:
        finish(run, models[0])
    return run


def names_of_norm(model, optimizer) -> list[str]:
    """The optimizer's parameters that count in the norm, in its order.

    A tied output layer is `shared`: its copy of the embedding does not count. The
    distributed optimizer steps nameless shards.
    """
    names = {}
    for chunk in model:
        for name, param in canonical(chunk):
            names[id(getattr(param, "main_param", param))] = name
    counted = []
    for param in optimizer.get_parameters():
        if id(param) in names and not getattr(param, "shared", False):
            counted.append(names[id(param)])
    return counted


def canonical(model, biases: bool = False) -> list[tuple[str, torch.Tensor]]:
    """Parameters with names that do not depend on how the model is split; the tied
    output layer is the embedding.

    biases: those of experts too, which are no parameters.
    """
    from megatron.core.utils import unwrap_model

    inner = unwrap_model(model)
    tensors = list(inner.named_parameters())
    if biases:
        for name, buffer in inner.named_buffers():
            if name.endswith("expert_bias"):
                tensors.append((name, buffer))
    named = []
    for name, tensor in tensors:
        if name == "output_layer.weight" and inner.share_embeddings_and_output_weights:
            if hasattr(inner, "embedding"):  # --mtp-num-layers: that is used instead
                continue
            name = "embedding.word_embeddings.weight"
        named.append((global_name(name, inner), tensor))
    return named


def global_name(name: str, model) -> str:
    """The name with the numbers that its layer and its expert have in all the model."""
    from megatron.core import mpu

    if not name.startswith("mtp."):
        layers = (model.decoder if hasattr(model, "decoder") else model.encoder).layers
        for index, layer in enumerate(layers):
            start = f"layers.{index}."
            if start in name:
                name = name.replace(start, f"layers.{layer.layer_number - 1}.")
                break
    expert = re.search(EXPERT, name)
    if expert:  # they may be split over ranks
        experts = model.config.num_moe_experts
        experts //= mpu.get_expert_model_parallel_world_size()
        number = int(expert[1]) + experts * mpu.get_expert_model_parallel_rank()
        name = name.replace(expert[0], f"local_experts.{number}.")
    return name


def initialise(model) -> None:
    """Weights from the names alone; a tensor-parallel rank takes its slice of the full
    tensor."""
    from megatron.core import mpu

    for name, param in canonical(model):
        shape = list(param.shape)
        if not getattr(param, "tensor_model_parallel", False):
            param.data.copy_(initial_value(name, shape))
            continue
        if getattr(param, "allreduce", True):
            size = mpu.get_tensor_model_parallel_world_size()
            rank = mpu.get_tensor_model_parallel_rank()
        else:
            size = mpu.get_expert_tensor_parallel_world_size()
            rank = mpu.get_expert_tensor_parallel_rank()
        dim = param.partition_dim
        shape[dim] *= size
        param.data.copy_(initial_value(name, shape).chunk(size, dim)[rank])


def initial_value(name: str, shape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(list(shape), generator=generator) * 0.1
    if name.endswith(("layernorm.weight", "layer_norm.weight")):
        return noise + 1
    return noise


def delayed(owner: type, name: str, delay: Callable[[], None]) -> None:
    """Each call of the method begins with `delay`."""
    call = getattr(owner, name)

    def later(*args, **kwargs):
        delay()
        return call(*args, **kwargs)

    setattr(owner, name, later)


def full_weights(runs: list[Run]) -> dict[str, torch.Tensor]:
    """The weights of all stages together. A parameter that two stages hold (tied
    embeddings) must agree."""
    weights = {}
    for run in runs:
        for name, value in run.weights.items():
            equal = name not in weights or torch.equal(weights[name], value)
            assert equal, f"the copies of {name} have drifted apart"
            weights[name] = value
    return weights
