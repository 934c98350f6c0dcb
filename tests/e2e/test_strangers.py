"""No command runs code of whoever wrote a checkpoint: neither a pickle's nor a
tokenizer's."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path

import pytest

from megatron_2bw.base.local_ranks import WorldError, run_world
from megatron_2bw.cli import main
from megatron_2bw.run.start.train import EVALUATE
from tests.distributed.test_convert import convert_here, folder  # noqa: F401  (a fixture)
from tests.e2e.launcher import forked

# a training loads as it does
EVALUATED = [*EVALUATE, *"--mock-data --device cpu --load".split()]
SAMPLE = "--prompt 5 --device cpu".split()
COMMANDS = {
    "evaluate": lambda source: forked(1, [*EVALUATED, source]),
    "sample": lambda source: run_world(1, call, ["sample", source, *SAMPLE]),
    "sample, trusted": lambda source: run_world(
        1, call, ["sample", source, *SAMPLE, "--trust-remote-code"]
    ),
    "export": lambda source: run_world(
        1, call, ["convert", "export", source, "--out", source + "-hf"]
    ),
}


class Code:
    def __init__(self, harmed: Path):
        self.harmed = harmed

    def __reduce__(self):
        return os.mkdir, (str(self.harmed),)


def write(rank: int, source: Path, target: Path) -> None:
    """Two checkpoints: the arguments of `pickle` are code, those of `tokenizer` trust
    the code of their tokenizer."""
    from megatron_2bw.tools.convert import parameters

    evil = dict(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(target),
        trust_remote_code=True,
    )
    arguments = {"pickle": lambda args: Code(target / "harmed")}
    arguments["tokenizer"] = lambda args: argparse.Namespace(**vars(args) | evil)
    original = parameters.write
    parameters.write = lambda path, args, *rest: original(
        path, arguments[path.name](args), *rest
    )
    for name in arguments:
        convert_here(0, ["import", str(source), "--save", str(target / name)])


def call(rank: int, words: list[str]) -> None:
    assert main(words) == 0


@pytest.fixture(scope="module")
def evil(folder, tmp_path_factory) -> Path:  # noqa: F811
    path = tmp_path_factory.mktemp("evil")
    (path / "evil.py").write_text(f"import os\nos.mkdir({str(path / 'harmed')!r})\n")
    (path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    )
    run_world(1, write, folder("llama") / "hf", path)
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_code_in_a_checkpoint(command, evil):
    """A tokenizer's runs if the command line says so, whatever the checkpoint says; a
    pickle's never."""
    harmed, trusted = evil / "harmed", command == "sample, trusted"
    for name, line in (
        ("pickle", "pickle.*: common_state.* could run code"),
        ("tokenizer", "" if trusted else "custom code"),
    ):
        # it copies the tokenizer's files, but not its code
        runs = command == "export" and name == "tokenizer"
        with (
            contextlib.nullcontext() if runs else pytest.raises(WorldError, match=line)
        ):
            COMMANDS[command](str(evil / name))
        assert harmed.exists() == (trusted and name == "tokenizer")
    if trusted:
        harmed.rmdir()
