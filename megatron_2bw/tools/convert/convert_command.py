"""megatron-2bw convert: its command line (convert_command.yaml), which is checked
before torch is imported; `work.py` converts."""

from argparse import ArgumentParser
from collections.abc import Sequence

from megatron_2bw.base.command_line import add_options, table_of
from megatron_2bw.base.errors import Parser, usage_error
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
    description = "Models of Hugging Face in Megatron, and back."
    parser = Parser(prog, description=description, allow_abbrev=False)
    parser.set_defaults(like=None)
    directions = parser.add_subparsers(dest="direction", required=True)
    for name, content in table_of(__file__).items():
        group = directions.add_parser(name, help=content["help"], allow_abbrev=False)
        add_options(group, content["flags"])
    return parser
