"""Values and combinations of flags that Megatron finds wrong late, explains badly, or does not find wrong at all.

Invariant: tables only; what needs to look at files or to compute stands in `checks.py` and `sizes.py`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator

from megatron_2bw.flags.rule import Args, Rule, asks, installed, line, names, task, value


def _missing(flags: str) -> Iterator[Rule]:
    for flag in flags.split():
        yield Rule(flag, "is missing", "line", lambda a, flag=flag: value(a, flag) is None)


MISSING: tuple[Rule, ...] = (
    *_missing("--micro-batch-size --lr --num-layers --hidden-size --num-attention-heads --seq-length"),
    *_missing("--max-position-embeddings"),
    line("--train-iters is missing (or --train-samples)", lambda a: a.train_iters is None and a.train_samples is None),
    line(
        "--eval-interval is missing (Megatron divides by it, even with --eval-iters 0)",
        lambda a: a.eval_interval is None and not (a.skip_train or a.full_validation),
    ),
)


def _range(flags: str, bounds: str, fits: Callable[[float], bool]) -> Iterator[Rule]:
    for flag in flags.split():

        def outside(args: Args, flag: str = flag) -> bool:
            number = value(args, flag)
            return isinstance(number, (int, float)) and not fits(number)

        yield Rule(flag, f"{{given}}: it must {bounds}", "line", outside)


_POSITIVE = (
    "--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --num-query-groups --kv-channels --seq-length "
    "--max-position-embeddings --vocab-size --make-vocab-size-divisible-by --micro-batch-size --global-batch-size "
    "--eval-micro-batch-size --eval-global-batch-size --train-iters --train-samples --pipeline-model-parallel-size "
    "--tensor-model-parallel-size --context-parallel-size --lr --lr-decay-iters --lr-decay-samples --log-interval "
    "--tensorboard-log-interval --eval-interval --save-interval --exit-interval --recompute-num-layers --loss-scale "
    "--initial-loss-scale --distributed-timeout-minutes --decoder-first-pipeline-num-layers "
    "--decoder-last-pipeline-num-layers --expert-model-parallel-size --expert-tensor-parallel-size"
)
_NOT_NEGATIVE = (
    "--min-lr --weight-decay --clip-grad --eval-iters --num-workers --lr-warmup-iters --lr-warmup-samples "
    "--adam-eps --start-weight-decay --end-weight-decay --init-method-std"
)
_LARGE = "--lr --min-lr --weight-decay --start-weight-decay --end-weight-decay --adam-eps --init-method-std"
_FRACTIONS = "--hidden-dropout --attention-dropout --adam-beta1 --adam-beta2 --sgd-momentum --lr-warmup-fraction"
RANGES: tuple[Rule, ...] = (
    *_range(_POSITIVE, "be greater than 0", lambda x: x > 0),
    *_range(_NOT_NEGATIVE, "not be negative", lambda x: x >= 0),
    *_range(_LARGE, "be less than 1e38, for 32-bit floats", lambda x: x < 1e38),
    *_range("--loss-scale --initial-loss-scale", "be finite", lambda x: x < math.inf),
    *_range("--num-workers", "be at most 1000", lambda x: x <= 1000),
    *_range("--num-layers", "be at most 10000", lambda x: x <= 10_000),
    *_range("--seed", "be from 1 to 4e9", lambda x: 1 <= x <= 4e9),  # each stage adds to it; NumPy takes 32 bits
    *_range(_FRACTIONS, "be at least 0 and less than 1", lambda x: 0 <= x < 1),
    *_range("--mask-prob", "be greater than 0 and less than 1", lambda x: 0 < x < 1),
    *_range("--short-seq-prob", "be at least 0 and at most 1", lambda x: 0 <= x <= 1),
)


def _exclude(one: str, others: str) -> Iterator[Rule]:
    for other in others.split():
        why = f"and {other} exclude each other: give one of them"
        yield Rule(one, why, "line", lambda a, other=other: asks(a, one) and asks(a, other))


EXCLUSIVE: tuple[Rule, ...] = (
    *_exclude("--fp16", "--bf16"),
    *_exclude("--train-iters", "--train-samples"),
    *_exclude("--mock-data", "--data-path --data-args-path --train-data-path"),
    *_exclude("--data-path", "--train-data-path --data-args-path"),
    *_exclude("--lr-warmup-fraction", "--lr-warmup-iters --lr-warmup-samples"),
    *_exclude("--train-iters", "--lr-warmup-samples --lr-decay-samples"),
    *_exclude("--train-samples", "--lr-warmup-iters --lr-decay-iters"),
    *_exclude("--swiglu", "--squared-relu --quick-geglu"),
    *_exclude("--sft-data", "--mock-data --fim-data --eod-mask-loss --per-split-data-args-path"),
    # Megatron would read tokens of 16 bits, by the size of the vocabulary, and indices that are not made.
    *_exclude("--sft-data", "--per-dataset-sequences-path --dataloader-fast-cache-load"),
    *_exclude("--sft-data", "--dataloader-defer-npy-index-mmap"),
)


def _need(flags: str, needed: str, words: str = "") -> Iterator[Rule]:
    """The flags do nothing, or fail late, without one of those that are `needed`."""
    for flag in names(flags):
        why = words or f"needs {needed}: add it, or leave {flag} out"
        yield Rule(flag, why, "line", lambda a, flag=flag: asks(a, flag) and not any(asks(a, n) for n in names(needed)))


_NO_PACKING = (
    "does not work with --sft-data: a sample is one conversation, since Megatron's fused attention reads no mask that "
    "separates several; leave it out"
)
NEEDS: tuple[Rule, ...] = (
    line(f"--reset-attention-mask {_NO_PACKING}", lambda a: a.sft_data and a.reset_attention_mask),
    line(f"--reset-position-ids {_NO_PACKING}", lambda a: a.sft_data and a.reset_position_ids),
    *_need("--save", "--save-interval"),
    *_need("--save-params-interval --save-wgrads-interval --save-activations-interval", "--save"),
    *_need("--save-dgrads-interval --log-progress --save-retain-interval", "--save"),
    *_need("--exit-on-missing-checkpoint", "--load"),
    *_need("--use-mp-args-from-checkpoint-args", "--use-checkpoint-args"),
    *_need("--use-pytorch-profiler", "--profile"),
    *_need("--use-pytorch-profiler", "--tensorboard-dir"),
    *_need("--multiple-validation-sets", "--full-validation"),
    *_need("--full-validation --validation-set-names", "--multiple-validation-sets"),
    *_need("--sharp-enabled-group", "--use-sharp"),
    *_need("--phase-transition-iterations", "--train-samples"),
    *_need("--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap", "--data-cache-path"),
    *_need("--wandb-project", "--wandb-save-dir --save", "needs --wandb-save-dir (or --save)"),
    line(
        "--num-query-groups {given} needs --group-query-attention",
        # Without that flag Megatron gives the arguments, which it saves, as many groups as heads.
        lambda a: (
            a.num_query_groups not in (1, a.use_checkpoint_args and a.num_attention_heads)
            and not a.group_query_attention
        ),
    ),
    line(
        "--no-initialization needs --load: the weights would be whatever the memory held",
        lambda a: not a.perform_initialization and not a.load,
    ),
    line(
        "--no-pad-vocab-size needs --padded-vocab-size", lambda a: a.padded_vocab_size is None and not a.pad_vocab_size
    ),
    line(
        "--num-distributed-optimizer-instances needs --use-distributed-optimizer: leave it out",
        lambda a: a.num_distributed_optimizer_instances != 1 and not a.use_distributed_optimizer,
    ),
)
RECOMPUTE: tuple[Rule, ...] = (
    *_need("--recompute-granularity full", "--recompute-method", "needs --recompute-method uniform (or block)"),
    *_need("--recompute-method", "--recompute-granularity full", "{given} needs --recompute-granularity full"),
    *_need("--recompute-method", "--recompute-num-layers", "{given} needs --recompute-num-layers"),
)


def _package(flags: str, package: str, words: str = "") -> Iterator[Rule]:
    """Flags for what a package does. Without it Megatron would warn at most, or fail on one rank."""
    how = f"pip install {package}" if package in ("tensorboard", "wandb") else "install it"
    for flag in names(flags):
        why = words or f"needs the package {package}, which is not installed: {how}, or leave {flag} out"
        yield Rule(flag, why, "line", lambda a, flag=flag: asks(a, flag) and not installed(package))


PACKAGES: tuple[Rule, ...] = (
    *_package("--tensorboard-dir", "tensorboard"),
    *_package("--wandb-project", "wandb"),
    *_package("--enable-ft-package", "nvidia_resiliency_ext"),
    *_package("--enable-msc", "multistorageclient"),
    *_package("--run-workload-inspector-server", "workload_inspector"),
    *_package("--fault-injector-ranks --fault-injector-num-ranks", "nvidia_resiliency_ext"),
    *_package(
        "--optimizer muon dist_muon adaptive_muon lion soap",
        "emerging_optimizers",
        "needs the package emerging_optimizers, which is not installed: pip install emerging-optimizers, or use adam",
    ),
    line(
        "--transformer-impl {given}: Megatron takes the installed package apex for NVIDIA's Apex, but it has no CUDA "
        "extensions (module amp_C): pip uninstall apex",
        lambda a: (
            importlib.util.find_spec("apex")
            and not installed("apex")
            and (a.transformer_impl == "local" or task(a) == "bert")
        ),
    ),
)
