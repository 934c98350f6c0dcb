"""megatron-2bw convert: its command line, which is checked before torch is imported; `work.py` converts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_2bw.checkpoints.folder import TRACKER
from megatron_2bw.errors import Parser, usage_error
from megatron_2bw.flags.own import whole


def main(argv: Sequence[str], prog: str) -> int:
    words = list(argv)
    if words and words[0] in DIRECTIONS:
        return DIRECTIONS[words[0]](words[1:], f"{prog} {words[0]}")
    if words and words[0] not in ("-h", "--help"):
        usage_error(prog, f"{words[0]}: give one of {', '.join(DIRECTIONS)}")
    print(f"usage: {prog} import HF_DIR --save CKPT | {prog} export CKPT --out HF_DIR  (each has --help)")
    return 0 if words else 2


def run_import(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="A Hugging Face folder as a checkpoint of Megatron.", allow_abbrev=False)
    parser.add_argument("source", type=Path, metavar="HF_DIR", help="with config.json and *.safetensors")
    parser.add_argument("--save", type=Path, required=True, metavar="CKPT", help="a folder without a checkpoint")
    parser.add_argument("--seq-length", type=whole(1), help="of the samples (default: the model's, at most 4096)")
    padding = "pad the vocabulary to a multiple of N, such as the tensor parallel size (default 1: no padding)"
    parser.add_argument("--make-vocab-size-divisible-by", type=whole(1), default=1, metavar="N", help=padding)
    options = parser.parse_args(argv)
    if not options.source.is_dir():
        usage_error(prog, f"{options.source}: there is no such folder; download the model there first")
    if (options.save / TRACKER).exists():
        usage_error(prog, f"--save {options.save}: it holds a checkpoint already: give another folder")
    from megatron_2bw.convert.work import import_model  # it imports torch

    return import_model(options, prog)


def run_export(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="A checkpoint of Megatron as a Hugging Face folder.", allow_abbrev=False)
    parser.add_argument("source", type=Path, metavar="CKPT", help="a run's --save, or one checkpoint in it")
    parser.add_argument("--out", type=Path, required=True, metavar="HF_DIR", help="a folder that does not exist")
    parser.add_argument("--ckpt-step", type=whole(1), metavar="N", help="the iteration (default: the latest)")
    parser.add_argument("--like", type=Path, metavar="HF_DIR", help="take config.json and tokenizer from there")
    options = parser.parse_args(argv)
    if not options.source.is_dir():
        usage_error(prog, f"{options.source}: there is no such folder")
    if options.out.exists():
        usage_error(prog, f"--out {options.out}: it exists already: give another name")
    from megatron_2bw.convert.work import export_model  # it imports torch

    return export_model(options, prog)


DIRECTIONS = {"import": run_import, "export": run_export}
