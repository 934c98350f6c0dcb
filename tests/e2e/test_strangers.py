"""No command runs code of whoever wrote a checkpoint: neither a pickle's nor a
tokenizer's."""

import json
import os
from pathlib import Path

import pytest

from megatron_2bw.base.local_ranks import WorldError, run_world
from megatron_2bw.run.start.train import TABLES
from tests.distributed.test_convert import call, folder  # noqa: F401  (a fixture)
from tests.e2e.launcher import forked

SAMPLE = "--prompt 5 --device cpu"


def evaluate(source: Path) -> None:
    """A training loads as it does."""
    forked(
        1,
        [*TABLES["evaluate"], "--mock-data", "--device", "cpu", "--load", str(source)],
    )


def run(words: str) -> None:
    run_world(1, call, words)


class Code:
    def __init__(self, harmed: Path):
        self.harmed = harmed

    def __reduce__(self):
        return os.mkdir, (str(self.harmed),)


def write(rank: int, source: Path, target: Path) -> None:
    """Two checkpoints: the arguments of `pickle` are code, those of `tokenizer` trust
    the code of their tokenizer."""
    from megatron_2bw.tools.convert import parameters

    original = parameters.write

    def write_evil(path, args, *rest):
        if path.name == "pickle":
            args = Code(target / "harmed")
        else:
            args.tokenizer_type = "HuggingFaceTokenizer"
            args.tokenizer_model = str(target)
            args.trust_remote_code = True
        return original(path, args, *rest)

    parameters.write = write_evil
    for name in ("pickle", "tokenizer"):
        call(0, f"convert import {source} --save {target / name}")


@pytest.fixture(scope="module")
def evil(folder, tmp_path_factory) -> Path:  # noqa: F811
    path = tmp_path_factory.mktemp("evil")
    (path / "evil.py").write_text(f"import os\nos.mkdir({str(path / 'harmed')!r})\n")
    (path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    )
    run_world(1, write, folder("llama") / "hf", path)
    return path


def test_a_pickles_code_never_runs(evil):
    source = evil / "pickle"
    for words in (
        f"sample {source} {SAMPLE} --trust-remote-code",
        f"convert export {source} --out {source}-hf",
    ):
        with pytest.raises(WorldError, match="pickle.*: common_state.* could run code"):
            run(words)
    with pytest.raises(WorldError, match="pickle.*: common_state.* could run code"):
        evaluate(source)
    assert not (evil / "harmed").exists()


def test_a_tokenizers_code_runs_if_the_command_line_says_so(evil):
    """Whatever the checkpoint says."""
    source = evil / "tokenizer"
    with pytest.raises(WorldError, match="custom code"):
        evaluate(source)
    with pytest.raises(WorldError, match="custom code"):
        run(f"sample {source} {SAMPLE}")
    # it copies the tokenizer's files, but not its code
    run(f"convert export {source} --out {source}-hf")
    assert not (evil / "harmed").exists()
    with pytest.raises(WorldError):  # the evil tokenizer is none
        run(f"sample {source} {SAMPLE} --trust-remote-code")
    assert (evil / "harmed").exists()
