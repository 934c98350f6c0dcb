"""The checks of datasets and of the flags that name them.

`DAMAGES` is used by the end-to-end test too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_2bw.flags.parse import check
from tests.distributed.training import BERT, command
from tests.unit.command_lines import Stopped, complaint, dataset, parse, stop

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def with_data(*flags: str) -> str | None:
    words = [word for word in command(2, 2, split="100,0,0") if word != "--mock-data"]
    return complaint([*words, *map(str, flags)], 2)


def damage(prefix: Path, how: str) -> None:
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    if how == "garbage":
        index.write_bytes(b"this is no index, but long enough to look at" * 9)
    elif how == "short":
        index.write_bytes(b"MMIDIDX")
    elif how == "cut":
        index.write_bytes(index.read_bytes()[:-3])
    elif how == "documents":
        index.write_bytes(index.read_bytes()[:-8] + bytes(8))
    elif how == "sequences":  # one is of -1 token
        index.write_bytes(index.read_bytes()[:38] + b"\xff" * 4 + index.read_bytes()[42:])
    elif how == "order":  # of the documents
        index.write_bytes(index.read_bytes()[:-16] + (2**40).to_bytes(8, "little") + index.read_bytes()[-8:])
    elif how == "tokens cut":
        tokens.write_bytes(tokens.read_bytes()[:-1])
    elif how == "of another dataset":
        tokens.write_bytes(bytes(1000))
    elif how == "gone":
        tokens.unlink()


DAMAGES = {
    "garbage": "is not an index of Megatron's",
    "short": "is not an index of Megatron's",
    "cut": "is damaged",
    "documents": "its documents end at sequence 0 of 3",
    "sequences": "do not follow one another",
    "order": "do not follow one another",
    "tokens cut": "but its index describes 60",
    "of another dataset": "but its index describes 60",
    "gone": "there is no file",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_dataset_is_found_before_training(how, tmp_path):
    good, bad = dataset(tmp_path / "good"), dataset(tmp_path / "bad")
    damage(bad, how)
    assert with_data("--data-path", good) is None
    for flags in (["--data-path", bad], ["--data-path", "0.3", good, "0.7", bad], ["--train-data-path", bad]):
        message = with_data(*flags)
        assert message.startswith(f"{flags[0]} {bad}: ") and DAMAGES[how] in message
    (tmp_path / "list").write_text(f"0.5 {good} 0.5 {bad}")
    assert str(bad) in with_data("--data-args-path", tmp_path / "list")


@pytest.mark.parametrize(
    "split, empty",
    [
        ("98,1,1", "validation"),
        ("1,1,1", None),
        ("2,1,0", None),
        ("1,100,100", "training"),
        ("100,0,0", None),
        ("60,39,1", "test"),
    ],
)
def test_a_split_that_leaves_a_share_without_documents(split, empty, tmp_path):
    """Megatron 0.19 would look for its first token for ever."""
    data = dataset(tmp_path / "data")  # three documents
    message = with_data("--data-path", data, "--split", split)
    if empty is None:
        assert message is None
    else:
        assert message == (
            f"--split {split} leaves no document of --data-path {data} for {empty}, it has 3: give that share 0 or more"
        )


@pytest.mark.parametrize(
    "flags, expected",
    [
        (
            [],
            "--data-path {} has no document for training of 2 sentences or more, each of 512 tokens or fewer: prepare it "  # noqa: E501
            "with scripts/preprocess_data.py for BERT, or add --bert-no-binary-head",
        ),
        (["--bert-no-binary-head"], None),
        (
            ["--bert-no-binary-head", "--split", "98,1,1"],
            "--split 98,1,1 leaves no document of --data-path {} for validation, it has 3: give that share 0 or more",
        ),
        (
            ["--bert-no-binary-head", "--tokenizer-type", "NullTokenizer"],
            "--tokenizer-type NullTokenizer has no words to mask: give the WordPiece tokenizer of --data-path",
        ),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else None,
)
def test_data_that_a_bert_finds_no_sentences_in(flags, expected, tmp_path):
    """Three documents of a sentence each; Megatron 0.19 would look through them two thousand million times."""
    data, vocabulary = dataset(tmp_path / "data"), tmp_path / "vocab.txt"
    vocabulary.write_text("[PAD]\n")
    argv = command(2, 2, split="100,0,0", tokenizer_type="BertWordPieceCase", vocab_file=vocabulary, data_path=data)
    argv = [word for word in argv if word != "--mock-data"]
    assert complaint([BERT, *argv, *flags], 2) == (expected and expected.format(data))


def test_megatrons_own_datasets_are_accepted(tmp_path):
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for kind in (numpy.uint16, numpy.int32):
        builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=kind)
        for length in (4, 9):
            builder.add_document(torch.arange(length), [length])
        builder.finalize(str(tmp_path / "data.idx"))
        assert with_data("--data-path", tmp_path / "data") is None


def test_an_entry_script_of_the_users_own_has_no_default_interval():
    args = parse(command(1, 1, eval_interval=None), 1)
    assert args.eval_interval == 1000
    args.eval_interval = None
    with pytest.raises(Stopped, match="--eval-interval is missing"):
        check(args, stop)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ([], "--data-path is missing (or --mock-data)"),
        (["--data-path", "no/such"], "--data-path no/such: there is no file no/such.idx"),
        (["--data-path", "x" * 300], f"--data-path {'x' * 300}: File name too long"),
        (["--data-args-path", "no/such"], "--data-args-path no/such: there is no such file"),
        (["--per-split-data-args-path", "no/such"], "--per-split-data-args-path no/such: there is no such file"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else None,
)
def test_missing_data(flags, expected):
    assert with_data(*flags) == expected
