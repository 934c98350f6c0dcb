"""Mistakes on the command line that Megatron finds late, explains badly, or does not find at all.

Invariant: a check reads the arguments and looks at files, changes nothing, and answers one line that names the
flag and says what to do, or None. `MISTAKES` holds the checks in the order in which they are made.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_2bw.checkpoints import folder as saved
from megatron_2bw.data import indexed
from megatron_2bw.schedules import schedule_of

Args = argparse.Namespace


def value(args: Args, flag: str):
    """What the arguments hold for `flag`; None if Megatron has removed it while it validated them."""
    return getattr(args, flag.removeprefix("--").replace("-", "_"), None)


def task(args: Args) -> str | None:
    """ "gpt" or "bert"; None in a source checkout, whose entry scripts are Megatron's own."""
    return value(args, "--task")


def default_tokenizer(task: str | None) -> str:
    """Megatron's --tokenizer-type for a task, if none is given."""
    return "BertWordPieceLowerCase" if task == "bert" else "GPT2BPETokenizer"


def _missing(args: Args) -> str | None:
    for flag in (
        "--micro-batch-size",
        "--lr",
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--seq-length",
        "--max-position-embeddings",
    ):
        if value(args, flag) is None:
            return f"{flag} is missing"
    if args.train_iters is None and args.train_samples is None:
        return "--train-iters is missing (or --train-samples)"
    if args.eval_interval is None and not (args.skip_train or args.full_validation):
        return "--eval-interval is missing (Megatron divides by it, even with --eval-iters 0)"
    return None


# The first flag does nothing, or fails late, without the second.
_NEEDS = (
    ("--save", "--save-interval"),
    ("--save-params-interval", "--save"),
    ("--save-wgrads-interval", "--save"),
    ("--save-activations-interval", "--save"),
    ("--save-dgrads-interval", "--save"),
    ("--log-progress", "--save"),
    ("--save-retain-interval", "--save"),
    ("--exit-on-missing-checkpoint", "--load"),
    ("--use-mp-args-from-checkpoint-args", "--use-checkpoint-args"),
    ("--async-save", "--use-persistent-ckpt-worker"),
    ("--use-pytorch-profiler", "--profile"),
    ("--use-pytorch-profiler", "--tensorboard-dir"),
    ("--multiple-validation-sets", "--full-validation"),
    ("--full-validation", "--multiple-validation-sets"),
    ("--validation-set-names", "--multiple-validation-sets"),
    ("--sharp-enabled-group", "--use-sharp"),
    ("--phase-transition-iterations", "--train-samples"),
    ("--dataloader-fast-cache-load", "--data-cache-path"),
    ("--dataloader-defer-npy-index-mmap", "--data-cache-path"),
)


def _incomplete(args: Args) -> str | None:
    for flag, needed in _NEEDS:
        if value(args, flag) and not value(args, needed):
            return f"{flag} needs {needed}: add it, or leave {flag} out"
    if args.wandb_project and not (args.wandb_save_dir or args.save):
        return "--wandb-project needs --wandb-save-dir (or --save)"
    if args.num_query_groups != 1 and not args.group_query_attention:
        return f"--num-query-groups {args.num_query_groups} needs --group-query-attention"
    if not args.perform_initialization and not args.load:
        return "--no-initialization needs --load: the weights would be whatever the memory held"
    if args.padded_vocab_size is None and not args.pad_vocab_size:
        return "--no-pad-vocab-size needs --padded-vocab-size"
    if args.num_distributed_optimizer_instances != 1 and not args.use_distributed_optimizer:
        return "--num-distributed-optimizer-instances needs --use-distributed-optimizer: leave it out"
    return None


_POSITIVE = (
    "--num-layers",
    "--hidden-size",
    "--ffn-hidden-size",
    "--num-attention-heads",
    "--num-query-groups",
    "--kv-channels",
    "--seq-length",
    "--max-position-embeddings",
    "--vocab-size",
    "--make-vocab-size-divisible-by",
    "--micro-batch-size",
    "--global-batch-size",
    "--eval-micro-batch-size",
    "--eval-global-batch-size",
    "--train-iters",
    "--train-samples",
    "--pipeline-model-parallel-size",
    "--tensor-model-parallel-size",
    "--context-parallel-size",
    "--lr",
    "--lr-decay-iters",
    "--lr-decay-samples",
    "--log-interval",
    "--tensorboard-log-interval",
    "--eval-interval",
    "--save-interval",
    "--exit-interval",
    "--recompute-num-layers",
    "--loss-scale",
    "--initial-loss-scale",
    "--distributed-timeout-minutes",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
)
_NOT_NEGATIVE = (
    "--min-lr",
    "--weight-decay",
    "--clip-grad",
    "--eval-iters",
    "--num-workers",
    "--lr-warmup-iters",
    "--lr-warmup-samples",
    "--seed",
    "--adam-eps",
)
_FRACTIONS = (
    "--hidden-dropout",
    "--attention-dropout",
    "--adam-beta1",
    "--adam-beta2",
    "--sgd-momentum",
    "--lr-warmup-fraction",
)


def _out_of_range(args: Args) -> str | None:
    for flags, fits, rule in (
        (_POSITIVE, lambda x: x > 0, "it must be greater than 0"),
        (_NOT_NEGATIVE, lambda x: x >= 0, "it must not be negative"),
        (_FRACTIONS, lambda x: 0 <= x < 1, "it must be at least 0 and less than 1"),
        (("--mask-prob",), lambda x: 0 < x < 1, "it must be greater than 0 and less than 1"),
        (("--short-seq-prob",), lambda x: 0 <= x <= 1, "it must be at least 0 and at most 1"),
    ):
        for flag in flags:
            number = value(args, flag)
            if isinstance(number, (int, float)) and not fits(number):
                return f"{flag} {number}: {rule}"
    return None


_EXCLUSIVE = (
    ("--fp16", "--bf16"),
    ("--train-iters", "--train-samples"),
    ("--mock-data", "--data-path"),
    ("--mock-data", "--data-args-path"),
    ("--mock-data", "--train-data-path"),
    ("--data-path", "--train-data-path"),
    ("--data-path", "--data-args-path"),
    ("--lr-warmup-fraction", "--lr-warmup-iters"),
    ("--lr-warmup-fraction", "--lr-warmup-samples"),
    ("--train-iters", "--lr-warmup-samples"),
    ("--train-iters", "--lr-decay-samples"),
    ("--train-samples", "--lr-warmup-iters"),
    ("--train-samples", "--lr-decay-iters"),
    ("--swiglu", "--squared-relu"),
    ("--swiglu", "--quick-geglu"),
)


def _contradiction(args: Args) -> str | None:
    for one, other in _EXCLUSIVE:
        if value(args, one) and value(args, other):
            return f"{one} and {other} exclude each other: give one of them"
    return None


def _processes(args: Args) -> str | None:
    sizes = [
        ("--pipeline-model-parallel-size", args.pipeline_model_parallel_size),
        ("--tensor-model-parallel-size", args.tensor_model_parallel_size),
        ("--context-parallel-size", args.context_parallel_size),
    ]
    needed = math.prod(size for _, size in sizes)
    if args.world_size % needed:
        product = " x ".join(f"{flag} {size}" for flag, size in sizes if size > 1)
        return (
            f"{product} needs a multiple of {needed} processes, but there are {args.world_size}: "
            "change the sizes, or the number of processes (torchrun --nproc-per-node)"
        )
    return _batches(args, pipelines=args.world_size // needed, undivided=needed == args.context_parallel_size)


def _batches(args: Args, pipelines: int, undivided: bool) -> str | None:
    replica = args.micro_batch_size * pipelines
    batch = args.global_batch_size or replica
    if args.train_samples and args.train_samples < batch:
        return f"--train-samples {args.train_samples} is less than one --global-batch-size {batch}"
    if batch % replica and not args.decrease_batch_size_if_needed:
        return (
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {args.micro_batch_size} "
            f"x {pipelines} pipelines: use a multiple of {replica}"
        )
    evaluated = args.eval_micro_batch_size or args.micro_batch_size
    if args.full_validation and not undivided and evaluated != 1:
        return "--full-validation takes one sample at a time: with several stages it needs --eval-micro-batch-size 1"
    if args.tensor_model_parallel_size > 1 and evaluated != args.micro_batch_size:
        return (
            f"--eval-micro-batch-size {evaluated} must equal --micro-batch-size {args.micro_batch_size} with tensor "
            "parallelism: leave it out"
        )
    return None


def _too_few_microbatches(args: Args) -> str | None:
    stages = args.pipeline_model_parallel_size
    schedule = schedule_of(args.pipeline_schedule, args.two_bw_gradient_slots, args.two_bw_extra_warmup)
    if schedule is None or len(args.two_bw_extra_warmup) not in (0, 1, stages - 1):
        return None
    pipelines = args.world_size // (stages * args.tensor_model_parallel_size * args.context_parallel_size)
    batch = args.global_batch_size or args.micro_batch_size * pipelines
    microbatches, needed = batch // (args.micro_batch_size * pipelines), schedule.min_microbatches(stages)
    if microbatches >= needed:
        return None
    if args.two_bw_extra_warmup:
        reason = f"with --two-bw-extra-warmup needs {needed}"
    else:
        reason = f"needs as many as there are stages, {needed}"
    return (
        f"--global-batch-size {batch} gives {microbatches} microbatch{'es' * (microbatches != 1)} on each of "
        f"{pipelines} pipeline{'s' * (pipelines != 1)}, but --pipeline-schedule {schedule.name} {reason}: use "
        f"--global-batch-size {needed * args.micro_batch_size * pipelines} or more"
    )


def _widths(args: Args) -> str | None:
    hidden, heads, tensor = args.hidden_size, args.num_attention_heads, args.tensor_model_parallel_size
    groups = args.num_query_groups if args.group_query_attention else heads
    if hidden % heads and args.kv_channels is None:
        return f"--num-attention-heads {heads} does not divide --hidden-size {hidden}"
    if heads % groups:
        return f"--num-query-groups {groups} does not divide --num-attention-heads {heads}"
    if heads % tensor:
        return f"--tensor-model-parallel-size {tensor} does not divide --num-attention-heads {heads}"
    if args.window_size is not None and len(args.window_size) != 2:
        return "--window-size takes two numbers, such as 128,0"
    if args.padded_vocab_size is not None and args.padded_vocab_size < (args.vocab_size or 0):
        return f"--padded-vocab-size {args.padded_vocab_size} is less than --vocab-size {args.vocab_size}"
    if args.seq_length > args.max_position_embeddings:
        return f"--seq-length {args.seq_length} is more than --max-position-embeddings {args.max_position_embeddings}"
    return None


def _split_of_layers(args: Args) -> str | None:
    if args.pipeline_model_parallel_layout:
        return None
    flags = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
    own = {flag: value(args, flag) for flag in flags if value(args, flag) is not None}
    extra = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    layers, stages = args.num_layers + extra - sum(own.values()), args.pipeline_model_parallel_size - len(own)
    if layers == 0 if stages == 0 else layers >= stages > 0 and layers % stages == 0:
        return None
    if own:
        given = " and ".join(f"{flag} {number}" for flag, number in own.items())
        return f"{given}: {stages} other stages cannot share the other {layers} of --num-layers {args.num_layers}"
    return (
        f"--num-layers {args.num_layers} cannot be split over --pipeline-model-parallel-size {stages}: use a multiple, "
        "or --decoder-first-pipeline-num-layers for an uneven split"
    )


def _recompute(args: Args) -> str | None:
    if args.recompute_granularity == "full" and args.recompute_method is None:
        return "--recompute-granularity full needs --recompute-method uniform (or block)"
    if args.recompute_method is not None and args.recompute_granularity != "full":
        return f"--recompute-method {args.recompute_method} needs --recompute-granularity full"
    if args.recompute_method is not None and not args.recompute_num_layers:
        return f"--recompute-method {args.recompute_method} needs --recompute-num-layers"
    return None


def _learning_rate(args: Args) -> str | None:
    unit = "iters" if args.train_iters else "samples"
    decay = value(args, f"--lr-decay-{unit}") or value(args, f"--train-{unit}")
    warmup = value(args, f"--lr-warmup-{unit}")
    if args.min_lr > args.lr:
        return f"--min-lr {args.min_lr} is more than --lr {args.lr}"
    if args.lr_warmup_init > args.lr:
        return f"--lr-warmup-init {args.lr_warmup_init} is more than --lr {args.lr}"
    if warmup and warmup >= decay and not args.skip_train:
        return f"--lr-warmup-{unit} {warmup} must be less than --lr-decay-{unit} {decay} (if not given, --train-{unit})"
    if args.lr_decay_style == "WSD" and value(args, f"--lr-wsd-decay-{unit}") is None:
        return f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}"
    return None


def _data(args: Args) -> str | None:
    lists = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
    files = ("--data-args-path", "--per-split-data-args-path")
    if not args.mock_data and not any(value(args, flag) for flag in (*lists, *files)):
        return "--data-path is missing (or --mock-data)"
    blends = [(flag, value(args, flag) or []) for flag in lists]
    if args.data_args_path:
        blends.append((f"--data-args-path {args.data_args_path}:", Path(args.data_args_path).read_text().split()))
    for flag, blend in blends:
        for prefix in _prefixes(blend):
            fault = None if "://" in prefix else indexed.fault(prefix)
            if fault:
                return f"{flag} {prefix}: {fault}"
    return None


def _prefixes(blend: list[str]) -> Iterator[str]:
    """The datasets of a blend: "prefix prefix ..." or "weight prefix weight prefix ..."."""
    weighted = len(blend) % 2 == 0 and all(_is_number(word) for word in blend[::2])
    return iter(blend[1::2] if weighted else blend)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _split(args: Args) -> str | None:
    if args.split is None:
        return None
    shares = args.split.replace("/", ",").split(",")
    if len(shares) > 3 or not all(_is_number(share) and float(share) >= 0 for share in shares):
        return f"--split {args.split}: give three shares for training, validation and test, such as 98,1,1"
    if not float(shares[0]) and not args.skip_train:
        return f"--split {args.split} leaves nothing to train on: the first share must be greater than 0"
    return None


def _empty_share(args: Args) -> str | None:
    """Megatron deals whole sequences (BERT: documents) to the shares, and looks for ever for one of an empty share."""
    shares = [float(share) for share in (args.split or "969,30,1").replace("/", ",").split(",")]
    shares += [0.0] * (3 - len(shares))
    if args.mock_data:
        return None
    bert = task(args) == "bert"
    for prefix in _prefixes(args.data_path or []):
        if "://" in prefix:
            continue
        documents = indexed.documents(prefix) if bert else indexed.sequences(prefix)
        edges = [round(sum(shares[:k]) / sum(shares) * documents) for k in range(4)]
        for name, share, start, end in zip(("training", "validation", "test"), shares, edges, edges[1:]):
            if share and start == end:
                return (
                    f"--split {args.split or '969,30,1'} leaves no document of --data-path {prefix} for {name}, it has "
                    f"{documents}: give that share 0 or more"
                )
            fault = _no_samples(args, prefix, start, end) if share and bert else None
            if fault:
                return f"--data-path {prefix} has no document for {name} {fault}"
    return None


def _no_samples(args: Args, prefix: str, start: int, end: int) -> str | None:
    """Why a BERT finds nothing in documents `start` to `end`, or None."""
    sentences = 2 if args.bert_binary_head else 1
    if indexed.has_samples(prefix, start, end, sentences):
        return None
    return (
        f"of {sentences} sentence{'s' * (sentences > 1)} or more, each of {indexed.LONGEST_SENTENCE} tokens or fewer: "
        "prepare it with scripts/preprocess_data.py for BERT" + ", or add --bert-no-binary-head" * (sentences > 1)
    )


_TOKENIZER_PACKAGES = {
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
}


def _tokenizer(args: Args) -> str | None:
    kind = args.tokenizer_type or default_tokenizer(task(args))
    package = _TOKENIZER_PACKAGES.get(kind)
    if package and not _installed(package):
        return f"--tokenizer-type {kind} needs the package {package}, which is not installed"
    if kind.startswith("Null") and args.vocab_size is None:
        return f"--tokenizer-type {kind} needs --vocab-size"
    if kind.startswith("Null") and task(args) == "bert" and not args.mock_data:
        return f"--tokenizer-type {kind} has no words to mask: give the WordPiece tokenizer of --data-path"
    if kind.startswith("GPT2BPE") and not (args.vocab_file and args.merge_file) and not args.tokenizer_model:
        return f"--tokenizer-type {kind} needs --vocab-file and --merge-file"
    if kind.startswith("BertWordPiece") and not args.vocab_file:
        return f"--tokenizer-type {kind} needs --vocab-file"
    if (package or kind == "HuggingFaceTokenizer") and not args.tokenizer_model:
        return f"--tokenizer-type {kind} needs --tokenizer-model"
    for flag in ("--vocab-file", "--merge-file", "--tokenizer-model"):
        path = value(args, flag)
        # A tokenizer's model may be a name on a hub; a vocabulary is a file.
        if path and not Path(path).exists():
            if flag != "--tokenizer-model" or package or path.startswith(("/", ".")):
                return f"{flag} {path}: there is no such file or folder"
            fault = _fault_of_hub(path)
            if fault:
                return f"{flag} {path}: there is no such folder, and the hub says: {fault}"
    return _merges(args) if kind.startswith("GPT2BPE") and args.vocab_file and args.merge_file else None


def _merges(args: Args) -> str | None:
    """The files of a byte-pair encoding: a vocabulary in JSON, and merges that make tokens of it."""
    try:
        tokens = json.loads(Path(args.vocab_file).read_text("utf-8"))
    except ValueError:
        tokens = None
    if not isinstance(tokens, dict) or not tokens:
        return f"--vocab-file {args.vocab_file}: it is no vocabulary, JSON of the form {{token: number}}"
    lines = Path(args.merge_file).read_text("utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):  # Megatron leaves the first out, whatever it is
        parts = line.split(" ")
        if line and number > 1 and (len(parts) != 2 or "".join(parts) not in tokens):
            return (
                f"--merge-file {args.merge_file} does not fit --vocab-file {args.vocab_file}: line {number}, "
                f"{line[:40]!r}, makes no token of it"
            )
    return None


def _fault_of_hub(model: str) -> str | None:
    """Why the Hugging Face hub does not give `model`, asked once: the tokenizer's own attempts take a minute."""
    import huggingface_hub

    try:
        if huggingface_hub.try_to_load_from_cache(model, "tokenizer_config.json") is None:
            huggingface_hub.HfApi().model_info(model, timeout=10)
    except Exception as error:  # of the package's own kinds, of its client's, or of the system
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None


# What the flag asks for is in a package that may not be there; Megatron would warn at most, or fail on one rank.
_PACKAGES: tuple[tuple[str, str], ...] = (
    ("--tensorboard-dir", "tensorboard"),
    ("--wandb-project", "wandb"),
    ("--log-energy", "pynvml"),
    ("--enable-ft-package", "nvidia_resiliency_ext"),
    ("--enable-msc", "multistorageclient"),
    ("--run-workload-inspector-server", "workload_inspector"),
    ("--fault-injector-ranks", "nvidia_resiliency_ext"),
    ("--fault-injector-num-ranks", "nvidia_resiliency_ext"),
)


def _packages(args: Args) -> str | None:
    for flag, package in _PACKAGES:
        if value(args, flag) and not _installed(package):
            how = f"pip install {package}" if package in ("tensorboard", "wandb") else "install it"
            return f"{flag} needs the package {package}, which is not installed: {how}, or leave {flag} out"
    if args.async_save and args.async_strategy == "nvrx" and not _installed("nvidia_resiliency_ext"):
        return "--async-save needs the package nvidia_resiliency_ext, not installed here: use --async-strategy mcore"
    if args.optimizer not in ("adam", "sgd") and not _installed("emerging_optimizers"):
        return (
            f"--optimizer {args.optimizer} needs the package emerging_optimizers, which is not installed: "
            "pip install emerging-optimizers, or use adam"
        )
    if args.transformer_impl == "transformer_engine" and not _installed("transformer_engine"):
        return (
            "--transformer-impl transformer_engine (Megatron's default) needs Transformer Engine, which is not "
            "installed: use --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
            "--no-masked-softmax-fusion"
        )
    return None


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _paths(args: Args) -> str | None:
    for flag in (
        "--data-args-path",
        "--per-split-data-args-path",
        "--per-dataset-sequences-path",
        "--te-precision-config-file",
        "--heterogeneous-layers-config-path",
        "--nccl-communicator-config-path",
        "--tp-comm-overlap-cfg",
    ):
        if value(args, flag) and not Path(value(args, flag)).is_file():
            return f"{flag} {value(args, flag)}: there is no such file"
    for flag in ("--load", "--pretrained-checkpoint"):
        path = value(args, flag)
        # A job script that names one folder to load from and to save to starts from nothing the first time.
        saved_there = args.save and path and os.path.abspath(path) == os.path.abspath(args.save)
        if not path or "://" in path or (saved_there and not args.exit_on_missing_checkpoint):
            continue
        if not Path(path, saved.TRACKER).is_file() and args.ckpt_step is None:
            return f"{flag} {path}: there is no checkpoint (no file {saved.TRACKER})"
    for flag in ("--save", "--tensorboard-dir", "--wandb-save-dir", "--data-cache-path", "--two-bw-trace"):
        path = value(args, flag)
        if not path or "://" in str(path):
            continue
        parent = Path(path).absolute()
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            return f"{flag} {path}: {parent} is not a folder that can be written to"
    return None


def checkpoint(args: Args) -> str | None:
    """The first rank looks at the files of the checkpoint that will be loaded; for all to do so could take long."""
    optimizer = args.use_distributed_optimizer and not (args.finetune or args.no_load_optim)
    if args.load and args.ckpt_step and args.ckpt_format == "torch" and optimizer:
        return (
            "--ckpt-step does not work with --ckpt-format torch and --use-distributed-optimizer: Megatron 0.19 would "
            f"load the latest optimizer state; write the iteration into {saved.TRACKER} instead"
        )
    own = args.load and Path(args.load, saved.TRACKER).is_file()
    flag = "--load" if own or not args.pretrained_checkpoint else "--pretrained-checkpoint"  # Megatron's choice
    path = value(args, flag)
    there = path and "://" not in path and (args.ckpt_step or Path(path, saved.TRACKER).is_file())
    if there and os.environ.get("RANK", "0") == "0":
        fault = saved.fault(path, args.ckpt_step, saved.same(path, args.save), args.ckpt_format)
        return fault and f"{flag} {path}: {fault}"
    return None


def _spec(args: Args) -> str | None:
    if not args.spec:
        return None
    if len(args.spec) != 2:
        return f"--spec {' '.join(args.spec)}: give a module and the name of a layer specification in it"
    try:
        getattr(importlib.import_module(args.spec[0]), args.spec[1])
    except (ImportError, AttributeError) as error:  # Megatron would go on with its default
        return f"--spec {' '.join(args.spec)}: {error}"
    return None


def _own_flags(args: Args) -> str | None:
    if args.two_bw_exchange == "nccl" and args.distributed_backend == "gloo":
        return "--two-bw-exchange nccl needs --distributed-backend nccl"
    if args.pipeline_schedule == "megatron":
        for flag, default in (("--two-bw-exchange", "auto"), ("--two-bw-trace", None)):
            if value(args, flag) != default:
                return f"{flag} has no effect with --pipeline-schedule megatron: leave it out"
    if args.pipeline_schedule != "2bw":
        for flag, default in (
            ("--two-bw-gradient-slots", 2),
            ("--two-bw-sync-iterations", 0),
            ("--two-bw-correction", "none"),
        ):
            if value(args, flag) != default:
                return f"{flag} has no effect without --pipeline-schedule 2bw: leave it out"
    factor = args.two_bw_correction_factor
    if factor != 1 and args.two_bw_correction != "extrapolate":
        return "--two-bw-correction-factor has no effect without --two-bw-correction extrapolate: leave it out"
    if not 0 <= factor <= 1:
        return f"--two-bw-correction-factor {factor} must be between 0 and 1"
    if args.two_bw_correction == "extrapolate" and args.two_bw_sync_iterations >= (args.train_iters or math.inf):
        return (
            f"--two-bw-correction extrapolate has no effect: --two-bw-sync-iterations {args.two_bw_sync_iterations} is "
            f"not below --train-iters {args.train_iters}"
        )
    extra, boundaries = args.two_bw_extra_warmup, args.pipeline_model_parallel_size - 1
    if extra and (args.pipeline_schedule != "2bw" or not boundaries):
        return "--two-bw-extra-warmup has no effect without --pipeline-schedule 2bw and several stages: leave it out"
    if len(extra) not in (0, 1, boundaries):
        return (
            f"--two-bw-extra-warmup has {len(extra)} numbers: give one, or one for each of the {boundaries} boundaries "
            "between stages"
        )
    exchange = args.distributed_backend if args.two_bw_exchange == "auto" else args.two_bw_exchange
    if max(extra, default=0) > 1 and args.timing_log_level >= 2 and exchange == "nccl":
        # The timers wait for the GPU, so receives are posted when they are asked for; then stages wait for each other.
        return "--two-bw-extra-warmup of 2 or more does not work with --timing-log-level 2 on NCCL: use level 1 or 0"
    return None


MISTAKES: tuple[Callable[[Args], str | None], ...] = (
    _missing,
    _out_of_range,
    _contradiction,
    _incomplete,
    _processes,
    _too_few_microbatches,
    _widths,
    _split_of_layers,
    _recompute,
    _learning_rate,
    _paths,
    checkpoint,
    _data,
    _split,
    _empty_share,
    _tokenizer,
    _packages,
    _spec,
    _own_flags,
)
