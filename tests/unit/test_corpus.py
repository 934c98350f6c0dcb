"""The built-in corpus: nothing is lost, nothing half-written is used, and Megatron
loads it."""

import socket
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer

from megatron_2bw.tools.data import corpus as corpus_module
from megatron_2bw.tools.data.corpus import EOD, build_corpus
from tests.unit.test_preprocess import files_of

VOCAB = 512
BYTES = 200_000
SAMPLE = "def f(x):\n\treturn  'é 日本 🙂' , x ! n't\r\n  # \x00 \ufeff end"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return build_corpus(tmp_path_factory.mktemp("cache"), VOCAB, BYTES)


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return Tokenizer.from_file(str(corpus.tokenizer / "tokenizer.json"))


def test_files_hold_each_document_and_its_end(corpus, tokenizer):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    texts = corpus_module.read_library(BYTES)
    data = IndexedDataset(str(corpus.prefix))
    assert sum(len(text.encode()) for text in texts) <= BYTES
    assert len(data.document_indices) - 1 == len(texts)
    assert tokenizer.get_vocab_size() == VOCAB
    assert data.index.dtype == np.uint16
    for text, document in zip(texts, data, strict=True):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text
        assert document.tolist() == [*ids, tokenizer.token_to_id(EOD)]


def test_library_is_read_without_tests_and_undecodable_files(tmp_path, monkeypatch):
    names = "a.py deep/er/b.py test/c.py site-packages/d.py x/tests/e.py f.txt empty.py"
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin.py").write_bytes(b"# \xe9")
    (tmp_path / "empty.py").write_text("")
    monkeypatch.setattr(corpus_module.sysconfig, "get_path", lambda _: str(tmp_path))
    assert sorted(corpus_module.read_library(100)) == ["a.py", "deep/er/b.py"]
    assert corpus_module.read_library(5) == ["a.py"]


def test_second_call_reuses_the_first_and_the_key_tells_requests_apart(
    corpus, monkeypatch
):
    file = corpus.prefix.with_suffix(".bin")
    before = file.stat().st_mtime_ns
    monkeypatch.setenv("MEGATRON_2BW_CACHE", str(corpus.prefix.parent.parent))
    assert build_corpus(None, VOCAB, BYTES) == corpus
    assert file.stat().st_mtime_ns == before
    assert build_corpus(None, VOCAB, BYTES - 1).prefix != corpus.prefix


def test_build_that_breaks_off_leaves_nothing(tmp_path, corpus, monkeypatch):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    def break_off(*_args):
        assert list(tmp_path.rglob("corpus.bin"))  # it was half-written
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(IndexedDatasetBuilder, "finalize", break_off)
        build_corpus(tmp_path, VOCAB, BYTES)
    (lock,) = tmp_path.iterdir()
    assert lock.suffix == ".lock"
    again = build_corpus(tmp_path, VOCAB, BYTES)
    assert files_of(again.prefix) == files_of(corpus.prefix)


def test_megatron_loads_the_tokenizer_without_a_network(corpus, tokenizer, monkeypatch):
    """A training run has it from Megatron's parser, then Megatron's builder."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import parse_args

    def refuse(*_args, **_options):
        pytest.fail("it asks a network")

    monkeypatch.setattr(sys, "argv", ["pretrain", *corpus.flags()])
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    args = parse_args()
    loaded = build_tokenizer(args)
    assert loaded.vocab_size == args.padded_vocab_size == VOCAB
    assert loaded.eod == tokenizer.token_to_id(EOD)
    ids = loaded.tokenize(SAMPLE)
    assert ids == tokenizer.encode(SAMPLE).ids
    assert loaded.detokenize(ids) == SAMPLE
