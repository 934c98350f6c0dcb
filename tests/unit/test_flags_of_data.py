"""The checks of datasets: those of this project's, and a share of --split without documents."""

from __future__ import annotations

import pytest

from megatron_2bw.flags.checks import datasets
from tests.distributed.training import BERT, command
from tests.unit.command_lines import complaint, dataset, parse

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def with_data(*flags: object, bert: bool = False, **changes) -> list[str]:
    words = [word for word in command(2, 2, **changes) if word != "--mock-data"]
    return [*[BERT] * bert, *words, *map(str, flags)]


def test_data_must_be_given_and_there(tmp_path):
    assert complaint(with_data(), 2).startswith("--data-path is missing")
    assert complaint(with_data("--train-data-path", "no/such"), 2).startswith("--train-data-path no/such: ")
    assert complaint(with_data("--data-path", "1.0", "msc://bucket/data"), 2) is None


@pytest.mark.parametrize(
    "split, empty",
    [("98,1,1", "validation"), ("1,1,1", None), ("2/1/0", None), ("1,100,100", "training"), ("100", None)],
)
@pytest.mark.parametrize("bert", [False, True])
def test_a_split_that_leaves_a_share_without_documents(split, empty, bert, tmp_path):
    """Megatron 0.19 would look for its first token for ever."""
    data = dataset(tmp_path / "data")  # three documents
    message = complaint(with_data("--data-path", "0.5", data, bert=bert, split=split), 2)
    if empty is None:
        assert message is None
    else:
        assert message.startswith(f"--split {split} leaves no document of --data-path {data} for {empty}")


def test_datasets_are_found_wherever_they_are_named(tmp_path):
    one, two = dataset(tmp_path / "one"), dataset(tmp_path / "two")
    (tmp_path / "list").write_text(f"0.5 {one} 0.5 {two}")
    args = parse(with_data("--data-args-path", tmp_path / "list", "--valid-data-path", one), 2)
    assert {prefix for _, prefix in datasets(args)} == {str(one), str(two)}
    assert {flag.split()[0] for flag, _ in datasets(args)} == {"--data-args-path", "--valid-data-path"}


def test_a_checkpoint_that_is_cut_short_is_found_before_training(tmp_path):
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    for changes in ({}, {"save": tmp_path, "save_interval": 2}, {"ckpt_step": 2}):
        assert complaint(command(2, 2, load=tmp_path, **changes), 2).startswith(f"--load {tmp_path}: ")
