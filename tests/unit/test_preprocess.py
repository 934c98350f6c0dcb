"""Data preparation in one process: what is written is what the tokenizer makes of the text, and Megatron reads it."""

import dataclasses
import gzip
import json
import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import sentencex
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_2bw.data import preprocess, preprocess_cli, vocabulary
from megatron_2bw.data.encoder import Encoder, plain
from megatron_2bw.data.indexed import LONGEST_SENTENCE, fault
from megatron_2bw.data.sources import FileSource
from megatron_2bw.data.unfinished import Unfinished
from megatron_2bw.errors import UserError

WORDS = "the a Dr. model stage pipeline of weights gradient é 日本 batch update is was (two) 3.5".split()


def prose(documents: int) -> list[str]:
    """Texts of one to seven sentences."""
    random = np.random.default_rng(1)
    sentences = lambda count: " ".join(" ".join(random.choice(WORDS, 9)).capitalize() + "." for _ in range(count))
    return [sentences(random.integers(1, 8)) for _ in range(documents)]


TEXTS = [*prose(300), "", "  \n", "It spells <|endoftext|> out. And [SEP] and [MASK] too.", "One sentence"]


class OneProcess:
    """The pool, without processes."""

    def __init__(self, count, job):
        self._job = job

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        pass

    def map(self, tasks):
        return map(self._job, tasks)


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(preprocess, "Pool", OneProcess)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    file = tmp_path_factory.mktemp("input") / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


def call(capsys, *flags) -> tuple[int, str, str]:
    try:
        status = preprocess_cli.main([str(flag) for flag in flags])
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


def written(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(prefix))
    edges = data.document_indices
    read = [[data[i].tolist() for i in range(*edges[n : n + 2])] for n in range(len(edges) - 1)]
    return read, data.index.dtype


def hugging_face(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize(("kind", "vocab_size"), [("bpe", 300), ("wordpiece", 100)])
@pytest.mark.parametrize("task", ["gpt", "bert"])
def test_documents_are_what_the_tokenizer_makes_of_them(tmp_path, source, task, kind, vocab_size, capsys):
    flags = ["--task", task, "--input", source, "--output-prefix", tmp_path / "out", "--train-tokenizer", kind]
    status, out, err = call(capsys, *flags, "--vocab-size", vocab_size, "--shard-mb", 0.005)
    folder = tmp_path / "out-tokenizer"
    assert status == 0, err
    assert out == f"--data-path {tmp_path}/out --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}\n"
    assert not (tmp_path / "out.unfinished").exists() and fault(str(tmp_path / "out")) is None
    tokenizer, (documents, dtype) = hugging_face(folder), written(tmp_path / "out")
    ids = lambda text: tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    texts = [text for text in TEXTS if text.strip()]
    if task == "gpt":
        expected = [[[*ids(text), tokenizer.eos_token_id]] for text in texts]
    else:
        split = [map(str.strip, sentencex.segment("en", text)) for text in texts]
        expected = [[ids(sentence) for sentence in document if sentence] for document in split]
        assert f"{sum(len(document) == 1 for document in expected)} documents of one sentence" in err
        assert "2 empty documents left out" in err
    assert documents == expected and dtype == np.uint16 and len(tokenizer) == vocab_size
    special = {tokenizer.convert_tokens_to_ids(token) for token in vocabulary.special_tokens(task, kind).values()}
    special -= {tokenizer.unk_token_id}
    for document in documents:
        inside = [number for sequence in document for number in sequence]
        assert special.isdisjoint(inside[:-1] if task == "gpt" else inside)
    if kind == "bpe" and task == "gpt":
        assert [tokenizer.decode(document[0][:-1]) for document in documents] == texts


def test_large_vocabulary_is_written_in_32_bits_and_shards_do_not_show(tmp_path, source, capsys):
    from transformers import PreTrainedTokenizerFast

    bytes_first = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for size, dtype in ((65_499, np.uint16), (65_500, np.int32)):
        words = bytes_first | {f"<{i}>": i for i in range(256, size - 1)} | {"<end>": size - 1}
        tokenizer = Tokenizer(models.BPE(words, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        folder = tmp_path / str(size)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(str(folder))
        files = set()
        for mb in (16, 0.005)[: 1 + (size > 65_499)]:
            prefix = tmp_path / f"{size}-{mb}"
            flags = ["--input", source, "--output-prefix", prefix, "--tokenizer-model", folder, "--shard-mb", mb]
            status, out, err = call(capsys, "--task", "gpt", *flags)
            assert status == 0, err
            assert out.split()[-1] == str(folder)
            documents, found = written(prefix)
            assert found == dtype and documents[0][0][-1] == size - 1
            files.add((prefix.with_name(prefix.name + ".bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()))
        assert len(files) == 1


def test_merged_files_are_those_of_megatrons_builder(tmp_path, source):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    tokenizer = vocabulary.train("wordpiece", lambda: TEXTS, 200, vocabulary.BERT)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    settings = {"forbidden": frozenset(range(5)) - {1}, "dtype": np.uint16, "eod": None, "language": "en"}
    files = FileSource((str(source),))
    job = preprocess.Job(tmp_path, files, settings, tmp_path / "tokenizer.json")
    shards = list(files.shards(9000))
    assert len(shards) > 3
    for shard in shards:
        job(shard)
    preprocess.merge(tmp_path, len(shards), tmp_path / "ours")

    encoder = Encoder(plain(tokenizer), **settings)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for document in encoder.documents([text for text in TEXTS if text.strip()], Counter()):
        builder.add_document(np.concatenate(document), list(map(len, document)))
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_special_token_that_a_tokenizer_makes_of_text_is_left_out(tmp_path):
    """One whose words are between spaces knows no other way to read the spelled-out token."""
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    counts = Counter()
    encoder = Encoder(plain(tokenizer), frozenset([0]), np.uint16, 0)
    tokens, lengths, ends = encoder.shard(["a </s> b a", "</s>"], counts)
    assert tokens.tolist() == [1, 2, 1, 0] and lengths.tolist() == [4] and ends.tolist() == [1]
    assert counts["spelled"] == 2 and counts["empty"] == 1


def test_documents_that_megatrons_bert_passes_over_are_counted(tmp_path, source, capsys):
    long = " ".join(["stage"] * (LONGEST_SENTENCE + 1))
    (tmp_path / "in.txt").write_text(f"One. {long}.\nOne. {long[:-6]}\nAlone.\nTwo. Three.\n")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "stage", "."]))
    flags = ["--task", "bert", "--input", tmp_path / "in.txt", "--text-documents", "lines", "--vocab-file"]
    status, out, err = call(capsys, *flags, tmp_path / "vocab.txt", "--output-prefix", tmp_path / "out")
    assert status == 0, err
    assert "1 documents of one sentence" in err and "1 documents with a sentence of more than 512" in err
    assert "4 documents, 7 sentences" in err and "warning" not in err
    documents, _ = written(tmp_path / "out")
    assert documents == [[[1, 6], [5] * 513 + [6]], [[1, 6], [5] * 512], [[1, 6]], [[1, 6], [1, 6]]]


@pytest.fixture(scope="module")
def bert_data(tmp_path_factory, source):
    """A WordPiece dataset with the tokenizer of a vocab.txt, and the tokenizer's folder."""
    root = tmp_path_factory.mktemp("bert")
    vocab = vocabulary.train("wordpiece", lambda: TEXTS, 200, vocabulary.BERT).get_vocab()
    (root / "vocab.txt").write_text("".join(word + "\n" for word in sorted(vocab, key=vocab.get)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocess, "Pool", OneProcess)
        flags = ["--task", "bert", "--input", source, "--output-prefix", root / "b", "--vocab-file", root / "vocab.txt"]
        assert preprocess_cli.main([str(flag) for flag in flags]) == 0
    return root / "b", root / "b-tokenizer"


def test_vocabulary_files_make_the_tokenizer_that_wrote_them(tmp_path, bert_data):
    prefix, folder = bert_data
    words = [line.rstrip("\n") for line in open(folder.parent / "vocab.txt")]
    tokenizer = hugging_face(folder)
    assert [tokenizer.convert_ids_to_tokens(i) for i in range(len(words))] == words
    assert tokenizer.tokenize("STAGE") == tokenizer.tokenize("stage")
    pair = tokenizer("stage", "model", return_token_type_ids=True)
    assert [pair["input_ids"][i] for i in (0, -1)] == [2, 3] and set(pair["token_type_ids"]) == {0, 1}
    bpe = vocabulary.train_bpe(TEXTS, 300, [vocabulary.EOD])
    bpe.model.save(str(tmp_path))
    ours, special = vocabulary.from_files(tmp_path / "vocab.json", tmp_path / "merges.txt", "gpt", False)
    assert ours.encode(TEXTS[0]).ids == bpe.encode(TEXTS[0]).ids and special == vocabulary.GPT
    with pytest.raises(UserError, match=r"it has no <\|endoftext\|>, which --task gpt needs"):
        vocabulary.from_files(folder.parent / "vocab.txt", None, "gpt", False)


def test_sample_is_all_or_a_share_of_every_part(tmp_path):
    lines = [json.dumps({"text": f"{number:04d}" * 5}) + "\n" for number in range(1000)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    files = FileSource((str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.gz")))
    task = preprocess.Task("gpt", files, tmp_path / "out", preprocess.NewTokenizer("bpe"), shard_bytes=700)
    everything = [json.loads(line)["text"] for line in lines] * 2
    assert list(preprocess._sample(task, 10**6)()) == everything
    plain = dataclasses.replace(task, source=FileSource(files.files[:1]))
    assert list(preprocess._sample(plain, plain.source.size())()) == everything[:1000]
    read = preprocess._sample(task, files.size() // 10)
    part = list(read())
    assert part == list(read())
    assert 0.09 < sum(map(len, part)) / files.size() < 0.11
    quarters = Counter(int(text[:4]) // 250 for text in part)
    assert min(quarters.values()) > 0.2 * len(part)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_training_leaves_nothing_to_chance(kind):
    texts = [" ".join(TEXTS).replace("g", letter) for letter in "\u0434\u0436\u0437\u4e2d!\u00df"]
    size = {"bpe": 300, "wordpiece": 120}[kind]
    made = [vocabulary.train(kind, lambda: texts, size, vocabulary.BERT) for _ in range(4)]
    assert len({tokenizer.to_str() for tokenizer in made}) == 1 and made[0].get_vocab_size() == size
    assert [made[0].token_to_id(token) for token in vocabulary.BERT.values()] == list(range(5))
    assert "##!" not in made[0].get_vocab() and "##\u4e2d" not in made[0].get_vocab()


def test_slow_tokenizer_gives_the_same():
    """A tokenizer written in Python goes through the other branch."""
    from transformers import ByT5Tokenizer

    from megatron_2bw.data.encoder import slow

    tokenizer = ByT5Tokenizer()
    encode = slow(tokenizer)
    assert encode([]) == []
    assert encode(["a b", "é"]) == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a b", "é")]


def test_going_on_needs_the_same_inputs_and_options(tmp_path, source, capsys, monkeypatch):
    flags = ["--task", "gpt", "--input", source, "--output-prefix", tmp_path / "out", "--train-tokenizer", "bpe"]
    flags += ["--vocab-size", 300, "--shard-mb", 0.02]

    class Broken(OneProcess):
        def map(self, tasks):
            for number, task in enumerate(tasks):
                if number == 2:
                    signal.raise_signal(signal.SIGTERM)
                yield self._job(task)

    with monkeypatch.context() as patch:
        patch.setattr(preprocess, "Pool", Broken)
        handler = signal.getsignal(signal.SIGTERM)
        status, out, err = call(capsys, *flags)
        assert status == 128 + signal.SIGTERM and out == "" and "stopped by SIGTERM; the same command continues" in err
        assert signal.getsignal(signal.SIGTERM) is handler
    shards = sorted((tmp_path / "out.unfinished").glob("*.npz"))
    stamps = [path.stat().st_mtime_ns for path in shards]
    assert len(shards) == 2 and not (tmp_path / "out.bin").exists()
    for other in (["--shard-mb", 0.03], ["--task", "bert"], ["--vocab-size", 301]):
        status, out, err = call(capsys, *flags, *other)
        named = other[0].replace("--vocab-size", "tokenizer")
        assert status == 2 and len(err.splitlines()) == 1 and f"with other {named}: repeat" in err
    more = source.with_name("more.jsonl")
    more.write_text('{"text": "more"}\n')
    status, out, err = call(capsys, *flags, "--input", source, more)
    assert status == 2 and "with other input files" in err
    assert [path.stat().st_mtime_ns for path in shards] == stamps
    status, out, err = call(capsys, *flags)
    assert status == 0 and "continuing the work" in err and "an earlier call has done the rest" in err
    whole = call(capsys, *flags, "--output-prefix", tmp_path / "whole")
    assert whole[0] == 0
    for suffix in (".bin", ".idx", "-tokenizer/tokenizer.json"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_skipping_bad_documents_goes_on_with_what_was_done_without(tmp_path, capsys):
    lines = [json.dumps({"text": text}) + "\n" for text in prose(60)]
    (tmp_path / "in.jsonl").write_text("".join([*lines[:40], '{"text": null}\n', *lines[40:]]))
    vocabulary.save(tmp_path / "made", vocabulary.train_bpe(TEXTS, 300, [vocabulary.EOD]), vocabulary.GPT)
    flags = ["--task", "gpt", "--input", tmp_path / "in.jsonl", "--tokenizer-model", tmp_path / "made"]
    flags += ["--shard-mb", 0.002, "--output-prefix"]
    status, out, err = call(capsys, *flags, tmp_path / "out")
    assert status == 2 and "--skip-bad-documents leaves such documents out" in err
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out.unfinished").glob("*.npz")}
    assert len(stamps) > 1
    kept = []

    class Watched(OneProcess):
        def map(self, tasks):
            kept.extend(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
            yield from super().map(tasks)
            kept.extend(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocess, "Pool", Watched)
        status, out, err = call(capsys, *flags, tmp_path / "out", "--skip-bad-documents")
    assert status == 128 + signal.SIGTERM and "continuing the work" in err and all(kept) and len(kept) > 2
    status, out, err = call(capsys, *flags, tmp_path / "out")  # some shards may have been done with it now
    assert status == 2 and "with other --skip-bad-documents: repeat" in err
    status, out, err = call(capsys, *flags, tmp_path / "out", "--skip-bad-documents")
    assert status == 0 and "1 bad documents left out" in err
    assert call(capsys, *flags, tmp_path / "whole", "--skip-bad-documents")[0] == 0
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_a_sample_of_compressed_text_is_bounded_and_of_every_part(tmp_path):
    lines = [json.dumps({"text": f"{number:04d} é" * 40}) + "\n" for number in range(2000)]
    files = []
    for name in "ab":
        files.append(str(tmp_path / f"{name}.jsonl.gz"))
        Path(files[-1]).write_bytes(gzip.compress("".join(lines).encode()))
    task = preprocess.Task("gpt", FileSource(tuple(files)), tmp_path / "out", preprocess.NewTokenizer("bpe"))
    limit = 2 * task.source.size()
    read = list(preprocess._sample(task, limit)())
    longest = len((f"{1999:04d} é" * 40).encode())
    assert limit <= sum(len(text.encode()) for text in read) <= limit + longest
    assert sum(text.startswith("0000 ") for text in read) == 2  # the beginning of both files


def test_as_many_workers_as_there_may_be_shards(tmp_path, capsys, monkeypatch):
    """A small compressed file may hold much text."""
    text = "".join(json.dumps({"text": text}) + "\n" for text in prose(20)).encode()
    (tmp_path / "in.jsonl").write_bytes(text)
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(text))
    vocabulary.save(tmp_path / "made", vocabulary.train_bpe(TEXTS, 300, [vocabulary.EOD]), vocabulary.GPT)
    counts = []

    class Counted(OneProcess):
        def __init__(self, count, job):
            counts.append(count)
            super().__init__(count, job)

    monkeypatch.setattr(preprocess, "Pool", Counted)
    for name in ("in.jsonl", "in.jsonl.gz"):
        flags = ["--task", "gpt", "--input", tmp_path / name, "--tokenizer-model", tmp_path / "made", "--workers", 3]
        assert call(capsys, *flags, "--output-prefix", tmp_path / f"{name}-out")[0] == 0
    assert counts == [1, 3]


def test_a_folder_is_read_through_links_but_not_in_circles(tmp_path, monkeypatch):
    folder, other = tmp_path / "in", tmp_path / "other"
    for path in (folder / "b" / "1.txt", folder / "b.txt", folder / ".hidden" / "2.txt", other / "3.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    (folder / "a").symlink_to(other)
    (folder / "c.txt").symlink_to(other / "3.txt")
    (other / "back").symlink_to(folder)
    (folder / "b" / "self").symlink_to(folder / "b")
    names = [str(folder / name) for name in ("a/3.txt", "b/1.txt", "b.txt", "c.txt")]
    assert preprocess_cli.input_files(str(folder), "auto") == names
    monkeypatch.chdir(tmp_path)
    assert preprocess_cli.input_files("in", "auto") == [os.path.relpath(name) for name in names]
    assert preprocess_cli.input_files(str(folder / "a"), "auto")[0] == str(folder / "a" / "3.txt")
    (folder / "d.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match="d.txt: a link to what is no file"):
        preprocess_cli.input_files(str(folder), "auto")


def test_a_subfolder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    """Root may read everything, so the system's answer is put in its place."""
    closed = tmp_path / "in" / "closed"
    closed.mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text("text")
    scandir = os.scandir

    def refusing(path):
        if str(path) == str(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(UserError, match=f"^--input {closed}: cannot be read, Permission denied$"):
        preprocess_cli.input_files(str(tmp_path / "in"), "auto")


@pytest.mark.parametrize("moved", [0, 1, 2, 3])
def test_call_that_is_killed_while_it_moves_the_result(tmp_path, source, capsys, monkeypatch, moved):
    flags = ["--task", "gpt", "--input", source, "--output-prefix", tmp_path / "out", "--train-tokenizer", "bpe"]
    flags += ["--vocab-size", 300]

    def killed(self):
        for made, place in self._outputs[:moved]:
            os.rename(made, place)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Unfinished, "place", killed)
        call(capsys, *flags)
    assert (tmp_path / "out.bin").exists() == (moved > 1)
    status, out, err = call(capsys, *flags)
    assert status == 0, err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-tokenizer", "out.bin", "out.idx"]
    assert len(written(tmp_path / "out")[0]) == len([text for text in TEXTS if text.strip()])


def test_nothing_is_overwritten(tmp_path, source, capsys):
    flags = ["--task", "gpt", "--input", source, "--output-prefix", tmp_path / "out", "--train-tokenizer", "bpe"]
    for name in ("out.bin", "out.idx", "out-tokenizer"):
        (tmp_path / name).write_text("mine")
        status, out, err = call(capsys, *flags, "--vocab-size", 300)
        assert status == 2 and err.count("\n") == 1 and f"{name} exists" in err
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]
        (tmp_path / name).unlink()


def test_second_call_at_the_same_time_is_refused(tmp_path, source, capsys):
    flags = ["--task", "gpt", "--input", source, "--output-prefix", tmp_path / "out", "--train-tokenizer", "bpe"]
    with Unfinished(tmp_path / "out").locked():
        status, out, err = call(capsys, *flags, "--vocab-size", 300)
    assert status == 2 and "another call is writing it" in err


def bert_samples(prefix, folder, binary_head: bool) -> list[dict]:
    """All samples of an epoch of Megatron's BERT dataset, with the tokenizer that Megatron builds."""
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(str(folder), {"library": "huggingface"})
    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=1,
        sequence_length=64,
        blend=([str(prefix)], None),
        split="1,0,0",
        tokenizer=tokenizer,
        masking_probability=0.15,
        short_sequence_probability=0.1,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=binary_head,
        path_to_cache=str(folder.parent / f"cache-{binary_head}"),
    )
    data = IndexedDataset(str(prefix))
    documents = np.arange(len(data.document_indices) - 1, dtype=np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.get_rank", lambda: 0)
        dataset = BERTMaskedWordPieceDataset(data, str(prefix), documents, 1, Split.train, config)  # a whole epoch
    return [dataset[i] for i in range(len(dataset))]


def check_bert_samples(samples: list[dict]) -> None:
    """[CLS] A [SEP] B [SEP], padded by 0, some of it masked; also where Megatron replaced a word by a special token."""
    masked = words = 0
    for sample in samples:
        chosen = sample["loss_mask"] == 1
        text = np.where(chosen, sample["labels"], sample["text"])
        length = np.flatnonzero(text)[-1] + 1
        assert text[0] == 2 and text[length - 1] == 3
        assert (text[:length] == 3).sum() == 1 + sample["types"].max()
        assert np.isin(text[1:length], [0, 2, 4]).sum() == 0 and not sample["text"][length:].any()
        assert not sample["padding_mask"][length:].any()
        masked += (sample["text"][chosen] == 4).sum()
        words += length
    assert 0.05 < masked / words < 0.15  # 15 % are chosen, of which 80 % are masked
    assert 0.3 < np.mean([sample["is_random"] for sample in samples]) < 0.7


def test_megatrons_bert_dataset(bert_data):
    documents = len([text for text in TEXTS if text.strip()])
    single = sum(len(document) == 1 for document in written(bert_data[0])[0])
    pairs = bert_samples(*bert_data, binary_head=True)
    check_bert_samples(pairs)
    alone = bert_samples(*bert_data, binary_head=False)
    assert len(pairs) >= documents - single and len(alone) >= documents
    assert {sample["types"].max() for sample in alone} == {0}


@pytest.mark.parametrize("form", ["saved", "splits", "files"])
def test_dataset(tmp_path, form, capsys):
    import datasets

    texts = TEXTS * 3
    data = datasets.Dataset.from_dict({"id": list(range(len(texts))), "body": texts})
    folder, flags = tmp_path / "data", []
    if form == "saved":
        data.save_to_disk(str(folder))
    elif form == "splits":
        datasets.DatasetDict({"train": data.select([0]), "big": data}).save_to_disk(str(folder))
        flags = ["--dataset-split", "big"]
    else:
        folder.mkdir()
        data.to_parquet(str(folder / "part.parquet"))
    flags += ["--task", "gpt", "--dataset", folder, "--text-column", "body", "--output-prefix", tmp_path / "out"]
    flags += ["--train-tokenizer", "bpe", "--vocab-size", 300, "--shard-mb", 0.02]
    status, out, err = call(capsys, *flags)
    assert status == 0, err
    tokenizer = hugging_face(tmp_path / "out-tokenizer")
    read = [tokenizer.decode(document[0][:-1]) for document in written(tmp_path / "out")[0]]
    assert read == [text for text in texts if text.strip()]
    flags[flags.index("--text-column") + 1] = "text"
    status, out, err = call(capsys, *flags, "--output-prefix", tmp_path / "other")
    errors = [line for line in err.splitlines() if "error" in line]
    assert status == 2 and errors == [f"preprocess_data.py: error: --text-column text: {folder} has id, body"]


def test_a_name_that_needs_the_hub_is_one_line_without_it(tmp_path, source, capsys, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    for flags in (
        ["--dataset", "nobody/nothing", "--train-tokenizer", "bpe", "--vocab-size", 300],
        ["--input", source, "--tokenizer-model", "nobody/nothing"],
    ):
        status, out, err = call(capsys, "--task", "gpt", "--output-prefix", tmp_path / "out", *flags)
        assert status == 2 and len(err.splitlines()) == 1
        assert "nobody/nothing: no such folder, and the Hub cannot be reached" in err


def test_tokenizer_without_what_bert_needs_is_refused(tmp_path, source, capsys):
    vocabulary.save(tmp_path / "gpt", vocabulary.train_bpe(TEXTS, 300, [vocabulary.EOD]), vocabulary.GPT)
    shifted = {"unk_token": "[UNK]", **vocabulary.BERT}
    vocabulary.save(tmp_path / "shifted", vocabulary.train_bpe(TEXTS, 300, list(shifted.values())), shifted)
    for name, line in (
        ("gpt", "it has no cls, mask, pad token, which --task bert needs"),
        ("shifted", "its padding token has the id 1, but Megatron's BERT dataset marks padding by 0"),
    ):
        flags = ["--task", "bert", "--input", source, "--output-prefix", tmp_path / "out"]
        status, out, err = call(capsys, *flags, "--tokenizer-model", tmp_path / name)
        assert status == 2 and len(err.splitlines()) == 1 and line in err
    assert not (tmp_path / "out.unfinished").exists()


WRONG = [  # flags that are added or changed ({} is a folder), what the line says
    ("--task t5", "invalid choice: 't5'"),
    ("--input {}/none", "--input {}/none: no such file or folder"),
    ("--input {}/empty", "--input {}/empty: no files in it"),
    ("--input {}/a.zip", "a.zip: neither text nor JSON lines; unpack it first"),
    ("--input {}/a.parquet", "--dataset reads its folder"),
    ("--input {}/blank.txt", "the input holds no documents"),
    ("--input {}/zero.txt", "the input holds no documents"),
    ("--input {}/zero.txt {}/zero.jsonl --train-tokenizer wordpiece", "the input holds no documents"),
    ("--input {}/a.txt --json-keys body", "--json-keys body: none of the input is JSON lines"),
    ("--text-documents lines", "--text-documents lines: all of the input is JSON lines"),
    ("--json-keys body", "no key 'body', only text: give --json-keys"),
    ("--dataset {}", "give one of --input, --dataset, not 2"),
    ("--dataset-split train", "--dataset-split: only with --dataset"),
    ("--tokenizer-model {}", "give one of --tokenizer-model, --vocab-file, --train-tokenizer, not 2"),
    ("--merge-file {}/a.txt", "--merge-file: only with --vocab-file"),
    ("--cased", "--cased: only with a new WordPiece tokenizer"),
    ("--language en", "--language: only with --task bert"),
    ("--task bert --language english", "--language english: give a code"),
    ("--vocab-size 257", "--vocab-size 257: must be at least 258"),
    ("--vocab-size 60000", "--vocab-size 60000: the text gives only"),
    ("--vocab-size many", "--vocab-size: invalid int value"),
    ("--workers 0", "--workers 0: must be at least 1"),
    ("--shard-mb 0", "--shard-mb 0: must be more than 0"),
    ("--train-tokenizer-mb -1", "--train-tokenizer-mb -1: must be more than 0"),
    ("--output-prefix {}", "a folder; add the name that the files begin with"),
    ("--output-prefix {}/new/", "--output-prefix {}/new/: a folder; add the name that the files begin with"),
    ("--output-prefix {}/new/..", "--output-prefix {}/new/..: a folder; add the name that the files begin with"),
    ("--input {}/empty --output-prefix {}/empty/x", "--output-prefix {}/empty/x: lies in --input {}/empty"),
    ("--input {} --output-prefix {}/link/new/x", "--output-prefix {}/link/new/x: lies in --input {}"),
    ("--output-prefix {}/a.txt/x", "cannot write there"),
    ("--language=", "--language: an empty word; leave it out"),
    ("--json-keys=", "--json-keys: an empty word; leave it out"),
    ("--append-eod", "unrecognized arguments: --append-eod"),
]


@pytest.mark.parametrize(("flags", "line"), WRONG, ids=[flags for flags, _ in WRONG])
def test_wrong_input_is_one_line(tmp_path, source, capsys, flags, line):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(source.parent)
    (tmp_path / "blank.txt").write_text(" \n")
    for name in ("zero.txt", "zero.jsonl"):
        (tmp_path / name).touch()
    for name in ("a.txt", "a.zip", "a.parquet"):
        (tmp_path / name).write_text("text")
    before = sorted(tmp_path.rglob("*"))
    right = ["--task", "gpt", "--input", source, "--output-prefix", tmp_path / "out", "--train-tokenizer", "bpe"]
    status, out, err = call(capsys, *right, "--vocab-size", "300", *flags.replace("{}", str(tmp_path)).split())
    lines = [text for text in err.splitlines() if " MB" not in text]
    assert status == 2 and out == "" and len(lines) == 1
    assert lines[0].startswith("preprocess_data.py: error: ") and line.replace("{}", str(tmp_path)) in lines[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_vocab_size_must_be_given(tmp_path, source, capsys):
    flags = ["--task", "gpt", "--input", source, "--output-prefix", tmp_path / "out", "--train-tokenizer", "bpe"]
    assert "give --vocab-size" in call(capsys, *flags)[2]
