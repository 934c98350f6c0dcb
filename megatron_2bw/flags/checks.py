"""Mistakes on the command line that need code to find: in files, paths, the data, the tokenizer.

Invariant: a check reads the arguments and looks at files, changes nothing, and answers one line that names the
flag and says what to do, or None. `CHECKS` holds all rules in the order in which they are looked at; a later one may
rely on what an earlier one has found to be right.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_2bw import sizes
from megatron_2bw.checkpoints.folder import TRACKER, problem, same_folder, source
from megatron_2bw.data import indexed
from megatron_2bw.errors import UserError
from megatron_2bw.files import read_yaml
from megatron_2bw.flags.combinations import EXCLUSIVE, MISSING, NEEDS, PACKAGES, RANGES, RECOMPUTE
from megatron_2bw.flags.rule import Args, Rule, installed, line, task, value
from megatron_2bw.schedules import SCHEDULES

OLDEST_TORCH = "2.8"  # pyproject.toml says why


def torch_version(args: Args | None = None) -> str | None:
    """torch must be as new as the oldest that was tested. pip checks that too, but not with --no-deps."""
    import torch

    found, oldest = (tuple(map(int, version.split(".")[:2])) for version in (torch.__version__, OLDEST_TORCH))
    if found < oldest:
        return f"torch {torch.__version__} is too old: install torch {OLDEST_TORCH} or newer"
    return None


def transformer_engine(args: Args) -> str | None:
    """On a GPU --transformer-impl transformer_engine, Megatron's default, needs the package."""
    from megatron_2bw import cpu  # it imports torch

    if args.transformer_impl != "transformer_engine" or cpu.installed() or installed("transformer_engine"):
        return None
    return (
        "--transformer-impl transformer_engine (Megatron's default) needs Transformer Engine, which is not installed: "
        "use --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
        "--no-masked-softmax-fusion --no-rope-fusion"
    )


def default_tokenizer(task: str | None) -> str:
    """Megatron's --tokenizer-type for a task, if none is given."""
    return "BertWordPieceLowerCase" if task == "bert" else "GPT2BPETokenizer"


def learning_rate(args: Args) -> str | None:
    """--lr-warmup-iters must be less than --lr-decay-iters, and --lr-decay-style WSD needs --lr-wsd-decay-iters; with
    --train-samples likewise in samples."""
    unit = "iters" if args.train_iters else "samples"
    decay = value(args, f"--lr-decay-{unit}") or value(args, f"--train-{unit}")
    warmup = value(args, f"--lr-warmup-{unit}")
    if warmup and warmup >= decay and not args.skip_train:
        return f"--lr-warmup-{unit} {warmup} must be less than --lr-decay-{unit} {decay} (if not given, --train-{unit})"
    if args.lr_decay_style == "WSD" and value(args, f"--lr-wsd-decay-{unit}") is None:
        return f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}"
    return None


def data(args: Args) -> str | None:
    """--data-path or --mock-data must be given, and the files of each dataset must be whole and fit together."""
    files = ("--data-args-path", "--per-split-data-args-path")
    ours = task(args) is not None  # an entry script of the user's own may have datasets without flags
    if ours and not args.mock_data and not any(value(args, flag) for flag in (*_DATA, *files)):
        return "--data-path is missing (or --mock-data)"
    for flag, prefix in datasets(args):
        try:
            fault = indexed.fault(prefix)
        except OSError as error:  # a name that is too long
            fault = error.strerror
        if fault:
            return f"{flag} {prefix}: {fault}"
        if ours and indexed.has_prompts(prefix) != args.sft_data:
            wrong = "no conversations" if args.sft_data else "conversations"
            remedy = "prepare it with scripts/preprocess_data.py --task sft, or leave --sft-data out"
            return f"{flag} {prefix}: it holds {wrong}: {remedy if args.sft_data else 'train a GPT with --sft-data'}"
    return None


_DATA = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")


def datasets(args: Args) -> Iterator[tuple[str, str]]:
    """The flag and the prefix of each dataset in this file system."""
    blends = [(flag, value(args, flag) or []) for flag in _DATA]
    if args.data_args_path:
        blends.append((f"--data-args-path {args.data_args_path}:", Path(args.data_args_path).read_text().split()))
    for flag, blend in blends:
        yield from ((flag, prefix) for prefix in _prefixes(blend) if "://" not in prefix)


def _prefixes(blend: list[str]) -> Iterator[str]:
    """The datasets of a blend: "prefix prefix ..." or "weight prefix weight prefix ..."."""
    weighted = len(blend) % 2 == 0 and all(_is_number(word) for word in blend[::2])
    return iter(blend[1::2] if weighted else blend)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def shares(args: Args) -> str | None:
    """--split must be up to three shares, the first greater than 0."""
    if args.split is None:
        return None
    shares = args.split.replace("/", ",").split(",")
    if len(shares) > 3 or not all(_is_number(share) and float(share) >= 0 for share in shares):
        return f"--split {args.split}: give three shares for training, validation and test, such as 98,1,1"
    if not 0 < sum(map(float, shares)) < math.inf:
        return f"--split {args.split}: the shares must have a sum above 0"
    if not float(shares[0]) and not args.skip_train:
        return f"--split {args.split} leaves nothing to train on: the first share must be greater than 0"
    return None


def empty_share(args: Args) -> str | None:
    """Each share of --split above 0 must hold a document that Megatron can read.

    Megatron deals whole sequences (BERT: documents) to the shares, and looks for ever for one of an empty share.
    """
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


_SENTENCE_PIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_TOKENIZER_PACKAGES = dict.fromkeys(_SENTENCE_PIECE, "sentencepiece") | {"TikTokenizer": "tiktoken"}


def tokenizer(args: Args) -> str | None:
    """--tokenizer-type needs its package, --vocab-size or its files, which must be there and fit together."""
    kind = args.tokenizer_type or default_tokenizer(task(args))
    package = _TOKENIZER_PACKAGES.get(kind)
    if package and not installed(package):
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
        if path and not os.path.exists(path):
            if flag != "--tokenizer-model" or package or path.startswith(("/", ".")):
                return f"{flag} {path}: there is no such file or folder"
    return _merges(args) if kind.startswith("GPT2BPE") and args.vocab_file and args.merge_file else None


def hub(args: Args) -> str | None:
    """--tokenizer-model must be a folder, a file, or a name that the Hugging Face hub knows."""
    path = args.tokenizer_model
    fault = _fault_of_hub(path) if path and not os.path.exists(path) else None
    return fault and f"--tokenizer-model {path}: there is no such folder, and the hub says: {fault}"


def _merges(args: Args) -> str | None:
    """The files of a byte-pair encoding: a vocabulary in JSON, and merges that make tokens of it."""
    try:
        tokens = json.loads(Path(args.vocab_file).read_text("utf-8"))
    except ValueError:
        tokens = None
    if not isinstance(tokens, dict) or not tokens:
        return f"--vocab-file {args.vocab_file}: it is no vocabulary, JSON of the form {{token: number}}"
    lines = Path(args.merge_file).read_text("utf-8", errors="replace").splitlines()
    for number, text in enumerate(lines, 1):  # Megatron leaves the first out without a look at it
        parts = text.split(" ")
        if text and number > 1 and (len(parts) != 2 or "".join(parts) not in tokens):
            return (
                f"--merge-file {args.merge_file} does not fit --vocab-file {args.vocab_file}: line {number}, "
                f"{text[:40]!r}, makes no token of it"
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


_FILES = (
    "--data-args-path --per-split-data-args-path --per-dataset-sequences-path --te-precision-config-file "
    "--heterogeneous-layers-config-path --nccl-communicator-config-path --tp-comm-overlap-cfg"
)
_FOLDERS = "--save --tensorboard-dir --wandb-save-dir --data-cache-path --two-bw-trace"


def paths(args: Args) -> str | None:
    """A file to read must be there; --load must hold a checkpoint; a folder like that of --save must be writable."""
    for flag in _FILES.split():
        if value(args, flag) and not os.path.isfile(value(args, flag)):
            return f"{flag} {value(args, flag)}: there is no such file"
    for flag in ("--load", "--pretrained-checkpoint"):
        path = value(args, flag)
        # A job script that names one folder to load from and to save to starts from nothing the first time.
        saved_there = args.save and path and os.path.abspath(path) == os.path.abspath(args.save)
        if not path or "://" in path or (saved_there and not args.exit_on_missing_checkpoint):
            continue
        if not os.path.isfile(Path(path, TRACKER)) and args.ckpt_step is None:
            return f"{flag} {path}: there is no checkpoint (no file {TRACKER})"
    for flag in _FOLDERS.split():
        path = value(args, flag)
        if not path or "://" in str(path):
            continue
        folder = Path(path).absolute()
        try:
            parent = next(each for each in (folder, *folder.parents) if each.exists())
        except OSError as error:  # a name that is too long
            return f"{flag} {path}: {error.strerror}"
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            return f"{flag} {path}: {parent} is not a folder that can be written to"
    return None


def checkpoint(args: Args) -> str | None:
    """The checkpoint of --load must be whole.

    The first rank looks at its files; for all to do so could take long.
    """
    optimizer = args.use_distributed_optimizer and not (args.finetune or args.no_load_optim)
    if args.load and args.ckpt_step and args.ckpt_format == "torch" and optimizer:
        return (
            "--ckpt-step does not work with --ckpt-format torch and --use-distributed-optimizer: Megatron 0.19 would "
            f"load the latest optimizer state; write the iteration into {TRACKER} instead"
        )
    flag, path = source(args)
    there = path and "://" not in path and (args.ckpt_step or os.path.isfile(Path(path, TRACKER)))
    if there and os.environ.get("RANK", "0") == "0":
        fault = problem(path, args.ckpt_step, same_folder(path, args.save), args.ckpt_format)
        return fault and f"{flag} {path}: {fault}"
    return None


def communicators(args: Args) -> str | None:
    """--nccl-communicator-config-path and --high-priority-stream-groups must not name pp with this project's schedules,
    nor dp_cp, embd or pos_embd with 2bw, which have process groups of their own for these."""
    schedule = SCHEDULES.get(args.pipeline_schedule)
    if schedule is None:
        return None
    own = {"pp", "dp_cp", "embd", "pos_embd"} if schedule.late_step else {"pp"}
    path = args.nccl_communicator_config_path
    try:
        settings = read_yaml(path) if path else None
    except UserError as error:
        return f"--nccl-communicator-config-path {error}"
    for flag, groups in (
        ("--nccl-communicator-config-path", settings),
        ("--high-priority-stream-groups", args.high_priority_stream_groups),
    ):
        for name in sorted(own.intersection(groups or ())):
            return (
                f"{flag} does not reach the traffic of {name} with --pipeline-schedule {schedule.name}, which has "
                f"process groups of its own for it: take {name} out"
            )
    return None


def spec(args: Args) -> str | None:
    """--spec must be a module and the name of a layer specification in it."""
    if not args.spec:
        return None
    if len(args.spec) != 2:
        return f"--spec {' '.join(args.spec)}: give a module and the name of a layer specification in it"
    try:
        getattr(importlib.import_module(args.spec[0]), args.spec[1])
    except (ImportError, AttributeError) as error:  # Megatron would continue with its default
        return f"--spec {' '.join(args.spec)}: {error}"
    return None


CHECKS: tuple[Rule | Callable[[Args], str | None], ...] = (
    *MISSING,
    *RANGES,
    *EXCLUSIVE,
    *NEEDS,
    *sizes.RULES,
    *RECOMPUTE,
    line("--min-lr {given} is more than --lr {a.lr}", lambda a: a.min_lr > a.lr),
    line("--lr-warmup-init {given} is more than --lr {a.lr}", lambda a: a.lr_warmup_init > a.lr),
    line(
        "--seq-length {given} is too short for a pair of sentences: --mock-data of a BERT needs 5 or more",
        lambda a: task(a) == "bert" and a.mock_data and a.seq_length < 5,
    ),
    learning_rate,
    paths,
    checkpoint,
    data,
    shares,
    empty_share,
    tokenizer,
    hub,
    *PACKAGES,
    transformer_engine,
    spec,
    communicators,
)
