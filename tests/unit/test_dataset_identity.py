"""A dataset that changes: during a run, between two runs, under an index in the cache."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

from megatron_2bw import cpu, guard
from megatron_2bw.data import indexed
from megatron_2bw.errors import UserError
from megatron_2bw.mcore import patches
from tests.unit.command_lines import dataset


@pytest.fixture(scope="module", autouse=True)
def megatron_on_cpu():
    cpu.install()
    yield
    cpu.uninstall()


@pytest.fixture
def repaired():
    undo = guard.apply(patches.repairs())
    yield
    undo()


def test_an_identity_is_of_the_content(tmp_path):
    first = indexed.identity(str(dataset(tmp_path / "a", (5, 7, 3))))
    assert indexed.identity(str(dataset(tmp_path / "b", (5, 7, 3)))) == first, "a copy"
    other = indexed.identity(str(dataset(tmp_path / "a", (7, 5, 3))))
    assert {name for name in first if first[name] != other[name]} == {".idx hash"}
    longer = indexed.identity(str(dataset(tmp_path / "a", (5, 7, 3, 1))))
    assert all(first[name] != longer[name] for name in first)


def test_both_ends_of_a_large_index_count(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "_LOOK", 64)
    prefix = str(dataset(tmp_path / "a", (5,) * 100))
    first = indexed.identity(prefix)
    index = Path(prefix + ".idx")
    for place in (40, -3):
        content = bytearray(index.read_bytes())
        content[place] ^= 1
        index.write_bytes(content)
        assert indexed.identity(prefix)[".idx hash"] != first[".idx hash"]


def test_what_has_changed_since_a_checkpoint(tmp_path):
    from megatron_2bw.checkpoints.state import changed_datasets

    prefix = str(dataset(tmp_path / "a"))
    then = Namespace(dataset_identities={prefix: indexed.identity(prefix)})
    now = Namespace(load="folder", dataset_identities=dict(then.dataset_identities))
    assert changed_datasets(then, now) == [] == changed_datasets(Namespace(), now) == changed_datasets(None, now)
    now.dataset_identities |= {"new": indexed.identity(prefix)}
    assert changed_datasets(then, now) == [], "a dataset may join"
    now.dataset_identities[prefix] = indexed.identity(str(dataset(tmp_path / "a", (5, 7, 4))))
    (line,) = changed_datasets(then, now)
    assert line.startswith(f"> --load folder: the dataset {prefix} has changed since (.bin bytes 60 -> 64, .idx hash ")


def test_a_file_that_is_cut_short_while_it_is_read(repaired, tmp_path):
    """Without the repair the process ends by SIGBUS."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokens = IndexedDataset(str(dataset(tmp_path / "a", (2000, 2000))))
    assert numpy.array_equal(tokens[1], numpy.zeros(2000))
    (tmp_path / "a.bin").write_bytes(bytes(8000))
    assert numpy.array_equal(tokens[0], numpy.zeros(2000))
    with pytest.raises(UserError, match=r"a.bin was cut short during the run: 8000 bytes, 16000 are needed"):
        tokens[1]


def test_a_cached_index_of_another_dataset_is_not_used(repaired, tmp_path):
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=16,
        split="1,0,0",
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=SimpleNamespace(eod=1, pad=2, vocab_size=127, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )

    def documents(*lengths: int) -> set[int]:
        """Those in the index of a dataset of these lengths, always under one name."""
        prefix = str(dataset(tmp_path / "a", lengths))
        indices = numpy.arange(len(lengths), dtype=numpy.int32)
        built = GPTDataset(IndexedDataset(prefix), prefix, indices, 20, Split.train, config)
        return set(built.document_index.tolist())

    for _ in range(2):
        assert documents(*(20,) * 30) == set(range(30))
    assert len(list((tmp_path / "cache").glob("*document_index.npy"))) == 1, "the second time from the cache"
    assert documents(*(50,) * 10) == set(range(10))
