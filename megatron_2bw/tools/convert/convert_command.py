"""megatron-2bw convert: its command line, which is checked before torch is imported;
`work.py` converts."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from megatron_2bw.base.errors import Parser, usage_error, whole
from megatron_2bw.mcore.checkpoints.folder import TRACKER


def main(argv: Sequence[str], prog: str) -> int:
    options = _parser(prog).parse_args(argv)
    to_megatron = options.direction == "import"
    for folder in (options.source, options.like):
        if folder and not folder.is_dir():
            usage_error(prog, f"{folder}: there is no such folder")
    if to_megatron and (options.save / TRACKER).exists():
        usage_error(
            prog,
            f"--save {options.save}: it holds a checkpoint already: give another folder",
        )
    if not to_megatron and options.out.exists():
        usage_error(prog, f"--out {options.out}: it exists already: give another name")
    from megatron_2bw.tools.convert import work  # it imports torch

    return work.import_model(options) if to_megatron else work.export_model(options)


def _parser(prog: str) -> ArgumentParser:
    parser = Parser(
        prog,
        description="Models of Hugging Face in Megatron, and back.",
        allow_abbrev=False,
    )
    parser.set_defaults(like=None)
    directions = parser.add_subparsers(dest="direction", required=True)

    group = directions.add_parser(
        "import", help="HF_DIR --save CKPT", allow_abbrev=False
    )
    option = group.add_argument
    option(
        "source", type=Path, metavar="HF_DIR", help="with config.json and *.safetensors"
    )
    option(
        "--save",
        type=Path,
        required=True,
        metavar="CKPT",
        help="a folder without a checkpoint",
    )
    option(
        "--seq-length",
        type=whole(1),
        help="of the samples (default: the model's, at most 4096)",
    )
    option(
        "--make-vocab-size-divisible-by",
        type=whole(1),
        default=1,
        metavar="N",
        help="as Megatron's (default: 1)",
    )

    group = directions.add_parser(
        "export", help="CKPT --out HF_DIR", allow_abbrev=False
    )
    option = group.add_argument
    option(
        "source",
        type=Path,
        metavar="CKPT",
        help="a run's --save, or one checkpoint in it",
    )
    option(
        "--out",
        type=Path,
        required=True,
        metavar="HF_DIR",
        help="a folder that does not exist",
    )
    option(
        "--ckpt-step",
        type=whole(1),
        metavar="N",
        help="the iteration (default: the latest)",
    )
    option(
        "--like",
        type=Path,
        metavar="HF_DIR",
        help="take config.json and tokenizer from there",
    )
    option(
        "--merge",
        action="store_true",
        help="of adapters: the whole model with them (default: a folder of peft)",
    )
    return parser
