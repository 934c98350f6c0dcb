"""Real command lines, checked without ranks: what the tests of the flags share."""

import argparse
import functools
import os
import struct
import tempfile
from pathlib import Path
from unittest import mock

from megatron_2bw.mcore import cpu
from megatron_2bw.run.flags import quick_check
from megatron_2bw.run.flags.parse import check, parse_early, prepare
from tests.distributed.training import BERT

UNTIED = "--untie-embeddings-and-output-weights"


class Stopped(Exception):
    """What `stop` raises here instead of ending the process."""


def stop(message: str):
    raise Stopped(message)


@functools.cache
def parser_of(schedule: str, task: str) -> argparse.ArgumentParser:
    from megatron.core.extensions import kitchen
    from megatron.training.arguments import add_megatron_arguments

    with mock.patch.object(kitchen, "HAVE_KITCHEN", True):  # it brings flags
        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, XDG_CACHE_HOME=folder),
    ):
        quick_check.table.cache_clear()
        quick_check.remember(parser)
        quick_check.table.cache_clear()
        assert quick_check.table()
    return prepare(
        parser, parse_early(["--pipeline-schedule", schedule], stop, task), stop
    )


def parse(argv: list[str], world: int) -> argparse.Namespace:
    """`argv` may begin with the name of BERT's script."""
    schedule = argv[argv.index("--pipeline-schedule") + 1]
    bert = argv[0] == BERT
    args = parser_of(schedule, "bert" if bert else "gpt").parse_args(argv[bert:])
    args.world_size = world
    return args


def complaint(argv: list[str], world: int) -> str | None:
    """What the checks say to a command line for `world` processes; None if they accept
    it.

    The check before torch is imported must answer the same line, or none where the rule
    needs more than it has.
    """
    line = None
    try:
        check(parse(argv, world), stop)
    except Stopped as stopped:
        line = str(stopped)
    if "cpu" in argv and cpu.installed():
        bert = argv[0] == BERT
        found = quick_check.mistake(argv[bert:], "bert" if bert else "gpt", world)
        assert found in (None, line), (
            f"the check before the imports answers something else: {found}, {line}"
        )
    return line


def dataset(prefix: Path, lengths: tuple[int, ...] = (5, 7, 3)) -> Path:
    """A dataset of Megatron's, of int32, one document a sequence: what the checks look
    at, written from its description."""
    count = len(lengths)
    starts = [4 * sum(lengths[:number]) for number in range(count)]
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, count, count + 1)
    index += struct.pack(f"<{count}i{count}q", *lengths, *starts)
    index += struct.pack(f"<{count + 1}q", *range(count + 1))
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(bytes(4 * sum(lengths)))
    return prefix
