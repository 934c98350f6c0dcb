"""The flags of this project, the flags of Megatron that it refuses, and the way from argv to checked arguments.

Invariant: whatever flag a run cannot honour is refused by name, with the reason, before training starts; nothing is
silently ignored. One table holds the refusals (`REFUSED`); `mistakes.py` and `idle_flags.py` hold the other checks.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_2bw import cpu
from megatron_2bw.checkpoints import folder as saved
from megatron_2bw.flags.checks import MISTAKES, checkpoint, default_tokenizer, task, value
from megatron_2bw.flags.no_effect import idle_flag
from megatron_2bw.schedules import SCHEDULE_NAMES, SCHEDULES, Schedule, extra_warmup, sync_iterations

Stop = Callable[[str], NoReturn]


def add_flags(parser: argparse.ArgumentParser, device: bool = True) -> argparse.ArgumentParser:
    """Add this project's flags to a parser, with or without the choice of the device."""
    group = parser.add_argument_group("pipeline schedule (megatron_2bw)")
    descriptions = "; ".join(f"{s.name}: {s.summary}" for s in SCHEDULES.values())
    group.add_argument(
        "--pipeline-schedule",
        choices=SCHEDULE_NAMES,
        default="megatron",
        help=f"order of forwards, backwards and weight updates. megatron: Megatron's own, untouched; {descriptions}",
    )
    if device:
        group.add_argument(
            "--device",
            choices=("auto", "cpu", "cuda"),
            default="auto",
            help="where to compute; auto: on GPUs if there are any, else on the CPU over gloo",
        )
    group.add_argument(
        "--two-bw-exchange",
        choices=("auto", "nccl", "gloo"),
        default="auto",
        help="transport between pipeline stages; auto: that of --distributed-backend; gloo stages GPU tensors "
        "through the host",
    )
    group.add_argument(
        "--two-bw-gradient-slots",
        type=int,
        choices=(1, 2),
        default=2,
        help="gradient buffers of 2bw; with 2 a batch accumulates while the one before is reduced and applied, with 1 "
        "it waits for that and saves their memory",
    )
    group.add_argument(
        "--two-bw-extra-warmup",
        type=extra_warmup,
        default=(),
        metavar="K[,K...]",
        help="more forwards that the stages of 2bw run ahead, for each boundary between stages, first to last, or one "
        "number for all: 1 hides messages that take up to half of a microbatch's time (slow links between servers), 2 "
        "up to all of it; each costs the activations of a microbatch on the stages before it",
    )
    group.add_argument(
        "--two-bw-sync-iterations",
        type=sync_iterations,
        default=0,
        metavar="N",
        help="the first N iterations of 2bw, in which the weights change most, run without gradient delay, with a "
        "flush; then the pipeline goes over without a stop",
    )
    group.add_argument(
        "--two-bw-correction",
        choices=("none", "extrapolate"),
        default="none",
        help="against the gradient delay of 2bw. extrapolate: a batch computes with W(j) + factor (W(j) - W(j-1)), so "
        "its gradients are taken near the weights that they change; evaluation and checkpoints have the true W(j)",
    )
    group.add_argument(
        "--two-bw-correction-factor",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="of --two-bw-correction extrapolate, between 0 (no correction) and 1 (a whole update)",
    )
    group.add_argument(
        "--two-bw-trace",
        type=Path,
        metavar="DIR",
        help="record when every action of every stage ran and how long it waited: DIR/trace.json for Perfetto, "
        "DIR/timeline.png",
    )
    return parser


def parse_early(argv: list[str], stop: Stop, task: str = "gpt") -> argparse.Namespace:
    """This project's flags alone, read before Megatron is imported; and the `task`, "gpt" or "bert"."""
    parser = add_flags(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    parser.error = stop
    early, _ = parser.parse_known_args(argv)
    early.task = task
    if early.device == "cuda" and cpu.wanted("auto"):
        stop("--device cuda: no GPU is visible to torch; use --device cpu")
    return early


def parse(early: argparse.Namespace, stop: Stop) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Megatron's arguments and this project's, parsed, validated and made global by Megatron; and their parser.

    Calls `stop` with one line that names the flag if anything is wrong.
    """
    from megatron.training.arguments import parse_and_validate_args

    world = processes(os.environ, stop)
    made: list[argparse.ArgumentParser] = []

    def extend(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        made.append(prepare(parser, early, stop))
        parse_args = parser.parse_args

        def parse_and_check() -> argparse.Namespace:
            args = parse_args()
            args.world_size = world
            if not args.use_checkpoint_args:
                check(args, stop)  # before Megatron's own validation, whose messages name no flags
            else:
                fault = checkpoint(args)
                if fault:
                    stop(fault)
                if saved.same(args.load, args.save):  # Megatron reads the arguments before it loads
                    first = os.environ.get("RANK", "0") == "0"
                    (saved.restore if first else saved.await_restored)(args.save)
            return args

        parser.parse_args = parse_and_check
        return parser

    try:
        args = parse_and_validate_args(extend, args_defaults={"tokenizer_type": default_tokenizer(early.task)})
    except Exception as error:  # Megatron asserts, raises and indexes; the user is told one thing
        stop(explain(error, made[0] if made else None))
    if args.use_checkpoint_args:
        check(args, stop)  # the checkpoint has brought the model's arguments, and what they ask for
    return args, made[0]


def prepare(parser: argparse.ArgumentParser, early: argparse.Namespace, stop: Stop) -> argparse.ArgumentParser:
    """Megatron's parser with this project's flags, the defaults that the run needs, and errors of one line."""

    def error(message: str) -> NoReturn:  # argparse would print a usage text of a thousand lines first
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        similar = unknown and difflib.get_close_matches(unknown[1], parser._option_string_actions, n=1)
        stop(f"{message} (did you mean {similar[0]}?)" if similar else message)

    add_flags(parser).set_defaults(**_defaults(early))
    for action in parser._actions:  # --help of Megatron 0.19 fails at per cent signs in its texts
        action.help = action.help and re.sub(r"%%|%(?!\()", "%%", action.help)
    parser.error = error
    return parser


def _defaults(early: argparse.Namespace) -> dict[str, Any]:
    """Defaults of Megatron's flags that this run needs; what the user types still wins, and is checked."""
    defaults: dict[str, Any] = dict(cpu.FLAG_DEFAULTS) if cpu.installed() else {}
    defaults["task"] = early.task
    if early.task == "bert" and not _has_apex():
        defaults["no_persist_layer_norm"] = True  # the norm of its head is torch's then, which cannot
    if early.pipeline_schedule != "megatron":
        # It runs an iteration again to find faulty GPUs, and reduces over the world in every iteration.
        defaults["rerun_mode"] = "disabled"
    return defaults


def processes(environment: Mapping[str, str], stop: Stop) -> int:
    """The number of processes of the run, from the variables that torchrun sets."""
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    numbers = {name: environment.get(name, default) for name, default in defaults.items()}
    for name, text in numbers.items():
        if not text.isdecimal():
            stop(f"the environment variable {name} is {text!r}, not a number: start the processes with torchrun")
    return int(numbers["WORLD_SIZE"])


def check(args: argparse.Namespace, stop: Stop, argv: list[str] | None = None) -> None:
    """Stop with one line at the first flag that cannot be honoured, and at the first mistake.

    argv: the words that `args` were parsed from (default: the command line), to tell a typed flag from a default.
    """
    message = cpu.unsupported_flag(args) if cpu.installed() else None
    schedule = SCHEDULES.get(args.pipeline_schedule)
    for refusal in REFUSED:
        message = message or refusal.message(args, schedule)
    for mistake in MISTAKES:
        message = message or mistake(args)
    message = message or idle_flag(args, sys.argv[1:] if argv is None else argv)
    if message:
        stop(message)
    if schedule is not None and schedule.late_step and args.use_distributed_optimizer and args.overlap_grad_reduce:
        # The late step gathers beside the computation anyway, and before a forward asks; Megatron's hooks would too.
        args.overlap_param_gather = False


@dataclass(frozen=True)
class Refusal:
    """A flag of Megatron that is not supported.

    reason  why, and what to do instead
    scope   "any": with every schedule, since the entry script cannot; "ours": with this project's schedules;
            "no flush": with those whose microbatches cross iterations; a schedule's name; "cpu": on the CPU;
            "local": with Megatron's local layers, that is without Transformer Engine; "bert": for a BERT
    asked   whether the arguments ask for the feature (default: the flag has a true value)
    """

    flag: str
    reason: str
    scope: str = "ours"
    asked: Callable[[argparse.Namespace], bool] | None = None

    def message(self, args: argparse.Namespace, schedule: Schedule | None) -> str | None:
        """The line that refuses the flag, or None. `schedule` is None for Megatron's own."""
        given = value(args, self.flag)
        if not self._applies(args, schedule) or not (self.asked(args) if self.asked else given):
            return None
        typed = f" {given}" if given and isinstance(given, (str, int, float)) and given is not True else ""
        return f"{self.flag}{typed} {self._where(args)}: {self.reason}"

    def _applies(self, args: argparse.Namespace, schedule: Schedule | None) -> bool:
        if self.scope in ("any", "cpu", "local", "bert"):
            local, bert = args.transformer_impl == "local", task(args) == "bert"
            return {"any": True, "cpu": cpu.installed(), "local": local, "bert": bert}[self.scope]
        if schedule is None:
            return False
        return self.scope in ("ours", schedule.name) or (self.scope == "no flush" and not schedule.flushes)

    def _where(self, args: argparse.Namespace) -> str:
        return {
            "any": "is not supported",
            "cpu": "does not work on the CPU",
            "local": "does not work with --transformer-impl local",
            "bert": "does not work with BERT",
        }.get(self.scope, f"does not work with --pipeline-schedule {args.pipeline_schedule}")


def _sharded_weights(args: argparse.Namespace) -> bool:
    # Megatron sets it to the tensor-parallel size if it is not given.
    return (args.tensor_parallel_num_weight_shards or 0) > args.tensor_model_parallel_size


def _emerging(args: argparse.Namespace) -> bool:
    """Whether the optimizer is of the package emerging_optimizers."""
    return args.optimizer not in ("adam", "sgd")


def _has_apex() -> bool:
    return importlib.util.find_spec("apex") is not None


_OUT = "leave the flag out"
_ONE_CHUNK = f"interleaved stages are not supported, a stage is one model chunk; {_OUT}"
_PRETRAINING = f"only pretraining of GPT and BERT is supported; {_OUT}"
_DROPPED = f"Megatron 0.19 takes the flag and drops it; {_OUT}"
_BROKEN = f"Megatron 0.19 fails with it; {_OUT}"
_GRAPHS = f"a graph fixes the addresses of the weights, which change; {_OUT}"
_SHARDS = f"sharded parameters are not supported; {_OUT}"
_EXPERTS = "mixture of experts is not supported yet; train a dense model"
_ORDER = f"it follows Megatron's own order of forwards and backwards; {_OUT}"
_WHOLE_MATRICES = "Megatron gives each rank whole matrices to step, which are not versioned yet; {}"
_NOT_YET = f"it is not supported yet; {_OUT}"
_BATCH_SIZE = "the number of microbatches must stay; give one --global-batch-size"
_IN_FLIGHT = "microbatches of the next batch are in flight when an iteration ends; "
_MIXED = f"{_IN_FLIGHT}what is written would mix batches"
_NO_BERT = f"Megatron 0.19 has no such layers for it; {_OUT}"
_NEEDS_APEX = f"the norm of its head needs Apex for that, which is not installed; {_OUT}"
_NEEDS_TE = f"it needs Transformer Engine on a GPU; {_OUT}"
_NEEDS_GPU = f"it needs a GPU; {_OUT}"

REFUSED: tuple[Refusal, ...] = (
    # The entry script and its model, whatever the schedule.
    Refusal("--yaml-cfg", "it would drop the flags of the command line; give Megatron's flags instead", "any"),
    Refusal("--hybrid-layer-pattern", "hybrid models are not supported; train a GPT or a BERT", "any"),
    Refusal("--hybrid-override-pattern", "hybrid models are not supported; train a GPT or a BERT", "any"),
    Refusal("--sft", _PRETRAINING, "any"),
    Refusal("--perform-rl-step", _PRETRAINING, "any"),
    Refusal("--vision-pretraining", _PRETRAINING, "any"),
    Refusal("--logits-load-dir", f"distillation is not supported; {_OUT}", "any"),
    Refusal("--hybrid-context-parallel", f"sequences must have one length; {_OUT}", "any"),
    Refusal("--decoder-seq-length", f"GPT and BERT have one sequence length, --seq-length; {_OUT}", "any"),
    Refusal("--dataloader-inter-document-masking", "documents are not marked; use --reset-attention-mask", "any"),
    Refusal(
        "--dataloader-type",
        "the script gives Megatron datasets, not loaders; use single or cyclic",
        "any",
        lambda a: a.dataloader_type == "external",
    ),
    Refusal("--overlap-moe-expert-parallel-comm", f"the forward step gives no plan of its layers; {_OUT}", "any"),
    Refusal("--mtp-num-layers", f"the last stage reads no tokens; {_OUT}", "any"),
    Refusal("--log-straggler", f"the forward step feeds no straggler detector; {_OUT}", "any"),
    Refusal(
        "--inprocess-restart", "the script does not start again in its processes; use torchrun --max-restarts", "any"
    ),
    Refusal("--adlr-autoresume", f"it needs a library that is not public; {_OUT}", "any"),
    Refusal("--lazy-mpu-init", f"nobody would finish the initialisation; {_OUT}", "any"),
    Refusal("--rampup-batch-size", _DROPPED, "any"),
    Refusal("--freeze-all-layers", _DROPPED, "any"),
    Refusal("--create-all-gather-group", _DROPPED, "any"),
    Refusal("--rope-scaling-factor", _DROPPED, "any", lambda a: a.rope_scaling_factor != 8.0),
    Refusal("--checkpoint-activations", "Megatron 0.19 no longer has it; use --recompute-granularity", "any"),
    Refusal(
        "--attention-backend",
        f"Megatron 0.19 ties it to a --spec that does not exist; {_OUT}",
        "any",
        lambda a: _name(a.attention_backend) == "local",
    ),
    Refusal(
        "--transformer-impl",
        "it is for inference; use transformer_engine or local",
        "any",
        lambda a: a.transformer_impl == "inference_optimized",
    ),
    Refusal("--init-method-xavier-uniform", _BROKEN, "any"),
    Refusal("--config-logger-dir", _BROKEN, "any"),
    Refusal(
        "--optimizer",
        "Megatron 0.19 fails at its first step; use muon",
        "any",
        lambda a: a.optimizer == "adaptive_muon",
    ),
    Refusal(
        "--fp16",
        "Megatron 0.19 has this --optimizer in fp32 and bf16; use --bf16",
        "any",
        lambda a: a.fp16 and _emerging(a),
    ),
    Refusal(
        "--loss-scale",
        f"Megatron 0.19 divides only some gradients by it with this --optimizer; {_OUT}",
        "any",
        lambda a: a.loss_scale and _emerging(a),
    ),
    Refusal(
        "--save",
        "Megatron 0.19 saves no state of --optimizer soap in this format; use --ckpt-format torch",
        "any",
        lambda a: a.save and a.optimizer == "soap" and a.ckpt_format == "torch_dist" and not a.no_save_optim,
    ),
    Refusal(
        "--muon-fp32-matmul-prec",
        "torch has no such precision; use medium or high",
        "any",
        lambda a: a.muon_fp32_matmul_prec == "low",
    ),
    # Megatron's BERT, whatever the schedule. It would drop most of these without a word.
    Refusal(
        "--context-parallel-size",
        "its sequences cannot be split; use tensor or pipeline parallelism",
        "bert",
        lambda a: a.context_parallel_size > 1,
    ),
    Refusal(
        "--position-embedding-type",
        "it has learned_absolute and rope",
        "bert",
        lambda a: a.position_embedding_type not in ("learned_absolute", "rope"),
    ),
    Refusal(
        "--qk-layernorm",
        f"Megatron's local layers for it have none; {_OUT}",
        "bert",
        lambda a: a.qk_layernorm and a.transformer_impl == "local",
    ),
    Refusal("--qk-l2-norm", _NO_BERT, "bert"),
    Refusal("--multi-latent-attention", _NO_BERT, "bert"),
    Refusal("--experimental-attention-variant", _NO_BERT, "bert"),
    Refusal("--heterogeneous-layers-config-path", _NO_BERT, "bert"),
    Refusal("--use-mup", f"its logits would not be scaled; {_OUT}", "bert"),
    Refusal(
        "--attention-backend",
        f"its local layers choose by themselves; {_OUT}",
        "bert",
        lambda a: a.transformer_impl == "local" and _name(a.attention_backend) not in ("auto", "local"),
    ),
    Refusal("--sequence-parallel", _NEEDS_APEX, "bert", lambda a: a.sequence_parallel and not _has_apex()),
    Refusal("--apply-layernorm-1p", _NEEDS_APEX, "bert", lambda a: a.layernorm_zero_centered_gamma and not _has_apex()),
    Refusal("--window-size", f"it attends to all words; {_OUT}", "bert"),
    Refusal("--num-experts", _EXPERTS, "bert"),
    # This project's schedules.
    Refusal("--num-layers-per-virtual-pipeline-stage", _ONE_CHUNK),
    Refusal("--num-virtual-stages-per-pipeline-rank", _ONE_CHUNK),
    Refusal(
        "--pipeline-model-parallel-layout",
        "layouts are not supported yet; use --decoder-first-pipeline-num-layers for an uneven split",
    ),
    Refusal("--cuda-graph-impl", _GRAPHS, asked=lambda a: a.cuda_graph_impl != "none"),
    Refusal("--enable-cuda-graph", _GRAPHS),
    Refusal("--external-cuda-graph", _GRAPHS),
    Refusal("--optimizer-cuda-graph", _GRAPHS),
    Refusal("--use-megatron-fsdp", _SHARDS),
    Refusal("--use-torch-fsdp2", _SHARDS),
    Refusal("--tensor-parallel-num-weight-shards", _SHARDS, asked=_sharded_weights),
    Refusal("--num-experts", _EXPERTS),
    Refusal("--fp8-format", "fp8 weights are not versioned yet; use --bf16", asked=lambda a: a.fp8),
    Refusal("--fp4-format", "fp4 weights are not versioned yet; use --bf16", asked=lambda a: a.fp4),
    Refusal("--pipeline-model-parallel-comm-backend", "stages exchange by themselves; use --two-bw-exchange"),
    Refusal("--use-ring-exchange-p2p", f"stages exchange by themselves; {_OUT}"),
    Refusal("--fake-process-group", f"stages exchange real messages; {_OUT}"),
    Refusal("--defer-embedding-wgrad-compute", _ORDER),
    Refusal("--delay-wgrad-compute", f"a backward must be whole; {_OUT}"),
    Refusal("--fine-grained-activation-offloading", _ORDER),
    Refusal("--cpu-offloading-num-layers", _ORDER),
    Refusal("--optimizer-cpu-offload", _NOT_YET),
    Refusal("--step-batch-size-schedule", _BATCH_SIZE),
    Refusal(
        "--timing-log-level",
        "its barriers would hold all stages up; add --no-barrier-with-level-1-timing",
        "2bw",
        lambda a: a.timing_log_level >= 1 and a.barrier_with_L1_time,
    ),
    # Those of them whose microbatches cross iterations.
    Refusal("--decrease-batch-size-if-needed", _BATCH_SIZE, "no flush"),
    Refusal("--use-distributed-optimizer", f"its shards have one version; {_OUT}", "pipedream"),
    Refusal(
        "--num-distributed-optimizer-instances",
        _NOT_YET,
        "no flush",
        lambda a: a.num_distributed_optimizer_instances > 1,
    ),
    Refusal("--ddp-param-name-patterns-for-fp32-local-accumulation", _NOT_YET, "no flush"),
    Refusal("--use-precision-aware-optimizer", f"its kernel writes one weight store only; {_OUT}", "no flush"),
    Refusal("--overlap-param-gather-with-optimizer-step", f"the late step gathers by itself; {_OUT}", "2bw"),
    Refusal(
        "--optimizer",
        _WHOLE_MATRICES.format("use muon, without --use-distributed-optimizer"),
        "no flush",
        lambda a: a.optimizer == "dist_muon" or getattr(a, "use_layer_wise_distributed_optimizer", False),
    ),
    Refusal(
        "--use-distributed-optimizer",
        _WHOLE_MATRICES.format(f"with this --optimizer, so {_OUT}"),
        "no flush",
        lambda a: a.use_distributed_optimizer and _emerging(a),
    ),
    Refusal(
        "--muon-fp32-matmul-prec",
        "TF32 is a setting of the whole process, whose next batch runs beside the step; use medium",
        "2bw",
        lambda a: a.muon_fp32_matmul_prec == "high",
    ),
    Refusal("--iterations-to-skip", f"{_IN_FLIGHT}none can be skipped", "no flush"),
    Refusal("--result-rejected-tracker-filename", f"{_IN_FLIGHT}none can be skipped", "no flush"),
    Refusal("--phase-transition-iterations", f"{_IN_FLIGHT}they would be of the old phase", "no flush"),
    Refusal(
        "--rerun-mode",
        f"{_IN_FLIGHT}none can be run again; use --rerun-mode disabled",
        "no flush",
        lambda a: a.rerun_mode != "disabled",
    ),
    Refusal("--save-activations-interval", _MIXED, "no flush"),
    Refusal("--save-dgrads-interval", _MIXED, "no flush"),
    Refusal("--save-wgrads-interval", _MIXED, "no flush"),
    Refusal("--save-params-interval", f"the step of a batch ends in the next iteration; {_OUT}", "no flush"),
    Refusal("--logits-save-dir", _MIXED, "no flush"),
    Refusal("--log-max-attention-logit", _MIXED, "no flush"),
    Refusal("--qk-clip", f"it changes weights that microbatches in flight still read; {_OUT}", "no flush"),
    Refusal(
        "--fp16",
        "each stage would scale the loss by itself; add --loss-scale N, or use --bf16",
        "pipedream",
        lambda a: a.fp16 and a.loss_scale is None,
    ),
    Refusal(
        "--untie-embeddings-and-output-weights",
        "it must be given: each stage clips and steps alone, so tied embeddings would drift apart",
        "pipedream",
        lambda a: a.pipeline_model_parallel_size > 1 and not a.untie_embeddings_and_output_weights,
    ),
    # Megatron's local layers, and the CPU (see also cpu.UNSUPPORTED).
    Refusal("--tensor-parallel-num-weight-shards", _NEEDS_TE, "local", _sharded_weights),
    Refusal("--context-parallel-size", _NEEDS_TE, "local", lambda a: a.context_parallel_size > 1),
    Refusal("--multi-latent-attention", _NEEDS_TE, "local"),
    Refusal("--apply-layernorm-1p", _NEEDS_TE, "local", lambda a: a.layernorm_zero_centered_gamma),
    Refusal("--save-activations-interval", _NEEDS_TE, "local"),
    Refusal("--save-dgrads-interval", _NEEDS_TE, "local"),
    Refusal("--use-te-activation-func", _NEEDS_TE, "local"),
    Refusal("--use-transformer-engine-op-fuser", _NEEDS_TE, "local"),
    Refusal("--fused-residual-rmsnorm", _NEEDS_TE, "local"),
    Refusal("--use-kitchen-attention", _NEEDS_TE, "local"),
    Refusal("--use-grouped-gemm-for-dense-mlp", _NEEDS_TE, "local"),
    Refusal("--flash-attention-version", _NEEDS_TE, "local"),
    Refusal("--symmetric-ar-type", _NEEDS_TE, "local"),
    Refusal("--position-embedding-type", _NEEDS_TE, "local", lambda a: a.position_embedding_type == "relative"),
    Refusal("--num-experts", _NEEDS_GPU, "cpu"),
    Refusal("--cuda-graph-impl", _NEEDS_GPU, "cpu", lambda a: a.cuda_graph_impl != "none"),
    Refusal("--use-megatron-fsdp", _NEEDS_GPU, "cpu"),
    Refusal("--use-torch-fsdp2", _NEEDS_GPU, "cpu"),
    Refusal("--cpu-offloading-num-layers", _NEEDS_GPU, "cpu"),
    Refusal("--optimizer-cpu-offload", _NEEDS_GPU, "cpu"),
    Refusal("--pipeline-model-parallel-comm-backend", _NEEDS_GPU, "cpu"),
    Refusal("--use-sharp", _NEEDS_GPU, "cpu"),
    Refusal("--nccl-communicator-config-path", _NEEDS_GPU, "cpu"),
    Refusal("--gpu-sniff-test-interval", _NEEDS_GPU, "cpu"),
    Refusal("--record-memory-history", _NEEDS_GPU, "cpu"),
    Refusal("--log-device-memory-used", _NEEDS_GPU, "cpu"),
    Refusal(
        "--profile",
        "it profiles a GPU; add --use-pytorch-profiler",
        "cpu",
        lambda a: a.profile and not a.use_pytorch_profiler,
    ),
)


def _name(choice: Any) -> Any:
    """The text of a choice that Megatron may have turned into an enum."""
    return getattr(choice, "name", choice)


def explain(error: BaseException, parser: argparse.ArgumentParser | None) -> str:
    """An error of Megatron's in one line. If its text names no flag, the condition that was broken may."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        action = frame.f_locals.get("action")
        if isinstance(action, argparse.Action) and "arg_string" in frame.f_locals:  # argparse converts a value
            return f"argument {action.option_strings[0]}: invalid value: {frame.f_locals['arg_string']!r}"
    text = name_flags(str(error), parser)
    if "--" in text:
        return text
    last = traceback.extract_tb(error.__traceback__)[-1]
    statement = re.match(r"assert (.*?)(, *f?['\"\\(].*)?$", last.line or "")
    condition = name_flags(statement[1].rstrip(" \\"), parser) if statement else ""
    place = f"{type(error).__name__} in {os.path.basename(last.filename)}:{last.lineno}"
    text = text or "Megatron refuses this combination of flags"
    return f"{text} ({place}: it must be that {condition})" if "--" in condition else f"{text} ({place})"


def name_flags(message: str, parser: argparse.ArgumentParser | None) -> str:
    """`message` with the names that Megatron's texts use (num_layers, num-layers) turned into flags (--num-layers)."""
    actions = parser._actions if parser else []
    flags = {action.dest: action.option_strings[0] for action in actions if action.option_strings}

    def named(match: re.Match) -> str:
        owner, name = match[1], match[2]
        sure = owner or "_" in name or "-" in name  # "save" and "optimizer" are also words
        return flags.get(name.replace("-", "_"), match[0]) if sure else match[0]

    return re.sub(r"(?<![-\w])(args\.|self\.|config\.)?([a-z][a-z0-9]*(?:[_-][a-z0-9]+)*)\b", named, message)
