"""What runs do not support: Megatron's flags that are refused by name, with every value or with some.

Invariant: each flag that a run cannot honour is refused with the reason before training starts; no flag is silently
ignored. `sizes.py` holds the rows that the planner shares.
"""

from __future__ import annotations

from megatron_2bw import sizes
from megatron_2bw.flags.rule import OUT, Args, Rule, installed, rules, value


def _sharded_weights(args: Args) -> bool:
    # Megatron sets it to the tensor-parallel size if it is not given.
    return (args.tensor_parallel_num_weight_shards or 0) > args.tensor_model_parallel_size


def _emerging(args: Args) -> bool:
    """Whether the optimizer is of the package emerging_optimizers."""
    return args.optimizer not in ("adam", "sgd")


def _context_parallel(args: Args) -> bool:
    return args.context_parallel_size > 1


def _mixed(args: Args) -> bool:
    """Whether torch's norms would get a residual in fp32 and their weights in 16 bits."""
    return args.fp32_residual_connection and (args.bf16 or args.fp16) and not installed("apex")


def _whole_matrices(args: Args) -> bool:
    return args.optimizer == "dist_muon" or getattr(args, "use_layer_wise_distributed_optimizer", False)


def _unsaved(args: Args) -> bool:
    return args.save and args.optimizer == "soap" and args.ckpt_format == "torch_dist" and not args.no_save_optim


_ONE_TASK = f"only pretraining of GPT and BERT is supported; {OUT}"
_PACKED = "it packs sequences, whose borders the forward step does not pass; use --sft-data"
_HYBRID = "hybrid models are not supported; train a GPT or a BERT"
_LOADERS = "the script gives Megatron datasets, not loaders; use single or cyclic"
_RESTART = "the script does not start again in its processes; use torchrun --max-restarts"
_BROKEN = f"Megatron 0.19 fails with it; {OUT}"
_DROPPED = f"Megatron 0.19 takes the flag and drops it; {OUT}"
_PARTLY_SCALED = f"Megatron 0.19 divides only some gradients by it with this --optimizer; {OUT}"
_NO_FP16 = "Megatron 0.19 has this --optimizer in fp32 and bf16; use --bf16"
_NO_SGD = f"Megatron 0.19 does not have it with --optimizer sgd; use adam, or {OUT}"
_NO_SOAP = "Megatron 0.19 saves no state of --optimizer soap in this format; use --ckpt-format torch"
_WHOLE_SEQUENCES = "its sequences cannot be split; use tensor or pipeline parallelism"
_NO_BERT = f"Megatron 0.19 has no such layers for it; {OUT}"
_NEEDS_APEX = f"the norm of its head needs Apex for that, which is not installed; {OUT}"
_EXPERTS = "mixture of experts is not supported yet; train a dense model"
_GRAPHS = f"a graph fixes the addresses of the weights, which change; {OUT}"
_SHARDS = f"sharded parameters are not supported; {OUT}"
_ORDER = f"it follows Megatron's own order of forwards and backwards; {OUT}"
_BARRIERS = "its barriers would hold all stages up; add --no-barrier-with-level-1-timing"
_QUANTISED = f"quantised weights are not versioned yet; {OUT}"
_NOT_YET = f"it is not supported yet; {OUT}"
_OWN_GROUPS = f"the late step reduces over process groups of its own, which it does not reach; {OUT}"
_BATCH_SIZE = "the number of microbatches must stay; give one --global-batch-size"
_WHOLE_MATRICES = "Megatron gives each rank whole matrices to step, which are not versioned yet; "
_TF32 = "TF32 is a setting of the whole process, whose next batch runs beside the step; use medium"
_IN_FLIGHT = "microbatches of the next batch are in flight when an iteration ends; "
_SKIPPED = f"{_IN_FLIGHT}none can be skipped"
_AGAIN = f"{_IN_FLIGHT}none can be run again; use --rerun-mode disabled"
_MIXED = f"{_IN_FLIGHT}what is written would mix batches"

UNSUPPORTED: tuple[Rule, ...] = (
    *rules(
        "any",
        ("--yaml-cfg", "it would drop the flags of the command line; give Megatron's flags instead"),
        ("--hybrid-layer-pattern --hybrid-override-pattern", _HYBRID),
        ("--perform-rl-step --vision-pretraining", _ONE_TASK),
        ("--sft", _PACKED),
        ("--logits-load-dir", f"distillation is not supported; {OUT}"),
        ("--hybrid-context-parallel", f"sequences must have one length; {OUT}"),
        ("--decoder-seq-length", f"GPT and BERT have one sequence length, --seq-length; {OUT}"),
        ("--dataloader-inter-document-masking", "documents are not marked; use --reset-attention-mask"),
        ("--dataloader-type external", _LOADERS),
        ("--overlap-moe-expert-parallel-comm", f"the forward step gives no plan of its layers; {OUT}"),
        ("--mtp-num-layers", f"the last stage reads no tokens; {OUT}"),
        ("--log-straggler", f"the forward step feeds no straggler detector; {OUT}"),
        ("--inprocess-restart", _RESTART),
        ("--adlr-autoresume", f"it needs a library that is not public; {OUT}"),
        ("--lazy-mpu-init", f"nobody would finish the initialisation; {OUT}"),
        ("--rampup-batch-size --freeze-all-layers --create-all-gather-group", _DROPPED),
        ("--checkpoint-activations", "Megatron 0.19 no longer has it; use --recompute-granularity"),
        ("--attention-backend local", f"Megatron 0.19 ties it to a --spec that does not exist; {OUT}"),
        ("--transformer-impl inference_optimized", "it is for inference; use transformer_engine or local"),
        ("--init-method-xavier-uniform --config-logger-dir", _BROKEN),
        ("--optimizer adaptive_muon", "Megatron 0.19 fails at its first step; use muon"),
        ("--fp16", _NO_FP16, lambda a: a.fp16 and _emerging(a)),
        ("--loss-scale", _PARTLY_SCALED, lambda a: a.loss_scale and _emerging(a)),
        ("--save", _NO_SOAP, _unsaved),
        ("--use-distributed-optimizer", _NO_SGD, lambda a: a.use_distributed_optimizer and a.optimizer == "sgd"),
        ("--muon-fp32-matmul-prec low", "torch has no such precision; use medium or high"),
    ),
    *rules(
        "bert",  # Megatron would drop most of these without a word
        ("--context-parallel-size", _WHOLE_SEQUENCES, _context_parallel),
        ("--position-embedding-type yarn mrope relative none", "it has learned_absolute and rope"),
        ("--qk-l2-norm --multi-latent-attention --experimental-attention-variant", _NO_BERT),
        ("--heterogeneous-layers-config-path", _NO_BERT),
        ("--use-mup", f"its logits would not be scaled; {OUT}"),
        ("--sequence-parallel", _NEEDS_APEX, lambda a: a.sequence_parallel and not installed("apex")),
        ("--apply-layernorm-1p", _NEEDS_APEX, lambda a: a.layernorm_zero_centered_gamma and not installed("apex")),
        ("--window-size", f"it attends to all words; {OUT}"),
        ("--num-experts", _EXPERTS),
    ),
    Rule("--num-layers-per-virtual-pipeline-stage", sizes.ONE_CHUNK.why),
    sizes.ONE_CHUNK,
    *rules(
        "ours",
        ("--cuda-graph-impl local transformer_engine full_iteration", _GRAPHS),
        ("--enable-cuda-graph --external-cuda-graph --optimizer-cuda-graph", _GRAPHS),
        ("--use-megatron-fsdp --use-torch-fsdp2", _SHARDS),
        ("--tensor-parallel-num-weight-shards", _SHARDS, _sharded_weights),
        ("--num-experts", _EXPERTS),
        ("--fp8-format", "fp8 weights are not versioned yet; use --bf16", lambda a: a.fp8),
        ("--fp4-format", "fp4 weights are not versioned yet; use --bf16", lambda a: a.fp4),
        ("--te-precision-config-file --kitchen-config-file", _QUANTISED),
        ("--kitchen-recipe-number", _QUANTISED, lambda a: value(a, "--kitchen-recipe-number") is not None),
        ("--pipeline-model-parallel-comm-backend", "stages exchange by themselves; use --two-bw-exchange"),
        ("--use-ring-exchange-p2p", f"stages exchange by themselves; {OUT}"),
        ("--fake-process-group", f"stages exchange real messages; {OUT}"),
        ("--defer-embedding-wgrad-compute", _ORDER),
        ("--delay-wgrad-compute", f"a backward must be whole; {OUT}"),
        ("--fine-grained-activation-offloading --cpu-offloading-num-layers", _ORDER),
        ("--optimizer-cpu-offload", _NOT_YET),
        ("--step-batch-size-schedule", _BATCH_SIZE),
    ),
    Rule("--timing-log-level", _BARRIERS, "2bw", lambda a: a.timing_log_level >= 1 and a.barrier_with_L1_time),
    Rule("--decrease-batch-size-if-needed", _BATCH_SIZE, "no flush"),
    sizes.SHARDS,
    *rules(
        "no flush",
        ("--num-distributed-optimizer-instances", _NOT_YET, lambda a: a.num_distributed_optimizer_instances > 1),
        ("--ddp-param-name-patterns-for-fp32-local-accumulation", _NOT_YET),
        ("--use-precision-aware-optimizer", f"its kernel writes one weight store only; {OUT}"),
    ),
    *rules(
        "2bw",
        ("--overlap-param-gather-with-optimizer-step", f"the late step gathers by itself; {OUT}"),
        ("--use-sharp", _OWN_GROUPS),
        ("--use-nccl-ub", _OWN_GROUPS, lambda a: a.nccl_ub),
    ),
    Rule("--optimizer", f"{_WHOLE_MATRICES}use muon, without --use-distributed-optimizer", "no flush", _whole_matrices),
    Rule(
        "--use-distributed-optimizer",
        f"{_WHOLE_MATRICES}with this --optimizer, so {OUT}",
        "no flush",
        lambda a: a.use_distributed_optimizer and _emerging(a),
    ),
    Rule("--muon-fp32-matmul-prec high", _TF32, "2bw"),
    *rules(
        "no flush",
        ("--iterations-to-skip --result-rejected-tracker-filename", _SKIPPED),
        ("--phase-transition-iterations", f"{_IN_FLIGHT}they would be of the old phase"),
        ("--rerun-mode validate_results report_stats", _AGAIN),
        ("--save-activations-interval --save-dgrads-interval --save-wgrads-interval", _MIXED),
        ("--save-params-interval", f"the step of a batch ends in the next iteration; {OUT}"),
        ("--logits-save-dir --log-max-attention-logit", _MIXED),
        ("--qk-clip", f"it changes weights that microbatches in flight still read; {OUT}"),
    ),
    sizes.SCALES,
    sizes.TIES,
)
