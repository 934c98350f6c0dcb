"""Flags that Megatron accepts and would not read: a run must not continue with a setting that has no effect.

Invariant: the rules are about typed flags only, so a default is never an error.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_2bw.flags.rule import Args, Condition, Rule, asks, installed, names, on_cpu, task


def _scalars_by_lion(args: Args) -> bool:
    """Whether Muon leaves all but the matrices to Lion."""
    return "muon" in args.optimizer and args.muon_scalar_optimizer == "lion"


def _has_graphs(args: Args) -> bool:
    return args.cuda_graph_impl != "none" or asks(args, "--enable-cuda-graph") or asks(args, "--external-cuda-graph")


def _has_checkpoints(args: Args) -> object:
    return args.save or args.load or args.pretrained_checkpoint


def _logs_timers(args: Args) -> object:
    return args.tensorboard_dir or args.wandb_project and args.pipeline_schedule != "megatron"


_EXPERTS = (
    "--moe- --ep-overlap- --overlap-dispatch-backward- --use-grouped-gemm-for-shared-expert --high-priority-a2a- "
    "--expert-tensor-parallel- --use-fused-weighted-squared-relu --save-tokens-per-expert-interval"
)
_LOSS_SCALES = "--initial-loss-scale --min-loss-scale --loss-scale-window --hysteresis"
_FSDP = (
    "--fsdp- --megatron-fsdp- --data-parallel-sharding- --outer-dp-sharding- --keep-fp8- --enable-full-sharding- "
    "--suggested-communication- --init-model-with-meta-device --no-strict-fsdp-"
)
_OFFLOADING = (
    "--offload-modules --min-offloaded- --delay-offload- --delta-offload- --activation-offload- "
    "--fine-grained-offloading-"
)
_OF_A_GPT = (
    "--fim-data --reset-position-ids --reset-attention-mask --eod-mask-loss --no-create-attention-mask-in-dataloader "
    "--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap --per-dataset-sequences-path --no-mmap-bin-files "
    "--object-storage-cache-path --rotary-base --use-rope-scaling"
)
# Of fine-tuning, reinforcement learning, inference, hybrid models, vision and retrieval.
_OF_OTHER_TASKS = (
    "--logits-load- --rl- --no-rl- --grpo- --langrl- --refit- --inprocess- --inference- --no-inference- "
    "--flash-decode --num-speculative-tokens --enable-chunked-prefill --max-tokens-to-oom --use-legacy-static-engine "
    "--mlp-chunks-for-prefill --nccl-all-reduce-for-prefill --decode-only-cuda-graphs --output-bert-embeddings "
    "--bert-embedder-type --bert-load --mamba- --disable-mamba- --is-hybrid-model --max-seqlen-per-dp-cp-rank "
    "--vision- --dino- --swin- --img- --patch-dim --num-classes --num-channels --classes-fraction "
    "--data-per-class-fraction --mask-type --mask-factor --iter-per-epoch --head-lr-mult --ict- --biencoder- "
    "--titles-data-path --query-in-block-prob --use-one-sent-docs --evidence-data-path --retriever- --block-data-path "
    "--embedding-path --indexer- --adlr- --sft-tokenizer-"
)
_READ_NOWHERE = (
    "--use-flash-attn --onnx-safe --apply-residual-connection-post-layernorm --decoder-num-layers "
    "--exit-signal-handler-for-dataloader --fp16-lm-cross-entropy --dist-ckpt-save-pre-mcore-014 --sample-rate"
)

# Multi-latent attention has rotary positions of its own.
_ROTARY = "--position-embedding-type yarn mrope --multi-latent-attention --use-rotary-position-embeddings"
_YARN = "--yarn- --no-yarn- --rotary-scaling-factor --mscale --mscale-all-dim"
_OF_WORDS = "--chat-template --tokenizer-metadata --allow-ambiguous-pad-tokens"
_TIMERS = "--tensorboard-log-interval --log-timers-to-tensorboard --log-world-size-to-tensorboard"

# The flag without which the others have no effect, or the words where they have none; the others; the further flags
# with which they have one, or whether they have one.
_ROWS: tuple[tuple, ...] = (
    ("--num-experts", _EXPERTS),
    ("--mtp-num-layers", "--mtp-"),
    ("--fp8-format", "--fp8- --no-fp8- --disable-fp8- --first-last-layers-bf16 --num-layers-at-", lambda a: a.fp8),
    ("--fp4-format", "--fp4-", lambda a: a.fp4),
    ("--bf16", "--grad-reduce-in-bf16"),
    ("--fp16", _LOSS_SCALES),
    ("with --loss-scale, a constant", _LOSS_SCALES, lambda a: not a.loss_scale),
    # The distributed optimizer scales in fp32 too.
    ("in fp32", "--loss-scale", lambda a: a.fp16 or a.bf16 or a.use_distributed_optimizer),
    ("--swiglu", "--no-bias-swiglu-fusion"),
    ("without Transformer Engine", "--te-rng-tracker", lambda a: installed("transformer_engine")),
    ("on the CPU", "--high-priority-stream-groups --empty-unused-memory-level", lambda a: not on_cpu(a)),
    ("--fim-data", "--fim-"),
    ("--dataloader-type cyclic", "--no-data-sharding"),
    ("--use-mup", "--mup-"),
    ("--optimizer muon", "--muon-", "--optimizer dist_muon adaptive_muon"),
    # --optimizer lion takes its betas from --adam-beta1 and --adam-beta2.
    ("--muon-scalar-optimizer lion", "--lion-", _scalars_by_lion),
    ("with --optimizer sgd", "--adam-", lambda a: a.optimizer != "sgd"),
    ("with --muon-scalar-optimizer lion", "--adam-", lambda a: not _scalars_by_lion(a)),
    ("--optimizer sgd", "--sgd-momentum"),
    ("--lr-decay-style WSD", "--lr-wsd-"),
    ("--decoupled-lr", "--decoupled-min-lr"),
    ("--position-embedding-type rope", "--rotary- --no-rope-freq --use-rope-scaling", _ROTARY),
    ("--use-rope-scaling", "--rope-scaling-factor"),
    ("without GeLU", "--openai-gelu", lambda a: not (a.swiglu or a.squared_relu or a.quick_geglu)),
    # The tasks of this project apply both; Megatron 0.19 drops them.
    ("in an entry script of Megatron's", "--openai-gelu --rope-scaling-factor", lambda a: task(a) is not None),
    ("--position-embedding-type yarn", _YARN, "--multi-latent-attention"),
    ("--position-embedding-type relative", "--relative-attention-", "--multi-latent-attention"),
    ("--position-embedding-type mrope", "--mrope-section", "--multi-latent-attention"),
    ("--window-size", "--window-attn-skip-freq"),
    ("--qk-clip", "--qk-clip-"),
    ("--experimental-attention-variant", "--linear- --dsa- --no-dsa-"),
    ("--multi-latent-attention", "--q-lora- --kv-lora- --qk-head-dim --qk-pos-emb- --v-head-dim --cache-mla- --mla-"),
    ("--recompute-granularity", "--recompute-num-layers --recompute-modules", "--recompute-activations"),
    ("--context-parallel-size", "--cp-comm-type --hierarchical-context-", lambda a: a.context_parallel_size > 1),
    ("--use-kitchen-attention", "--kitchen-"),
    ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl"),
    ("--tp-comm-overlap", "--tp-comm- --no-tp-comm- --disable-tp-comm-"),
    ("--defer-embedding-wgrad-compute", "--wgrad-deferral-limit"),
    ("--fine-grained-activation-offloading", _OFFLOADING),
    ("--cpu-offloading-num-layers", "--cpu-offloading-retain-"),
    (
        "--optimizer-cpu-offload",
        "--optimizer-offload- --use-torch-optimizer-for- --overlap-cpu-optimizer- --no-pin-cpu-",
    ),
    ("--cuda-graph-impl", "--cuda-graph-warmup-steps --cuda-graph-modules --cuda-graph-scope", _has_graphs),
    ("--use-megatron-fsdp", _FSDP, "--use-torch-fsdp2"),
    ("--use-torch-fsdp2", "--torch-fsdp2-"),
    ("without interleaved stages", "--overlap-p2p-communication-warmup- --microbatch-group-size-per-virtual-"),
    ("--profile", "--profile- --nvtx-ranges --record-shapes"),
    ("--use-pytorch-profiler", "--pytorch-profiler-"),
    ("--record-memory-history", "--memory-snapshot-path"),
    ("--wandb-project", "--wandb-"),
    ("--tensorboard-dir", "--tensorboard-queue-size --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard"),
    ("--tensorboard-dir", _TIMERS, _logs_timers),
    ("--log-straggler", "--straggler- --disable-straggler-"),
    ("--manual-gc", "--manual-gc-"),
    ("--overlap-grad-reduce", "--no-align-grad-reduce --disable-align-grad-reduce"),
    ("--overlap-param-gather", "--no-align-param-gather"),
    ("--save", "--save-interval --persistent-save-interval --no-save-optim --no-save-rng"),
    ("--load", "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler", "--pretrained-checkpoint"),
    ("--load", "--no-load-optim --no-load-rng", "--pretrained-checkpoint"),
    ("without --save and --load", "--ckpt-format --dist-ckpt-optim-fully-reshardable", _has_checkpoints),
    ("--load", "--finetune --ckpt-step --override-ckpt-iteration --auto-detect-ckpt-format", "--pretrained-checkpoint"),
    ("--load", "--ckpt-fully-parallel-load", "--pretrained-checkpoint"),
    ("--async-save", "--async- --use-persistent-ckpt-worker"),
    ("--non-persistent-ckpt-type", "--non-persistent-"),
    ("--ckpt-convert-format", "--ckpt-convert-"),
    ("--replication", "--replication-"),
    ("--enable-ft-package", "--ft- --calc-ft-"),
    ("--fault-injector-ranks", "--fault-injector-", "--fault-injector-num-ranks"),
    ("with --rerun-mode disabled", "--error-injection-", lambda a: a.rerun_mode != "disabled"),
    ("--logits-save-dir", "--logits-save-"),
    ("--tokenizer-type TikTokenizer", "--tiktoken-"),
    ("--tokenizer-type NullTokenizer", "--null-tokenizer-"),
    ("with --tokenizer-type NullTokenizer", _OF_WORDS, lambda a: a.tokenizer_type != "NullTokenizer"),
    ("in pretraining a GPT", "--mask-prob --short-seq-prob --bert-no-binary-head", lambda a: task(a) != "gpt"),
    ("in pretraining a BERT", _OF_A_GPT, lambda a: task(a) != "bert"),
    ("in pretraining", _OF_OTHER_TASKS),
    ("in Megatron 0.19", _READ_NOWHERE),
)


def _rules(where: str, flags: str, read: str | Condition = "") -> Iterator[Rule]:
    if isinstance(read, str):
        enough = [flag for flag in names(f"{where} {read}") if flag.startswith("--")]
        read = lambda args: any(asks(args, flag) for flag in enough)
    why = f"has no effect {'without ' * where.startswith('--')}{where}: leave it out"
    for flag in flags.split():
        yield Rule(flag, why, "line", lambda args: not read(args), typed=True)


NO_EFFECT: tuple[Rule, ...] = tuple(rule for row in _ROWS for rule in _rules(*row))
