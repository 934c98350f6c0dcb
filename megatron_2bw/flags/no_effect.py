"""Flags that Megatron accepts and would not read: a run must not go on with a setting that has no effect.

Invariant: only flags that were typed are looked at, so a default is never an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megatron_2bw.flags.checks import task, value

Condition = Callable[[argparse.Namespace], object]


def _optimizer_is(*names: str) -> Condition:
    return lambda args: any(name in args.optimizer for name in names)


def _scalars_by_lion(args: argparse.Namespace) -> bool:
    """Whether Muon leaves all but the matrices to Lion."""
    return "muon" in args.optimizer and args.muon_scalar_optimizer == "lion"


def _positions(*kinds: str) -> Condition:
    """Whether the position embedding is of one of the `kinds`; multi-latent attention has rotary ones of its own."""
    rotary = "rope" in kinds
    return lambda args: (
        args.position_embedding_type in kinds
        or args.multi_latent_attention
        or (rotary and args.use_rotary_position_embeddings)
    )


def _never(args: argparse.Namespace) -> bool:
    return False


# Flags (or the beginnings of their names) that Megatron accepts and never reads unless the condition holds.
IDLE: tuple[tuple[str, Condition, str], ...] = (
    (
        "--moe- --ep-overlap- --overlap-dispatch-backward- --use-grouped-gemm-for-shared-expert --high-priority-a2a- "
        "--expert-tensor-parallel- --use-fused-weighted-squared-relu --save-tokens-per-expert-interval",
        lambda a: a.num_experts,
        "without --num-experts",
    ),
    ("--mtp-", lambda a: a.mtp_num_layers, "without --mtp-num-layers"),
    (
        "--fp8- --no-fp8- --disable-fp8- --first-last-layers-bf16 --num-layers-at-",
        lambda a: a.fp8,
        "without --fp8-format",
    ),
    ("--fp4-", lambda a: a.fp4, "without --fp4-format"),
    ("--grad-reduce-in-bf16", lambda a: a.bf16, "without --bf16"),
    ("--fim-", lambda a: a.fim_data, "without --fim-data"),
    ("--no-data-sharding", lambda a: a.dataloader_type == "cyclic", "without --dataloader-type cyclic"),
    ("--mup-", lambda a: a.use_mup, "without --use-mup"),
    ("--muon-", _optimizer_is("muon"), "without --optimizer muon"),
    # --optimizer lion takes its betas from --adam-beta1 and --adam-beta2.
    ("--lion-", _scalars_by_lion, "without --muon-scalar-optimizer lion"),
    ("--adam-", lambda a: a.optimizer != "sgd", "with --optimizer sgd"),
    ("--adam-", lambda a: not _scalars_by_lion(a), "with --muon-scalar-optimizer lion"),
    ("--sgd-momentum", _optimizer_is("sgd"), "without --optimizer sgd"),
    ("--lr-wsd-", lambda a: a.lr_decay_style == "WSD", "without --lr-decay-style WSD"),
    ("--decoupled-min-lr", lambda a: a.decoupled_lr, "without --decoupled-lr"),
    (
        "--rotary- --no-rope-freq --use-rope-scaling",
        _positions("rope", "yarn", "mrope"),
        "without --position-embedding-type rope",
    ),
    (
        "--yarn- --no-yarn- --rotary-scaling-factor --mscale --mscale-all-dim",
        _positions("yarn"),
        "without --position-embedding-type yarn",
    ),
    ("--relative-attention-", _positions("relative"), "without --position-embedding-type relative"),
    ("--mrope-section", _positions("mrope"), "without --position-embedding-type mrope"),
    ("--window-attn-skip-freq", lambda a: a.window_size, "without --window-size"),
    ("--qk-clip-", lambda a: a.qk_clip, "without --qk-clip"),
    (
        "--linear- --dsa- --no-dsa-",
        lambda a: a.experimental_attention_variant,
        "without --experimental-attention-variant",
    ),
    (
        "--q-lora- --kv-lora- --qk-head-dim --qk-pos-emb- --v-head-dim --cache-mla- --mla-",
        lambda a: a.multi_latent_attention,
        "without --multi-latent-attention",
    ),
    (
        "--recompute-num-layers --recompute-modules",
        lambda a: a.recompute_granularity or value(a, "--recompute-activations"),
        "without --recompute-granularity",
    ),
    (
        "--cp-comm-type --hierarchical-context-",
        lambda a: a.context_parallel_size > 1,
        "without --context-parallel-size",
    ),
    ("--kitchen-", lambda a: a.use_kitchen_attention, "without --use-kitchen-attention"),
    ("--cross-entropy-fusion-impl", lambda a: a.cross_entropy_loss_fusion, "without --cross-entropy-loss-fusion"),
    ("--tp-comm- --no-tp-comm- --disable-tp-comm-", lambda a: a.tp_comm_overlap, "without --tp-comm-overlap"),
    ("--wgrad-deferral-limit", lambda a: a.defer_embedding_wgrad_compute, "without --defer-embedding-wgrad-compute"),
    (
        "--offload-modules --min-offloaded- --delay-offload- --delta-offload- --activation-offload- "
        "--fine-grained-offloading-",
        lambda a: a.fine_grained_activation_offloading,
        "without --fine-grained-activation-offloading",
    ),
    ("--cpu-offloading-retain-", lambda a: a.cpu_offloading_num_layers, "without --cpu-offloading-num-layers"),
    (
        "--optimizer-offload- --use-torch-optimizer-for- --overlap-cpu-optimizer- --no-pin-cpu-",
        lambda a: a.optimizer_cpu_offload,
        "without --optimizer-cpu-offload",
    ),
    (
        "--cuda-graph-warmup-steps --cuda-graph-modules --cuda-graph-scope",
        lambda a: a.cuda_graph_impl != "none" or value(a, "--enable-cuda-graph") or value(a, "--external-cuda-graph"),
        "without --cuda-graph-impl",
    ),
    (
        "--fsdp- --megatron-fsdp- --data-parallel-sharding- --outer-dp-sharding- --keep-fp8- --enable-full-sharding- "
        "--suggested-communication- --init-model-with-meta-device --no-strict-fsdp-",
        lambda a: a.use_megatron_fsdp or a.use_torch_fsdp2,
        "without --use-megatron-fsdp",
    ),
    ("--torch-fsdp2-", lambda a: a.use_torch_fsdp2, "without --use-torch-fsdp2"),
    ("--overlap-p2p-communication-warmup- --microbatch-group-size-per-virtual-", _never, "without interleaved stages"),
    ("--profile- --nvtx-ranges --record-shapes", lambda a: a.profile, "without --profile"),
    ("--pytorch-profiler-", lambda a: a.use_pytorch_profiler, "without --use-pytorch-profiler"),
    ("--memory-snapshot-path", lambda a: a.record_memory_history, "without --record-memory-history"),
    ("--wandb-", lambda a: a.wandb_project, "without --wandb-project"),
    (
        "--tensorboard-queue-size --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard",
        lambda a: a.tensorboard_dir,
        "without --tensorboard-dir",
    ),
    (
        "--tensorboard-log-interval --log-timers-to-tensorboard --log-world-size-to-tensorboard",
        lambda a: a.tensorboard_dir or (a.wandb_project and a.pipeline_schedule != "megatron"),
        "without --tensorboard-dir",
    ),
    ("--straggler- --disable-straggler-", lambda a: a.log_straggler, "without --log-straggler"),
    ("--manual-gc-", lambda a: a.manual_gc, "without --manual-gc"),
    ("--save-interval --persistent-save-interval --no-save-optim --no-save-rng", lambda a: a.save, "without --save"),
    (
        "--finetune --ckpt-step --override-ckpt-iteration --auto-detect-ckpt-format --ckpt-fully-parallel-load",
        lambda a: a.load or a.pretrained_checkpoint,
        "without --load",
    ),
    ("--async- --use-persistent-ckpt-worker", lambda a: a.async_save, "without --async-save"),
    ("--non-persistent-", lambda a: a.non_persistent_ckpt_type, "without --non-persistent-ckpt-type"),
    ("--ckpt-convert-", lambda a: a.ckpt_convert_format, "without --ckpt-convert-format"),
    ("--replication-", lambda a: a.replication, "without --replication"),
    ("--ft- --calc-ft-", lambda a: a.enable_ft_package, "without --enable-ft-package"),
    (
        "--fault-injector-",
        lambda a: a.fault_injector_ranks or a.fault_injector_num_ranks,
        "without --fault-injector-ranks",
    ),
    ("--error-injection-", lambda a: a.rerun_mode != "disabled", "with --rerun-mode disabled"),
    ("--logits-save-", lambda a: a.logits_save_dir, "without --logits-save-dir"),
    ("--tiktoken-", lambda a: a.tokenizer_type == "TikTokenizer", "without --tokenizer-type TikTokenizer"),
    ("--null-tokenizer-", lambda a: a.tokenizer_type == "NullTokenizer", "without --tokenizer-type NullTokenizer"),
    ("--mask-prob --short-seq-prob --bert-no-binary-head", lambda a: task(a) != "gpt", "in pretraining a GPT"),
    (
        "--fim-data --reset-position-ids --reset-attention-mask --eod-mask-loss "
        "--no-create-attention-mask-in-dataloader "
        "--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap --per-dataset-sequences-path "
        "--no-mmap-bin-files "
        "--object-storage-cache-path --rotary-base --use-rope-scaling",
        lambda a: task(a) != "bert",
        "in pretraining a BERT",
    ),
    # Of fine-tuning, reinforcement learning, inference, hybrid models, vision and retrieval.
    (
        "--logits-load- --sft- --rl- --no-rl- --grpo- --langrl- --refit- --inprocess- --inference- --no-inference- "
        "--flash-decode --num-speculative-tokens --enable-chunked-prefill --max-tokens-to-oom "
        "--use-legacy-static-engine "
        "--mlp-chunks-for-prefill --nccl-all-reduce-for-prefill --decode-only-cuda-graphs --output-bert-embeddings "
        "--bert-embedder-type --bert-load --mamba- --disable-mamba- --is-hybrid-model --max-seqlen-per-dp-cp-rank "
        "--vision- --dino- --swin- --img- --patch-dim --num-classes --num-channels --classes-fraction "
        "--data-per-class-fraction --mask-type --mask-factor --iter-per-epoch --head-lr-mult --ict- --biencoder- "
        "--titles-data-path --query-in-block-prob --use-one-sent-docs --evidence-data-path --retriever- "
        "--block-data-path --embedding-path --indexer- --adlr-",
        _never,
        "in pretraining",
    ),
    # Read nowhere.
    (
        "--use-flash-attn --openai-gelu --onnx-safe --apply-residual-connection-post-layernorm --decoder-num-layers "
        "--exit-signal-handler-for-dataloader --fp16-lm-cross-entropy --dist-ckpt-save-pre-mcore-014 --sample-rate",
        _never,
        "in Megatron 0.19",
    ),
)


def idle_flag(args: argparse.Namespace, argv: list[str]) -> str | None:
    """One line naming the first typed flag that the run would ignore, or None."""
    typed = [word.split("=")[0] for word in argv if word.startswith("--")]
    for names, read, when in IDLE:
        for name in names.split():
            for flag in typed:
                named = flag.startswith(name) if name.endswith("-") else flag == name
                if named and not read(args):
                    return f"{flag} has no effect {when}: leave it out"
    return None
