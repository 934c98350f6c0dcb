"""Megatron's flags that a run cannot honour: what the entry scripts lack, and what a
schedule cannot do exactly.

All others start as with Megatron's own scripts, whose errors report what they cannot
do. Invariant: a flag without which the run would compute something else is refused by
name; one that changes nothing is named in a line of the log.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_2bw.run.flags.rule import Args, Rule, value


def layout_stages(text: str) -> list[str]:
    """The layers of each stage in Megatron's notation, such as ["Ett", "tt", "tL"] of
    "Ett|t*2|tL"."""
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(
            pattern, lambda found: found[1] * int(found[2]), text.replace(",", "")
        )
    return text.split("|")


def _joined(name: str, args: Args) -> str | None:
    """A layout with one chunk of layers for each stage: neighbouring chunks are joined,
    and the layers keep their order. One without several chunks for each stage stays as
    it is."""
    given = value(args, name)
    chunks = layout_stages(given or "")
    size = len(chunks) // args.pipeline_model_parallel_size
    if size < 2 or len(chunks) % args.pipeline_model_parallel_size:
        return given
    return "|".join(
        "".join(chunks[first : first + size]) for first in range(0, len(chunks), size)
    )


def _chunked(name: str, args: Args) -> bool:
    return _joined(name, args) != value(args, name)


def _emerging(args: Args) -> bool:
    return args.optimizer not in ("adam", "sgd")


def _whole_matrices(args: Args) -> bool:
    sharded = args.use_distributed_optimizer and _emerging(args)
    return (
        sharded
        or args.optimizer == "dist_muon"
        or getattr(args, "use_layer_wise_distributed_optimizer", False)
    )


def _tied_heads(args: Args) -> bool:
    tied = (
        args.pipeline_model_parallel_size > 1
        and not args.untie_embeddings_and_output_weights
    )
    return bool(
        args.mtp_num_layers and tied and args.save and args.ckpt_format == "torch_dist"
    )


def _other_layers(args: Args) -> bool:
    pattern = args.hybrid_layer_pattern or args.hybrid_override_pattern or ""
    return bool({*pattern} - {*"*-E|"}) or (bool(pattern) and args.task == "bert")


# What asks for a feature, where it is not any true value of the flag, or one of the
# values of the rule.
_ASKS: dict[str, Callable[[Args], object]] = {
    "--context-parallel-size": lambda a: a.context_parallel_size > 1,
    "--num-distributed-optimizer-instances": lambda a: (
        a.num_distributed_optimizer_instances > 1
    ),
    # Megatron sets it to the tensor-parallel size
    "--tensor-parallel-num-weight-shards": lambda a: (
        (a.tensor_parallel_num_weight_shards or 0) > a.tensor_model_parallel_size
    ),
    "--fp8-format": lambda a: a.fp8,
    "--fp4-format": lambda a: a.fp4,
    "--kitchen-recipe-number": lambda a: (
        value(a, "--kitchen-recipe-number") is not None
    ),
    "--optimizer": _whole_matrices,
    "--loss-scale": lambda a: a.loss_scale and _emerging(a),
    "--two-bw-optimizer": lambda a: a.two_bw_optimizer == "host" and _emerging(a),
    "--fp16": lambda a: a.fp16 and a.loss_scale is None,
    "--untie-embeddings-and-output-weights": lambda a: (
        a.pipeline_model_parallel_size > 1 and not a.untie_embeddings_and_output_weights
    ),
    "--ckpt-format": _tied_heads,
    "--timing-log-level": lambda a: a.timing_log_level and a.barrier_with_L1_time,
    **dict.fromkeys(
        ("--hybrid-layer-pattern", "--hybrid-override-pattern"), _other_layers
    ),
    "--microbatch-group-size-per-virtual-pipeline-stage": lambda a: (
        a.microbatch_group_size_per_vp_stage
    ),
    "--overlap-p2p-communication-warmup-flush": lambda a: (
        a.overlap_p2p_comm_warmup_flush
    ),
    "--no-overlap-p2p-communication": lambda a: not a.overlap_p2p_comm,
    "--moe-router-load-balancing-type": lambda a: (
        "quantile_balancing" in a.moe_router_load_balancing_type
    ),
    "--use-nccl-ub": lambda a: a.nccl_ub,
    "--pipeline-schedule": lambda a: a.pipeline_model_parallel_size == 1,
    "--error-injection-rate": lambda a: (
        a.error_injection_rate and a.rerun_mode == "disabled"
    ),
}

OUT = "leave the flag out"
_GRAPHS = f"a graph fixes the addresses of the weights, which change; {OUT}"
_SHARDS = f"sharded parameters are not supported; {OUT}"
_WHOLE = "leave --use-distributed-optimizer out (muon for dist_muon)"
_NOT_YET = f"it is not supported yet; {OUT}"
_IN_FLIGHT = "microbatches of the next batch are in flight when an iteration ends; "
_MIXED = f"{_IN_FLIGHT}what is written would mix batches"

# By the scope of rule.py: flags, with the values that are meant, and why.
_REFUSED: dict[str, tuple[tuple[str, str], ...]] = {
    # Scripts of Megatron have these. Without a rule a run would train without them and
    # not say so: packed sequences would attend to each other, a BERT have no positions
    # or each rank its whole sequence.
    "script": (
        (
            "--hybrid-layer-pattern --hybrid-override-pattern",
            "attention (*), MLPs (-), experts (E) are supported",
        ),
        (
            "--ckpt-format",
            "Megatron cannot save tied embeddings with --mtp-num-layers on "
            "several stages in it; use "
            "--ckpt-format torch or --untie-embeddings-and-output-weights",
        ),
        ("--perform-rl-step", f"only pretraining of GPT and BERT is supported; {OUT}"),
        ("--sft", "its data are no files of preprocess; use --sft-data --sft-packed"),
        (
            "--dataloader-inter-document-masking",
            "documents are not marked; use --reset-attention-mask",
        ),
        ("--hybrid-context-parallel", f"sequences must have one length; {OUT}"),
        ("--logits-load-dir", f"distillation is not supported; {OUT}"),
        (
            "--overlap-moe-expert-parallel-comm",
            f"the forward step gives no plan of its layers; {OUT}",
        ),
        (
            "--inprocess-restart",
            "the script does not start again in its processes; use torchrun --max-restarts",
        ),
    ),
    "bert": (
        ("--context-parallel-size", f"sequences are not split; {OUT}"),
        (
            "--position-embedding-type yarn mrope relative none",
            "it has learned_absolute and rope",
        ),
    ),
    "ours": (
        (
            "--cuda-graph-impl local transformer_engine full_iteration --enable-cuda-graph",
            _GRAPHS,
        ),
        ("--external-cuda-graph --optimizer-cuda-graph", _GRAPHS),
        (
            "--use-megatron-fsdp --use-torch-fsdp2 --tensor-parallel-num-weight-shards",
            _SHARDS,
        ),
        (
            "--fp8-format --fp4-format",
            "quantised weights are not versioned yet; use --bf16",
        ),
        (
            "--te-precision-config-file --kitchen-config-file --kitchen-recipe-number",
            _NOT_YET,
        ),
        # in an own script
        (
            "--rampup-batch-size",
            "Megatron 0.19 ignores it; give --step-batch-size-schedule",
        ),
        ("--fake-process-group", f"stages exchange real messages; {OUT}"),
        (
            "--inprocess-restart",
            f"a schedule's groups and weights outlive the restart; {OUT}",
        ),
        ("--fine-grained-activation-offloading --cpu-offloading-num-layers", _NOT_YET),
        (
            "--optimizer-cpu-offload",
            "it is Megatron's, and makes a step wait; 2bw has --two-bw-optimizer host",
        ),
    ),
    "no flush": (
        ("--num-distributed-optimizer-instances", _NOT_YET),
        ("--ddp-param-name-patterns-for-fp32-local-accumulation", _NOT_YET),
        (
            "--use-precision-aware-optimizer",
            f"its kernel writes one weight store only; {OUT}",
        ),
        ("--optimizer", f"whole matrices of each rank are not versioned yet; {_WHOLE}"),
        ("--perform-rl-step", _NOT_YET),  # of scripts that have it
        (
            "--iterations-to-skip --result-rejected-tracker-filename",
            f"{_IN_FLIGHT}none can be skipped",
        ),
        (
            "--phase-transition-iterations",
            f"{_IN_FLIGHT}they would be of the old phase",
        ),
        (
            "--save-activations-interval --save-dgrads-interval --save-wgrads-interval",
            _MIXED,
        ),
        ("--logits-save-dir --log-max-attention-logit", _MIXED),
        (
            "--save-params-interval",
            f"the step of a batch ends in the next iteration; {OUT}",
        ),
        (
            "--qk-clip",
            f"it changes weights that microbatches in flight still read; {OUT}",
        ),
    ),
    "2bw": (
        (
            "--moe-router-load-balancing-type",
            "the quantiles of quantile_balancing have no versions; use aux_loss",
        ),
        (
            "--muon-fp32-matmul-prec high",
            "TF32 would be on for the next batch too; use medium",
        ),
        ("--loss-scale", f"it divides only some gradients of --optimizer; {OUT}"),
        (
            "--two-bw-optimizer",
            "the matrix products of --optimizer take too long on a host; use --optimizer adam",
        ),
    ),
    "pipedream": (
        (
            "--mtp-num-layers",
            f"the two copies of its embedding would drift apart; {OUT}",
        ),
        (
            "--step-batch-size-schedule",
            "its versions count microbatches; give --global-batch-size",
        ),
        (
            "--num-experts",
            "auxiliary losses and biases have one version; train a dense model",
        ),
        ("--use-distributed-optimizer", f"its shards have one version; {OUT}"),
        (
            "--fp16",
            "each stage would scale the loss by itself; add --loss-scale N, or use --bf16",
        ),
        (
            "--untie-embeddings-and-output-weights",
            "it must be given: tied embeddings would drift apart",
        ),
    ),
}
UNSUPPORTED = tuple(
    Rule(flag, why, scope, _ASKS.get(flag))
    for scope, rows in _REFUSED.items()
    for flags, why in rows
    for flag in re.split(" (?=--)", flags)
)
# under no schedule
NEVER = {
    rule.flag for rule in UNSUPPORTED if rule.scope == "script" and rule.when is None
}

_LAYOUTS = (
    "--pipeline-model-parallel-layout",
    "--hybrid-layer-pattern",
    "--hybrid-override-pattern",
)
_CHUNK = "a stage is one chunk of layers"
_ONCE = "no iteration is run again"

# What changes nothing under a schedule, or is done there in another way: scope, flag,
# why, and arguments without it, or what makes them of the present ones.
_IDLE: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (
        "script",
        "--log-straggler",
        "the forward step feeds no detector",
        {"log_straggler": False},
    ),
    ("2bw", "--timing-log-level", "no barriers", {"barrier_with_L1_time": False}),
    (
        "2bw",
        "--overlap-param-gather",
        "the late step gathers",
        {"overlap_param_gather": False},
    ),
    ("2bw", "--use-nccl-ub", "weights and gradients have stores", {"nccl_ub": False}),
    ("2bw", "--use-sharp", "the late step has groups of its own", {}),
    (
        "ours",
        "--defer-embedding-wgrad-compute",
        "a backward is whole",
        {"defer_embedding_wgrad_compute": False},
    ),
    (
        "ours",
        "--pipeline-model-parallel-comm-backend",
        "stages exchange by themselves",
        {},
    ),
    (
        "ours",
        "--use-ring-exchange-p2p",
        "stages exchange by themselves",
        {"use_ring_exchange_p2p": False},
    ),
    (
        "ours",
        "--nccl-communicator-config-path",
        "not for the schedule's own groups",
        {},
    ),
    ("ours", "--high-priority-stream-groups", "not for the schedule's own groups", {}),
    (
        "no flush",
        "--rerun-mode validate_results report_stats",
        _ONCE,
        {"rerun_mode": "disabled"},
    ),
    ("ours", "--error-injection-rate", _ONCE, {}),
    (
        "ours",
        "--num-layers-per-virtual-pipeline-stage",
        _CHUNK,
        {"num_layers_per_virtual_pipeline_stage": None},
    ),
    (
        "ours",
        "--num-virtual-stages-per-pipeline-rank",
        _CHUNK,
        {"num_virtual_stages_per_pipeline_rank": None},
    ),
    (
        "ours",
        "--pipeline-model-parallel-layout",
        _CHUNK,
        {"pipeline_model_parallel_layout": _joined},
    ),
    ("ours", "--hybrid-layer-pattern", _CHUNK, {"hybrid_layer_pattern": _joined}),
    ("ours", "--hybrid-override-pattern", _CHUNK, {"hybrid_override_pattern": _joined}),
    ("ours", "--microbatch-group-size-per-virtual-pipeline-stage", _CHUNK, {}),
    (
        "ours",
        "--overlap-p2p-communication-warmup-flush",
        _CHUNK,
        {"overlap_p2p_comm_warmup_flush": False},
    ),
    ("ours", "--no-overlap-p2p-communication", _CHUNK, {}),
    (
        "ours",
        "--overlap-param-gather-with-optimizer-step",
        _CHUNK,
        {"overlap_param_gather_with_optimizer_step": False},
    ),
    (
        "2bw",
        "--pipeline-schedule",
        "one stage has no bubble, and its gradients are late: leave it out",
        {},
    ),
)
_IDLE_ASKS = _ASKS | {flag: partial(_chunked, flag) for flag in _LAYOUTS}
WITHOUT = tuple(
    (Rule(flag, why, scope, _IDLE_ASKS.get(flag)), off)
    for scope, flag, why, off in _IDLE
)


def refusal(args: Args) -> str | None:
    """The line of the first rule that the arguments break, or None."""
    return next(filter(None, (rule.line(args) for rule in UNSUPPORTED)), None)


def settle(args: Args) -> str | None:
    """Set the arguments that the schedule does without; the one line of the log that
    lists them, or None."""
    found: list[str] = []
    for rule, off in WITHOUT:
        if not rule.holds(args):
            continue
        for name, new in off.items():
            setattr(args, name, new(name, args) if callable(new) else new)
        found.append(f"{rule.flag.split()[0]} ({rule.why})")
    return (
        f"> {args.pipeline_schedule}: without effect, or with less: {', '.join(found)}"
        if found
        else None
    )
