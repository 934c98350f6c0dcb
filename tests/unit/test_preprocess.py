"""Data preparation in one process: what is written is what the tokenizer makes of the
text, and Megatron reads it."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import sentencex
from filelock import FileLock
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_2bw.tools.data import preprocess, preprocess_command, vocabulary

WORDS = (
    "the a Dr. model stage pipeline of weights gradient é 日本 batch update is was "
    "(two) 3.5"
).split()


def prose(documents: int) -> list[str]:
    """Texts of one to seven sentences."""
    random = np.random.default_rng(1)
    texts = []
    for _ in range(documents):
        sentences = []
        for _ in range(random.integers(1, 8)):
            sentences.append(" ".join(random.choice(WORDS, 9)).capitalize() + ".")
        texts.append(" ".join(sentences))
    return texts


SPELLED = "It spells <|endoftext|> out. And [SEP] and [MASK] too."
TEXTS = [*prose(300), "", "  \n", SPELLED, "One sentence"]
WRITTEN = list(filter(str.strip, TEXTS))


def json_lines(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return json_lines(tmp_path_factory.mktemp("input") / "texts.jsonl", TEXTS)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """The folder of a tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    tokenizer = vocabulary.train_bpe(TEXTS, 300, vocabulary.GPT)
    vocabulary.save(folder, tokenizer, vocabulary.GPT)
    return folder


def main(words: str) -> int:
    return preprocess_command.main([*words.split(), "--workers", "1"])


def call(capsys, words: str) -> tuple[int, str, str]:
    try:
        status = main(words)
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


def done(capsys, words: str) -> str:
    """What a call that succeeds prints on stderr."""
    status, _, err = call(capsys, words)
    assert status == 0, err
    return err


def written(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(prefix))
    edges = data.document_indices
    documents = []
    for first, end in zip(edges, edges[1:]):
        documents.append([data[i].tolist() for i in range(first, end)])
    return documents, data.index.dtype


def hugging_face(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def decoded(prefix, folder) -> list[str]:
    """The texts of the documents of GPT, which end with eos."""
    tokenizer = hugging_face(folder)
    documents, _ = written(prefix)
    return [tokenizer.decode(document[0][:-1]) for document in documents]


@pytest.mark.parametrize(("kind", "size"), [("bpe", 300), ("wordpiece", 100)])
@pytest.mark.parametrize("task", ["gpt", "bert"])
def test_documents_are_what_the_tokenizer_makes_of_them(
    tmp_path, source, task, kind, size, capsys
):
    prefix = tmp_path / "out"
    words = f"--task {task} --input {source} --output-prefix {prefix}"
    train = f"--train-tokenizer {kind} --vocab-size {size}"
    status, out, err = call(capsys, f"{words} {train}")
    folder = tmp_path / "out-tokenizer"
    assert status == 0, err
    flags = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"
    assert out == f"--data-path {prefix} {flags} {folder}\n"
    assert not (tmp_path / "out.unfinished").exists()
    tokenizer = hugging_face(folder)

    def ids(text: str) -> list[int]:
        options = {"add_special_tokens": False, "split_special_tokens": True}
        return tokenizer(text, **options)["input_ids"]

    expected = []
    for text in WRITTEN:
        if task == "gpt":
            expected.append([[*ids(text), tokenizer.eos_token_id]])
        else:
            sentences = map(str.strip, sentencex.segment("en", text))
            expected.append(list(map(ids, filter(None, sentences))))
    documents, dtype = written(prefix)
    assert documents == expected
    assert dtype == np.uint16
    assert len(tokenizer) == size
    assert "2 empty documents left out" in err
    if kind == "bpe" and task == "gpt":
        assert decoded(prefix, folder) == WRITTEN


def files_of(prefix, *suffixes) -> list[bytes]:
    names = [f"{prefix}{suffix}" for suffix in (".bin", ".idx", *suffixes)]
    return [Path(name).read_bytes() for name in names]


@pytest.mark.parametrize(("size", "dtype"), [(65_499, np.uint16), (65_500, np.int32)])
def test_a_large_vocabulary_has_32_bits(tmp_path, source, capsys, size, dtype):
    from transformers import PreTrainedTokenizerFast

    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"<{i}>" for i in range(256, size - 1)] + ["<end>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(str(tmp_path / "made"))
    words = f"--task gpt --input {source} --tokenizer-model {tmp_path}/made"
    status, out, err = call(capsys, f"{words} --output-prefix {tmp_path}/whole")
    assert status == 0, err
    assert out.split()[-1] == str(tmp_path / "made")
    documents, found = written(tmp_path / "whole")
    assert found == dtype
    assert documents[0][0][-1] == size - 1


def test_parts_do_not_show(tmp_path, source, bpe, capsys, monkeypatch):
    words = f"--task gpt --input {source} --tokenizer-model {bpe} --output-prefix"
    assert call(capsys, f"{words} {tmp_path}/whole")[0] == 0
    monkeypatch.setattr(preprocess, "PART_BYTES", source.stat().st_size // 5)
    monkeypatch.setattr(preprocess, "BATCH_BYTES", 2000)
    assert call(capsys, f"{words} {tmp_path}/cut")[0] == 0
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


def test_a_vocabulary_file_makes_the_tokenizer_that_wrote_it(tmp_path, source):
    vocab = vocabulary.train_wordpiece(lambda: TEXTS, 200, vocabulary.BERT).get_vocab()
    words = sorted(vocab, key=vocab.get)
    (tmp_path / "vocab.txt").write_text("".join(word + "\n" for word in words))
    flags = f"--output-prefix {tmp_path}/b --vocab-file {tmp_path}/vocab.txt"
    assert main(f"--task bert --input {source} {flags}") == 0
    tokenizer = hugging_face(tmp_path / "b-tokenizer")
    assert tokenizer.convert_ids_to_tokens(list(range(len(words)))) == words
    assert tokenizer.tokenize("STAGE") == tokenizer.tokenize("stage")


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_training_leaves_nothing_to_chance(kind, tmp_path):
    text = " ".join(TEXTS)
    texts = [text.replace("g", letter) for letter in "\u0434\u0436\u0437\u4e2d!\u00df"]
    made = set()
    for _ in range(4):
        if kind == "wordpiece":
            tokenizer = vocabulary.train_wordpiece(lambda: texts, 120, vocabulary.BERT)
        else:
            tokenizer = vocabulary.train_bpe(texts, 300, vocabulary.BERT)
        made.add(tokenizer.to_str())
    assert len(made) == 1
    special = list(map(tokenizer.token_to_id, vocabulary.BERT.values()))
    assert special == [0, 1, 2, 3, 4]
    assert tokenizer.get_vocab().keys().isdisjoint({"##!", "##\u4e2d"})
    vocabulary.save(tmp_path / "made", tokenizer, vocabulary.BERT)
    pair = hugging_face(tmp_path / "made")("stage", "model", return_token_type_ids=True)
    assert pair["input_ids"][0] == 2
    assert pair["input_ids"][-1] == 3
    assert set(pair["token_type_ids"]) == {0, 1}


OPEN = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
LINES = '\ufeff{"n": 1, "body": "é\u2028日"}\n\n \r\n{"body": "b"}'
BLANK = "\n \na b\r\nc\n\n\t\n\nd\n  e\u2028\n\n"
ARRAY = '\ufeff \n[{"text": "é\\ud83d\\ude00"},\n{"text": "\\\\ud800"}]'


@pytest.mark.parametrize(
    ("flags", "name", "content", "expected"),
    [
        ("", "a.txt", BLANK, [BLANK.replace("\r", "")]),
        ("--text-documents lines", "a.gz", BLANK, ["a b", "c", "d", "  e\u2028"]),
        ("--text-documents blank-lines", "a.bz2", BLANK, ["a b\nc", "d\n  e\u2028"]),
        ("--json-keys body", "a.jsonl.xz", LINES, ["é\u2028日", "b"]),
        ("", "a.json.gz", ARRAY, ["é😀", "\\ud800"]),
    ],
)
def test_documents_of_files(tmp_path, bpe, capsys, flags, name, content, expected):
    (tmp_path / "in" / "[b]").mkdir(parents=True)
    for folder in ("in/[b]", "in"):
        path = tmp_path / folder / name
        with OPEN.get(path.suffix, open)(path, "wb") as file:
            file.write(content.encode())
    words = f"--task gpt --tokenizer-model {bpe} --output-prefix {tmp_path}/out"
    done(capsys, f"{words} --input {tmp_path}/in {flags}")
    assert decoded(tmp_path / "out", bpe) == expected * 2


BAD = {  # a line, and what is wrong with it
    b"1": "c.jsonl, row 3, '1': it is int, not an object",
    b'{"txt": "a"}': "no key 'text', only txt: give --json-keys",
    b'{"text": null}': "the text is NoneType",
    b'{"text": "\xff"}': "utf-8",
    b'{"text": "\\ud800"}': "surrogates not allowed",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_documents_stop_the_work_or_are_counted(tmp_path, bpe, capsys, line):
    """The line has the file, and the row in it."""
    good = b'{"text": "t"}\n'
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(good)
    (folder / "b.jsonl").write_bytes(b"")
    (folder / "c.jsonl").write_bytes(good + b"\n" + line)
    (folder / "d.json").write_bytes(b"[" + good + b", 2]")
    words = f"--task gpt --input {folder} --tokenizer-model {bpe}"
    words += f" --output-prefix {tmp_path}/out"
    status, _, err = call(capsys, words)
    assert status == 2
    assert BAD[line] in err.splitlines()[-1]
    err = done(capsys, f"{words} --skip-bad-documents")
    assert "2 bad documents left out" in err
    assert len(written(tmp_path / "out")[0]) == 3
    status, _, err = call(capsys, f"{words}2 --input {folder}/d.json")
    assert "d.json, row 2, '2': it is int" in err


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_call_that_is_killed_while_it_moves_the_result(
    tmp_path, source, capsys, monkeypatch, moved
):
    words = f"--task gpt --input {source} --output-prefix {tmp_path}/out"
    words += " --train-tokenizer bpe --vocab-size 300"
    replace = preprocess.os.replace
    done = []

    def killed(made, place):
        if "tokens-" not in str(made) and len(done) == moved:
            raise SystemExit(137)
        done.append(replace(made, place))

    with monkeypatch.context() as patch:
        patch.setattr(preprocess.os, "replace", killed)
        assert call(capsys, words)[0] == 137
    assert (tmp_path / "out.bin").exists() == (moved > 1)
    assert not (tmp_path / "out.idx").exists()
    # Megatron's, of data that was there
    cache = tmp_path / "out" / "cache"
    (cache / "GPTDataset_indices").mkdir(parents=True)
    assert call(capsys, words)[0] == 0
    assert not list(cache.iterdir())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["out", "out-tokenizer", "out.bin", "out.idx"]
    assert len(written(tmp_path / "out")[0]) == len(WRITTEN)


def test_nothing_is_overwritten_and_a_second_call_is_refused(tmp_path, source, capsys):
    words = f"--task gpt --input {source} --output-prefix {tmp_path}/out"
    words += " --train-tokenizer bpe --vocab-size 300"
    for name in ("out.bin", "out.idx", "out-tokenizer"):
        file = tmp_path / name
        file.write_text("mine")
        status, _, err = call(capsys, words)
        assert status == 2 and err.count("\n") == 1 and f"{name} exists" in err
        assert list(tmp_path.iterdir()) == [file] and file.read_text() == "mine"
        file.unlink()
    (tmp_path / "out.unfinished").mkdir()
    with FileLock(tmp_path / "out.unfinished" / "lock"):
        status, _, err = call(capsys, words)
    assert status == 2 and "another call is writing it" in err


@pytest.mark.parametrize("form", ["saved", "splits", "files"])
def test_dataset(tmp_path, form, capsys):
    from datasets import Dataset, DatasetDict

    data = Dataset.from_dict({"id": list(range(len(TEXTS))), "body": TEXTS})
    folder = tmp_path / "data"
    words = f"--task gpt --dataset {folder} --train-tokenizer bpe --vocab-size 300"
    words += f" --output-prefix {tmp_path}/out --text-column body"
    if form == "saved":
        data.save_to_disk(str(folder))
    elif form == "splits":
        splits = DatasetDict({"train": data.select([0]), "big": data})
        splits.save_to_disk(str(folder))
        words += " --dataset-split big"
    else:
        folder.mkdir()
        data.to_parquet(str(folder / "part.parquet"))
    done(capsys, words)
    assert decoded(tmp_path / "out", tmp_path / "out-tokenizer") == WRITTEN


WRONG = {  # flags ({} is a folder): what the line has
    "--input {}/none": "--input {}/none",
    "--tokenizer-model no/body": "no/body: it is not on this host, and the Hub is ",
    "--train-tokenizer bpe --vocab-size 60000": "--vocab-size 60000",
    "--input {} --output-prefix {}/empty/x": "--output-prefix {}/empty/x: lies in ",
    "--task sft": "--task sft",
}


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_input_is_one_line(tmp_path, source, capsys, monkeypatch, flags):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # it is asked once, and does not answer
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "empty").mkdir()
    words = f"--task gpt --output-prefix {tmp_path}/out --input {source} {flags}"
    if "tokenizer" not in flags:
        words += " --train-tokenizer bpe --vocab-size 300"
    status, out, err = call(capsys, words.replace("{}", str(tmp_path)))
    last = err.splitlines()[-1]
    assert status == 2 and out == ""
    assert last.startswith("megatron-2bw preprocess: error: ")
    assert WRONG[flags].replace("{}", str(tmp_path)) in last
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]
