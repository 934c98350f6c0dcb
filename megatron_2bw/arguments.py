"""The flags of this project, and every check of the command line.

Invariant: whatever flag a schedule cannot honour is refused by name, with the reason, before training starts;
nothing is silently ignored. One table holds the refusals (`REFUSED`), one the mistakes (`MISTAKES`).
"""

from __future__ import annotations

import argparse
import os
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_2bw import cpu
from megatron_2bw.schedules import SCHEDULE_NAMES, SCHEDULES, Schedule

Stop = Callable[[str], NoReturn]


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this project's flags to a parser."""
    group = parser.add_argument_group("pipeline schedule (megatron_2bw)")
    descriptions = "; ".join(f"{s.name}: {s.summary}" for s in SCHEDULES.values())
    group.add_argument(
        "--pipeline-schedule", choices=SCHEDULE_NAMES, default="megatron",
        help=f"order of forwards, backwards and weight updates. megatron: Megatron's own, untouched; {descriptions}",
    )
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="where to compute; auto: on GPUs if there are any, else on the CPU over gloo",
    )
    group.add_argument(
        "--two-bw-exchange", choices=("auto", "nccl", "gloo"), default="auto",
        help="transport between pipeline stages; auto: that of --distributed-backend; gloo stages GPU tensors "
        "through the host",
    )
    return parser


def parse_early(argv: list[str], stop: Stop) -> argparse.Namespace:
    """This project's flags alone, read before Megatron is imported."""
    parser = add_flags(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    parser.error = stop
    early, _ = parser.parse_known_args(argv)
    if early.device == "cuda" and cpu.wanted("auto"):
        stop("--device cuda: no GPU is visible to torch; use --device cpu")
    return early


def parse(early: argparse.Namespace, stop: Stop) -> argparse.Namespace:
    """Megatron's arguments and this project's: parsed, validated, and made global by Megatron.

    Calls `stop` with one line that names the flag if anything is wrong.
    """
    from megatron.training.arguments import parse_and_validate_args

    parsers: list[argparse.ArgumentParser] = []

    def extend(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        add_flags(parser).set_defaults(**_defaults(early))
        parser.error = stop  # argparse would print a usage text of a thousand lines first
        parse_args = parser.parse_args

        def parse_and_check() -> argparse.Namespace:
            args = parse_args()
            args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
            check(args, stop)  # before Megatron's own validation, whose messages name no flags
            return args

        parser.parse_args = parse_and_check
        parsers.append(parser)
        return parser

    try:
        args = parse_and_validate_args(extend, args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    except Exception as error:  # Megatron asserts, raises and indexes; the user is told one thing
        stop(name_flags(_explain(error), parsers[0] if parsers else None))
    return args


def _defaults(early: argparse.Namespace) -> dict[str, Any]:
    """Defaults of Megatron's flags that this run needs; what the user types still wins, and is checked."""
    defaults: dict[str, Any] = dict(cpu.FLAG_DEFAULTS) if cpu.installed() else {}
    if early.pipeline_schedule != "megatron":
        # It runs an iteration again to find faulty GPUs, and reduces over the world in every iteration.
        defaults["rerun_mode"] = "disabled"
    return defaults


def check(args: argparse.Namespace, stop: Stop) -> None:
    """Stop with one line at the first mistake, or at the first flag that the schedule cannot honour."""
    message = cpu.unsupported_flag(args) if cpu.installed() else None
    for mistake in MISTAKES:
        message = message or mistake(args)
    schedule = SCHEDULES.get(args.pipeline_schedule)
    if schedule is not None:
        for refusal in REFUSED:
            message = message or refusal.message(args, schedule)
        message = message or _too_few_microbatches(args, schedule)
    if message:
        stop(message)


@dataclass(frozen=True)
class Refusal:
    """A flag of Megatron that the project's schedules do not support.

    reason  why, and what to do instead
    asked   whether the arguments ask for the feature (default: the flag has a true value)
    only    the schedules that refuse it: "all", "no flush" (microbatches cross iterations) or one schedule's name
    """

    flag: str
    reason: str
    asked: Callable[[argparse.Namespace], bool] | None = None
    only: str = "all"

    def message(self, args: argparse.Namespace, schedule: Schedule) -> str | None:
        applies = self.only in ("all", schedule.name) or (self.only == "no flush" and not schedule.flushes)
        asked = self.asked or (lambda args: getattr(args, self.flag.removeprefix("--").replace("-", "_")))
        if not applies or not asked(args):
            return None
        return f"{self.flag} does not work with --pipeline-schedule {schedule.name}: {self.reason}"


_ONE_CHUNK = "interleaved stages are not supported; leave the flag out, one model chunk a stage"
_IN_FLIGHT = "microbatches of the next batch are in flight when an iteration ends; "

_GRAPHS = "a graph fixes the addresses of the weights, which change; leave the flag out"
_NOT_TESTED = "it is not supported yet; leave the flag out"

REFUSED: tuple[Refusal, ...] = (
    Refusal("--num-layers-per-virtual-pipeline-stage", _ONE_CHUNK),
    Refusal("--num-virtual-stages-per-pipeline-rank", _ONE_CHUNK),
    Refusal("--pipeline-model-parallel-layout",
            "layouts are not supported yet; use --decoder-first-pipeline-num-layers for an uneven split"),
    Refusal("--cuda-graph-impl", _GRAPHS, lambda a: a.cuda_graph_impl != "none"),
    Refusal("--enable-cuda-graph", _GRAPHS),
    Refusal("--external-cuda-graph", _GRAPHS),
    Refusal("--optimizer-cuda-graph", _GRAPHS),
    Refusal("--use-megatron-fsdp", "sharded parameters are not supported; leave the flag out"),
    Refusal("--use-torch-fsdp2", "sharded parameters are not supported; leave the flag out"),
    Refusal("--num-experts", "mixture of experts is not supported yet; train a dense model"),
    Refusal("--mtp-num-layers", _NOT_TESTED),
    Refusal("--fp8-format", "fp8 weights are not versioned yet; use --bf16", lambda a: a.fp8),
    Refusal("--fp4-format", "fp4 weights are not versioned yet; use --bf16", lambda a: a.fp4),
    Refusal("--hybrid-context-parallel", "messages between stages must have one size; leave the flag out"),
    Refusal("--sft", "messages between stages must have one size; leave the flag out"),
    Refusal("--hybrid-layer-pattern", "hybrid models are not supported yet; train a GPT"),
    Refusal("--defer-embedding-wgrad-compute", "it works at Megatron's own flush; leave the flag out"),
    Refusal("--delay-wgrad-compute", "a backward must be whole; leave the flag out"),
    Refusal("--overlap-moe-expert-parallel-comm", "mixture of experts is not supported yet; leave the flag out"),
    Refusal("--fine-grained-activation-offloading", "it follows Megatron's own order; leave the flag out"),
    Refusal("--cpu-offloading-num-layers", "it follows Megatron's own order; leave the flag out"),
    Refusal("--optimizer-cpu-offload", _NOT_TESTED),
    Refusal("--perform-rl-step", "only pretraining is supported; leave the flag out"),
    Refusal("--inprocess-restart", "state in flight would survive the restart; use torchrun --max-restarts"),
    Refusal("--use-distributed-optimizer", "its shards are not versioned yet; leave the flag out", only="no flush"),
    Refusal("--optimizer", "its sharded steps are not versioned yet; use adam or sgd",
            lambda a: a.optimizer not in ("adam", "sgd"), "no flush"),
    Refusal("--rampup-batch-size", _IN_FLIGHT + "the batch size must stay", only="no flush"),
    Refusal("--step-batch-size-schedule", _IN_FLIGHT + "the batch size must stay", only="no flush"),
    Refusal("--decrease-batch-size-if-needed", _IN_FLIGHT + "the batch size must stay", only="no flush"),
    Refusal("--iterations-to-skip", _IN_FLIGHT + "none can be skipped", only="no flush"),
    Refusal("--rerun-mode", _IN_FLIGHT + "none can be run again; use --rerun-mode disabled",
            lambda a: a.rerun_mode != "disabled", "no flush"),
    Refusal("--save-activations-interval", _IN_FLIGHT + "its files would mix batches", only="no flush"),
    Refusal("--save-dgrads-interval", _IN_FLIGHT + "its files would mix batches", only="no flush"),
    Refusal("--qk-clip", "it changes weights that microbatches in flight still read; leave the flag out",
            only="no flush"),
    Refusal("--log-max-attention-logit", _IN_FLIGHT + "the figure would mix batches", only="no flush"),
    Refusal("--fp16", "each stage would scale the loss by itself; add --loss-scale N, or use --bf16",
            lambda a: a.fp16 and a.loss_scale is None, "pipedream"),
    Refusal("--untie-embeddings-and-output-weights",
            "it must be given: each stage clips and steps alone, so tied embeddings would drift apart",
            lambda a: a.pipeline_model_parallel_size > 1 and not a.untie_embeddings_and_output_weights, "pipedream"),
)


def _missing(args: argparse.Namespace) -> str | None:
    always = ("--micro-batch-size", "--lr")
    of_model = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings")
    for flag in always + (() if args.use_checkpoint_args else of_model):
        if getattr(args, _dest(flag)) is None:
            return f"{flag} is missing"
    if args.train_iters is None and args.train_samples is None:
        return "--train-iters is missing (or --train-samples)"
    for one, needed in (("--train-iters", "--eval-interval"), ("--save", "--save-interval")):
        if getattr(args, _dest(one)) and not getattr(args, _dest(needed)):
            return f"{needed} is missing (Megatron needs it with {one})"
    return None


def _not_positive(args: argparse.Namespace) -> str | None:
    for flag in (
        "--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size",
        "--global-batch-size", "--pipeline-model-parallel-size", "--tensor-model-parallel-size",
        "--context-parallel-size", "--log-interval", "--lr",
    ):
        value = getattr(args, _dest(flag))
        if value is not None and value <= 0:
            return f"{flag} {value}: it must be greater than 0"
    return None


def _contradiction(args: argparse.Namespace) -> str | None:
    for one, other in (
        ("--fp16", "--bf16"), ("--train-iters", "--train-samples"), ("--mock-data", "--data-path"),
        ("--mock-data", "--data-args-path"),
    ):
        if getattr(args, _dest(one)) and getattr(args, _dest(other)):
            return f"{one} and {other} exclude each other: give one of them"
    return None


def _sizes(args: argparse.Namespace) -> str | None:
    hidden, heads, layers = args.hidden_size, args.num_attention_heads, args.num_layers
    tensor, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    per_replica = tensor * stages * args.context_parallel_size
    uneven = (
        args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers,
        args.pipeline_model_parallel_layout,
    )
    if args.world_size % per_replica:
        return (
            f"--pipeline-model-parallel-size {stages} x --tensor-model-parallel-size {tensor} "
            f"x --context-parallel-size {args.context_parallel_size} = {per_replica} does not divide the number of "
            f"processes, {args.world_size}: start a multiple of {per_replica} (torchrun --nproc-per-node)"
        )
    replica = args.micro_batch_size * (args.world_size // per_replica)
    if args.global_batch_size is not None and args.global_batch_size % replica and not args.decrease_batch_size_if_needed:
        return (
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size} x {args.world_size // per_replica} pipelines = {replica}"
        )
    if args.use_checkpoint_args:
        return None
    if hidden % heads and args.kv_channels is None:
        return f"--num-attention-heads {heads} does not divide --hidden-size {hidden}"
    if heads % tensor:
        return f"--tensor-model-parallel-size {tensor} does not divide --num-attention-heads {heads}"
    if args.seq_length > args.max_position_embeddings:
        return f"--seq-length {args.seq_length} is more than --max-position-embeddings {args.max_position_embeddings}"
    if (layers < stages or layers % stages) and not any(uneven + (
        args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split,
    )):
        return (
            f"--num-layers {layers} cannot be split over --pipeline-model-parallel-size {stages}: use a multiple, or "
            "--decoder-first-pipeline-num-layers for an uneven split"
        )
    return None


def _recompute(args: argparse.Namespace) -> str | None:
    if args.recompute_granularity == "full" and args.recompute_method is None:
        return "--recompute-granularity full needs --recompute-method uniform (or block)"
    if args.recompute_method is not None and args.recompute_granularity != "full":
        return f"--recompute-method {args.recompute_method} needs --recompute-granularity full"
    if args.recompute_method is not None and not args.recompute_num_layers:
        return f"--recompute-method {args.recompute_method} needs --recompute-num-layers"
    return None


def _data(args: argparse.Namespace) -> str | None:
    sources = ("--data-path", "--data-args-path", "--train-data-path", "--per-split-data-args-path")
    if not args.mock_data and not any(getattr(args, _dest(flag)) for flag in sources):
        return "--data-path is missing (or --mock-data)"
    for flag in ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"):
        prefixes = getattr(args, _dest(flag)) or []
        for prefix in prefixes[1::2] if len(prefixes) > 1 and _is_number(prefixes[0]) else prefixes:
            for end in (".idx", ".bin"):
                if "://" not in prefix and not Path(prefix + end).is_file():
                    return f"{flag} {prefix}: there is no file {prefix}{end}"
    return None


def _tokenizer(args: argparse.Namespace) -> str | None:
    kind = args.tokenizer_type or "GPT2BPETokenizer"
    if kind.startswith("Null") and args.vocab_size is None:
        return f"--tokenizer-type {kind} needs --vocab-size"
    if kind.startswith("GPT2BPE") and not (args.vocab_file and args.merge_file) and not args.tokenizer_model:
        return f"--tokenizer-type {kind} needs --vocab-file and --merge-file"
    if kind in ("HuggingFaceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer") and not args.tokenizer_model:
        return f"--tokenizer-type {kind} needs --tokenizer-model"
    for flag in ("--vocab-file", "--merge-file", "--tokenizer-model"):
        path = getattr(args, _dest(flag))
        if path and path.startswith(("/", ".")) and not Path(path).exists():
            return f"{flag} {path}: there is no such file or folder"
    return None


def _exchange(args: argparse.Namespace) -> str | None:
    if args.two_bw_exchange == "nccl" and args.distributed_backend == "gloo":
        return "--two-bw-exchange nccl needs --distributed-backend nccl"
    if args.two_bw_exchange != "auto" and args.pipeline_schedule == "megatron":
        return "--two-bw-exchange has no effect with --pipeline-schedule megatron: leave it out"
    return None


def _yaml(args: argparse.Namespace) -> str | None:
    return "--yaml-cfg would drop the flags of the command line: give Megatron's flags instead" if args.yaml_cfg else None


MISTAKES: tuple[Callable[[argparse.Namespace], str | None], ...] = (
    _yaml, _missing, _not_positive, _contradiction, _sizes, _recompute, _data, _tokenizer, _exchange,
)


def _too_few_microbatches(args: argparse.Namespace, schedule: Schedule) -> str | None:
    stages = args.pipeline_model_parallel_size
    pipelines = args.world_size // (stages * args.tensor_model_parallel_size * args.context_parallel_size)
    batch = args.global_batch_size or args.micro_batch_size * pipelines
    microbatches, needed = batch // (args.micro_batch_size * pipelines), schedule.min_microbatches(stages)
    if microbatches >= needed:
        return None
    return (
        f"--global-batch-size {batch} gives {microbatches} microbatch{'es' * (microbatches != 1)} on each of "
        f"{pipelines} pipeline{'s' * (pipelines != 1)}, but --pipeline-schedule {schedule.name} needs as many as "
        f"there are stages, {needed}: use --global-batch-size {needed * args.micro_batch_size * pipelines} or more"
    )


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _explain(error: Exception) -> str:
    """The message of an error; for an assertion without one, the condition that was broken."""
    if str(error):
        return str(error)
    broken = traceback.extract_tb(error.__traceback__)[-1].line or type(error).__name__
    return f"Megatron refuses this combination of flags: {broken.removeprefix('assert ')}"


def name_flags(message: str, parser: argparse.ArgumentParser | None) -> str:
    """`message` with the attribute names that Megatron's texts use (num_layers) turned into flags (--num-layers)."""
    flags = {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings} if parser else {}
    named = lambda match: flags.get(match[2], match[0]) if "_" in match[2] else match[0]  # noqa: E731
    return re.sub(r"(?<![-\w])(args\.)?([a-z][a-z0-9_]+)\b", named, message)
