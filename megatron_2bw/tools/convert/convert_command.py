"""megatron-2bw convert: its command line, which is checked before torch is imported;
`work.py` converts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_2bw.base.errors import Parser, usage_error, whole
from megatron_2bw.mcore.checkpoints.folder import TRACKER


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(
        prog=prog,
        description="Models of Hugging Face in Megatron, and back.",
        allow_abbrev=False,
    )
    directions = parser.add_subparsers(dest="direction", required=True)
    add = directions.add_parser(
        "import", help="HF_DIR --save CKPT", allow_abbrev=False
    ).add_argument
    add(
        "source", type=Path, metavar="HF_DIR", help="with config.json and *.safetensors"
    )
    add(
        "--save",
        type=Path,
        required=True,
        metavar="CKPT",
        help="a folder without a checkpoint",
    )
    add(
        "--seq-length",
        type=whole(1),
        help="of the samples (default: the model's, at most 4096)",
    )
    add(
        "--make-vocab-size-divisible-by",
        type=whole(1),
        default=1,
        metavar="N",
        help="as Megatron's (default: 1)",
    )
    add = directions.add_parser(
        "export", help="CKPT --out HF_DIR", allow_abbrev=False
    ).add_argument
    add(
        "source",
        type=Path,
        metavar="CKPT",
        help="a run's --save, or one checkpoint in it",
    )
    add(
        "--out",
        type=Path,
        required=True,
        metavar="HF_DIR",
        help="a folder that does not exist",
    )
    add(
        "--ckpt-step",
        type=whole(1),
        metavar="N",
        help="the iteration (default: the latest)",
    )
    add(
        "--like",
        type=Path,
        metavar="HF_DIR",
        help="take config.json and tokenizer from there",
    )
    add(
        "--merge",
        action="store_true",
        help="of adapters: the whole model with them (default: a folder of peft)",
    )
    options = parser.parse_args(argv)
    for folder in (options.source, getattr(options, "like", None)):
        if folder and not folder.is_dir():
            usage_error(prog, f"{folder}: there is no such folder")
    if options.direction == "import" and (options.save / TRACKER).exists():
        usage_error(
            prog,
            f"--save {options.save}: it holds a checkpoint already: give another folder",
        )
    if options.direction == "export" and options.out.exists():
        usage_error(prog, f"--out {options.out}: it exists already: give another name")
    from megatron_2bw.tools.convert import work  # it imports torch

    return (
        work.import_model(options)
        if options.direction == "import"
        else work.export_model(options)
    )
