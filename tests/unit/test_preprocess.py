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
    sentences = lambda count: " ".join(
        " ".join(random.choice(WORDS, 9)).capitalize() + "." for _ in range(count)
    )
    return [sentences(random.integers(1, 8)) for _ in range(documents)]


TEXTS = [
    *prose(300),
    "",
    "  \n",
    "It spells <|endoftext|> out. And [SEP] and [MASK] too.",
    "One sentence",
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    file = tmp_path_factory.mktemp("input") / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


def main(*flags) -> int:
    return preprocess_command.main([*map(str, flags), "--workers", "1"])


def call(capsys, *flags) -> tuple[int, str, str]:
    try:
        status = main(*flags)
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


def written(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(prefix))
    edges = data.document_indices
    read = [
        [data[i].tolist() for i in range(*edges[n : n + 2])]
        for n in range(len(edges) - 1)
    ]
    return read, data.index.dtype


def hugging_face(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize(("kind", "vocab_size"), [("bpe", 300), ("wordpiece", 100)])
@pytest.mark.parametrize("task", ["gpt", "bert"])
def test_documents_are_what_the_tokenizer_makes_of_them(
    tmp_path, source, task, kind, vocab_size, capsys
):
    flags = [
        "--task",
        task,
        "--input",
        source,
        "--output-prefix",
        tmp_path / "out",
        "--train-tokenizer",
        kind,
    ]
    status, out, err = call(capsys, *flags, "--vocab-size", vocab_size)
    folder = tmp_path / "out-tokenizer"
    assert status == 0, err
    assert out == (
        f"--data-path {tmp_path}/out --tokenizer-type HuggingFaceTokenizer "
        f"--tokenizer-model {folder}\n"
    )
    assert not (tmp_path / "out.unfinished").exists()
    tokenizer, (documents, dtype) = hugging_face(folder), written(tmp_path / "out")
    ids = lambda text: tokenizer(
        text, add_special_tokens=False, split_special_tokens=True
    )["input_ids"]
    texts = [text for text in TEXTS if text.strip()]
    if task == "gpt":
        expected = [[[*ids(text), tokenizer.eos_token_id]] for text in texts]
    else:
        split = [map(str.strip, sentencex.segment("en", text)) for text in texts]
        expected = [
            [ids(sentence) for sentence in document if sentence] for document in split
        ]
        assert "2 empty documents left out" in err
    assert documents == expected and dtype == np.uint16 and len(tokenizer) == vocab_size
    special = {
        tokenizer.convert_tokens_to_ids(token)
        for token in vocabulary.special_tokens(task, kind).values()
    }
    special -= {tokenizer.unk_token_id}
    for document in documents:
        inside = [number for sequence in document for number in sequence]
        assert special.isdisjoint(inside[:-1] if task == "gpt" else inside)
    if kind == "bpe" and task == "gpt":
        assert [tokenizer.decode(document[0][:-1]) for document in documents] == texts


def tiny_parts(monkeypatch) -> None:
    monkeypatch.setattr(preprocess, "PART_BYTES", 9000)
    monkeypatch.setattr(preprocess, "BATCH_BYTES", 2000)


def files_of(prefix, *suffixes) -> list[bytes]:
    return [
        Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx", *suffixes)
    ]


@pytest.mark.parametrize(("size", "dtype"), [(65_499, np.uint16), (65_500, np.int32)])
def test_a_large_vocabulary_has_32_bits_and_parts_do_not_show(
    tmp_path, source, capsys, monkeypatch, size, dtype
):
    from transformers import PreTrainedTokenizerFast

    letters = {
        letter: i
        for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    words = letters | {f"<{i}>": i for i in range(256, size - 1)} | {"<end>": size - 1}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>"
    ).save_pretrained(str(tmp_path / "made"))
    flags = [
        "--task",
        "gpt",
        "--input",
        source,
        "--tokenizer-model",
        tmp_path / "made",
        "--output-prefix",
    ]
    status, out, err = call(capsys, *flags, tmp_path / "whole")
    assert status == 0 and out.split()[-1] == str(tmp_path / "made"), err
    documents, found = written(tmp_path / "whole")
    assert found == dtype and documents[0][0][-1] == size - 1
    tiny_parts(monkeypatch)
    status, _, err = call(capsys, *flags, tmp_path / "cut")
    assert source.stat().st_size > 5 * preprocess.PART_BYTES
    assert status == 0 and files_of(tmp_path / "cut") == files_of(tmp_path / "whole"), (
        err
    )


def test_vocabulary_files_make_the_tokenizer_that_wrote_them(tmp_path, source):
    vocab = vocabulary.train_wordpiece(lambda: TEXTS, 200, vocabulary.BERT).get_vocab()
    words = sorted(vocab, key=vocab.get)
    (tmp_path / "vocab.txt").write_text("".join(word + "\n" for word in words))
    flags = [
        "--task",
        "bert",
        "--input",
        source,
        "--output-prefix",
        tmp_path / "b",
        "--vocab-file",
    ]
    assert main(*flags, tmp_path / "vocab.txt") == 0
    tokenizer = hugging_face(tmp_path / "b-tokenizer")
    assert [tokenizer.convert_ids_to_tokens(i) for i in range(len(words))] == words
    assert tokenizer.tokenize("STAGE") == tokenizer.tokenize("stage")
    pair = tokenizer("stage", "model", return_token_type_ids=True)
    assert [pair["input_ids"][i] for i in (0, -1)] == [2, 3] and set(
        pair["token_type_ids"]
    ) == {0, 1}
    bpe = vocabulary.train_bpe(TEXTS, 300, [vocabulary.EOD])
    bpe.model.save(str(tmp_path))
    vocabulary.from_files(
        tmp_path / "made", tmp_path / "vocab.json", tmp_path / "merges.txt", False
    )
    assert (
        hugging_face(tmp_path / "made")(TEXTS[0])["input_ids"]
        == bpe.encode(TEXTS[0]).ids
    )


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_training_leaves_nothing_to_chance(kind):
    texts = [
        " ".join(TEXTS).replace("g", letter)
        for letter in "\u0434\u0436\u0437\u4e2d!\u00df"
    ]
    size = {"bpe": 300, "wordpiece": 120}[kind]
    wordpiece = lambda: vocabulary.train_wordpiece(lambda: texts, size, vocabulary.BERT)
    bpe = lambda: vocabulary.train_bpe(texts, size, list(vocabulary.BERT.values()))
    made = [wordpiece() if kind == "wordpiece" else bpe() for _ in range(4)]
    assert (
        len({tokenizer.to_str() for tokenizer in made}) == 1
        and made[0].get_vocab_size() == size
    )
    assert [made[0].token_to_id(token) for token in vocabulary.BERT.values()] == list(
        range(5)
    )
    assert "##!" not in made[0].get_vocab() and "##\u4e2d" not in made[0].get_vocab()


OPEN = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
LINES = '\ufeff{"n": 1, "body": "é\u2028日"}\n\n \r\n{"body": "b"}'
BLANK = "\n \na b\r\nc\n\n\t\n\nd\n  e\u2028\n\n"


@pytest.mark.parametrize(
    ("flags", "name", "content", "expected"),
    [
        ([], "a.txt", BLANK, ["\n \na b\nc\n\n\t\n\nd\n  e\u2028\n\n"]),
        (
            ["--text-documents", "lines"],
            "a.txt.gz",
            BLANK,
            ["a b", "c", "d", "  e\u2028"],
        ),
        (
            ["--text-documents", "blank-lines"],
            "a.txt.bz2",
            BLANK,
            ["a b\nc", "d\n  e\u2028"],
        ),
        (["--json-keys", "body"], "a.jsonl.xz", LINES, ["é\u2028日", "b"]),
        (["--input-format", "jsonl"], "a.log", '{"text": "t"}\n', ["t"]),
        (
            [],
            "a.json.gz",
            '\ufeff \n[{"text": "é\\ud83d\\ude00"},\n{"text": "\\\\ud800"}]',
            ["é😀", "\\ud800"],
        ),
    ],
)
def test_documents_of_files(tmp_path, capsys, flags, name, content, expected):
    (tmp_path / "in" / "[b]").mkdir(parents=True)
    vocabulary.save(
        tmp_path / "made",
        vocabulary.train_bpe(TEXTS, 300, [vocabulary.EOD]),
        vocabulary.GPT,
    )
    for folder in ("in/[b]", "in"):
        with OPEN.get(Path(name).suffix, open)(tmp_path / folder / name, "wb") as file:
            file.write(content.encode())
    words = [
        "--task",
        "gpt",
        "--tokenizer-model",
        tmp_path / "made",
        "--output-prefix",
        tmp_path / "out",
    ]
    status, _, err = call(capsys, *words, "--input", tmp_path / "in", *flags)
    assert status == 0, err
    tokenizer = hugging_face(tmp_path / "made")
    assert [
        tokenizer.decode(document[0][:-1]) for document in written(tmp_path / "out")[0]
    ] == expected * 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[1]", ""),
        (b'{"txt": "a"}', "no key 'text', only txt: give --json-keys"),
        (b'{"text": null}', "the text is NoneType"),
        (b'{"text": "\xff"}', "utf-8"),
        (b'{"text": "\\ud800"}', "surrogates not allowed"),
    ],
)
def test_bad_documents_stop_the_work_or_are_counted(tmp_path, capsys, line, reason):
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in prose(60)]
    (tmp_path / "in.jsonl").write_bytes(
        b"".join([*lines[:50], line, b"\n", *lines[50:]])
    )
    vocabulary.save(
        tmp_path / "made",
        vocabulary.train_bpe(TEXTS, 300, [vocabulary.EOD]),
        vocabulary.GPT,
    )
    flags = [
        "--task",
        "gpt",
        "--input",
        tmp_path / "in.jsonl",
        "--tokenizer-model",
        tmp_path / "made",
    ]
    status, _, err = call(capsys, *flags, "--output-prefix", tmp_path / "out")
    last = err.splitlines()[-1]
    assert (
        status == 2
        and reason in last
        and ("in.jsonl, row 51, " in last or reason == "utf-8")
    )
    status, _, err = call(
        capsys, *flags, "--output-prefix", tmp_path / "out", "--skip-bad-documents"
    )
    assert (
        status == 0
        and "1 bad documents left out" in err
        and len(written(tmp_path / "out")[0]) == 60
    )


def test_a_bad_document_has_its_file_and_its_row_there(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    good = '{"text": "t"}\n'
    for name, text in {
        "a.jsonl": good * 3,
        "b.jsonl": "",
        "c.jsonl": f"{good}1\n",
        "d.json": f"[{good}, 2]",
    }.items():
        (tmp_path / "in" / name).write_text(text)
    vocabulary.save(
        tmp_path / "made",
        vocabulary.train_bpe(TEXTS, 300, [vocabulary.EOD]),
        vocabulary.GPT,
    )
    flags = [
        "--task",
        "gpt",
        "--tokenizer-model",
        tmp_path / "made",
        "--output-prefix",
        tmp_path / "out",
        "--input",
    ]
    for file, row in (("c.jsonl", 1), ("d.json", 2)):
        status, _, err = call(capsys, *flags, tmp_path / "in")
        assert (
            status == 2
            and f"in/{file}, row 2, '{row}': it is int, not an object"
            in err.splitlines()[-1]
        )
        (tmp_path / "in" / file).write_text(good)
    assert (
        call(capsys, *flags, tmp_path / "in")[0] == 0
        and len(written(tmp_path / "out")[0]) == 5
    )


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_call_that_is_killed_while_it_moves_the_result(
    tmp_path, source, capsys, monkeypatch, moved
):
    flags = [
        "--task",
        "gpt",
        "--input",
        source,
        "--train-tokenizer",
        "bpe",
        "--vocab-size",
        300,
        "--output-prefix",
    ]
    replace, done = preprocess.os.replace, []

    def killed(made, place):
        if "tokens-" not in str(made) and len(done) == moved:
            raise SystemExit(137)
        done.append(replace(made, place))

    with monkeypatch.context() as patch:
        patch.setattr(preprocess.os, "replace", killed)
        assert call(capsys, *flags, tmp_path / "out")[0] == 137
    assert (tmp_path / "out.bin").exists() == (moved > 1) and not (
        tmp_path / "out.idx"
    ).exists()
    # Megatron's, of data that was there
    (tmp_path / "out" / "cache" / "GPTDataset_indices").mkdir(parents=True)
    assert call(capsys, *flags, tmp_path / "out")[0] == 0
    (tmp_path / "out" / "cache").rmdir()
    (tmp_path / "out").rmdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out-tokenizer",
        "out.bin",
        "out.idx",
    ]
    assert len(written(tmp_path / "out")[0]) == len(
        [text for text in TEXTS if text.strip()]
    )


def test_nothing_is_overwritten_and_a_second_call_is_refused(tmp_path, source, capsys):
    flags = [
        "--task",
        "gpt",
        "--input",
        source,
        "--output-prefix",
        tmp_path / "out",
        "--train-tokenizer",
        "bpe",
    ]
    for name in ("out.bin", "out.idx", "out-tokenizer"):
        (tmp_path / name).write_text("mine")
        status, out, err = call(capsys, *flags, "--vocab-size", 300)
        assert status == 2 and err.count("\n") == 1 and f"{name} exists" in err
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
            (name, "mine")
        ]
        (tmp_path / name).unlink()
    (tmp_path / "out.unfinished").mkdir()
    with FileLock(tmp_path / "out.unfinished" / "lock"):
        status, out, err = call(capsys, *flags, "--vocab-size", 300)
    assert status == 2 and "another call is writing it" in err


@pytest.mark.parametrize("form", ["saved", "splits", "files"])
def test_dataset(tmp_path, form, capsys):
    import datasets

    texts = TEXTS * 3
    data = datasets.Dataset.from_dict({"id": list(range(len(texts))), "body": texts})
    folder, flags = tmp_path / "data", []
    if form == "saved":
        data.save_to_disk(str(folder))
    elif form == "splits":
        datasets.DatasetDict({"train": data.select([0]), "big": data}).save_to_disk(
            str(folder)
        )
        flags = ["--dataset-split", "big"]
    else:
        folder.mkdir()
        data.to_parquet(str(folder / "part.parquet"))
    flags += [
        "--task",
        "gpt",
        "--dataset",
        folder,
        "--text-column",
        "body",
        "--output-prefix",
        tmp_path / "out",
    ]
    flags += ["--train-tokenizer", "bpe", "--vocab-size", 300]
    status, out, err = call(capsys, *flags)
    assert status == 0, err
    tokenizer = hugging_face(tmp_path / "out-tokenizer")
    read = [
        tokenizer.decode(document[0][:-1]) for document in written(tmp_path / "out")[0]
    ]
    assert read == [text for text in texts if text.strip()]
    flags[flags.index("--text-column") + 1] = "text"
    status, out, err = call(capsys, *flags, "--output-prefix", tmp_path / "other")
    errors = [line for line in err.splitlines() if "error" in line]
    assert (
        status == 2
        and len(errors) == 1
        and f"--dataset {folder}" in errors[0]
        and "--text-column text" in errors[0]
    )


WRONG = [  # flags that are added or changed ({} is a folder), what the line has
    ("--input {}/none", "--input {}/none"),
    (
        "--tokenizer-model nobody/nothing",
        "nobody/nothing: it is not on this host, and the Hub is out of reach: give ",
    ),
    ("--dataset nobody/nothing", "nobody/nothing"),
    ("--train-tokenizer bpe --vocab-size 60000", "--vocab-size 60000"),
    (
        "--input {} --output-prefix {}/empty/x",
        "--output-prefix {}/empty/x: lies in --input {}",
    ),
    ("--task sft", "--task sft"),
]


@pytest.mark.parametrize(("flags", "line"), WRONG, ids=[flags for flags, _ in WRONG])
def test_wrong_input_is_one_line(tmp_path, source, capsys, monkeypatch, flags, line):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # it is asked once, and does not answer
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    words = flags.replace("{}", str(tmp_path)).split()
    words += ["--input", source] * ("--input" not in words and "--dataset" not in words)
    words += ["--train-tokenizer", "bpe"] * ("tokenizer" not in flags)
    words += ["--vocab-size", "300"] * ("--vocab-size" not in words)
    right = ["--task", "gpt", "--output-prefix", tmp_path / "out"]
    status, out, err = call(capsys, *right, *words)
    last = err.splitlines()[-1]
    assert (
        status == 2
        and out == ""
        and last.startswith("megatron-2bw preprocess: error: ")
    )
    assert (
        line.replace("{}", str(tmp_path)) in last
        and sorted(tmp_path.rglob("*")) == before
    )
