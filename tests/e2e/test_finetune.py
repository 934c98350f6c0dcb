"""scripts/finetune_bert.py from end to end: a killed and continued run gives the same
bits; toy tasks are learnt."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from megatron_2bw.base.processes import stop_tree
from scripts import finetune_bert, table2
from tests.e2e.launcher import end, program

WORDS = "a b c d e f g h yes no".split()


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    for name, value in (
        ("OMP_NUM_THREADS", "1"),
        ("HF_HUB_OFFLINE", "1"),
        ("HF_HOME", str(tmp_path / "cache")),
    ):
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A MegatronBert of one layer with random weights, and a vocabulary of a few
    words."""
    import torch
    from transformers import (
        BertTokenizerFast,
        MegatronBertConfig,
        MegatronBertForPreTraining,
    )

    folder = tmp_path_factory.mktemp("model")
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n"
    )
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(1)
    sizes = dict(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    config = MegatronBertConfig(
        vocab_size=16, max_position_embeddings=32, layer_norm_eps=1e-5, **sizes
    )
    MegatronBertForPreTraining(config).save_pretrained(folder)
    return folder


def toy(folder: Path, task: str) -> Path:
    """Examples whose label one word decides: of the hypothesis (mnli), or of the one
    ending with "yes" (choice)."""
    folder.mkdir()
    draw = random.Random(7)

    def text(word: str) -> str:
        found = [*draw.choices(WORDS[:8], k=4), word]
        draw.shuffle(found)
        return " ".join(found)

    # 23 updates an epoch: no checkpoint is at the end of one.
    splits = {"train": 736} | dict.fromkeys(
        finetune_bert.TASKS[task]["validation"], 100
    )
    for split, count in splits.items():
        rows = []
        for _ in range(count):
            label = draw.randrange(2 if task == "mnli" else 4)
            if task == "mnli":
                rows.append(
                    {
                        "premise": text("a"),
                        "hypothesis": text(WORDS[8 + label]),
                        "label": label,
                    }
                )
            else:
                endings = [
                    text("yes" if label == number else "no") for number in range(4)
                ]
                rows.append({"text": text("a"), "endings": endings, "label": label})
        (folder / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return folder


OPTIONS = (
    "--learning_rate 5e-3 --batch 32 --max_steps 80 --save_steps 10 --logging_steps "
    "10 --use_cpu"
).split()


def words(model: Path, data: Path, out: Path) -> list[str]:
    return [
        *f"--task mnli --seeds 3 --model {model} --dataset {data} --out {out}".split(),
        *OPTIONS,
    ]


def start(*given: Path) -> subprocess.Popen[str]:
    return program("scripts/finetune_bert.py", *words(*given), start_new_session=True)


def seed3(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())["seeds"]["3"]


@pytest.mark.nightly
def test_killed_and_continued_it_gives_the_same_bits(model, tmp_path, capsys):
    data, one, two = toy(tmp_path / "data", "mnli"), tmp_path / "one", tmp_path / "two"
    whole, killed = start(model, data, one), start(model, data, two)
    try:
        until = time.monotonic() + 200
        while not (two / "seed3" / "checkpoint-20" / "trainer_state.json").exists():
            assert killed.poll() is None and time.monotonic() < until, (
                "it has ended, or takes long"
            )
            time.sleep(0.005)
        killed.kill()
        assert killed.wait() == -9
        assert json.loads((two / "results.json").read_text())["seeds"] == {}
        # What a kill inside a save leaves: a folder without trainer_state.json, newer
        # than the whole one.
        (two / "seed3" / "checkpoint-1000").mkdir()
        again, first = end(start(model, data, two), 250), end(whole, 250)
        assert again.returncode == first.returncode == 0, again.stderr + first.stderr
    finally:
        stop_tree(whole)
        stop_tree(killed)
    assert "starts from " + str(two / "seed3" / "checkpoint-") in again.stdout
    assert seed3(two) == seed3(one)  # accuracy, loss, and the digest of the logits
    assert seed3(one)["accuracy"]["all"] == 100 and seed3(one)["steps"] == 80
    assert not list(one.glob("seed3")), (
        "the checkpoints of a seed that has ended are removed"
    )
    assert finetune_bert.main(words(model, data, two)) == 0  # nothing is left to do
    said = capsys.readouterr().out
    assert "starts from" not in said and "seed 3: all 100.00 %" in said


def test_microbatches_change_nothing(model, tmp_path):
    """Without dropout; up to the order of additions in fp32."""
    same = tmp_path / "same"
    shutil.copytree(model, same)
    config = json.loads((same / "config.json").read_text())
    off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    (same / "config.json").write_text(json.dumps(config | off))
    data = toy(tmp_path / "data", "choice")
    words = [
        "--task",
        "choice",
        "--model",
        str(same),
        "--dataset",
        str(data),
        "--seeds",
        "3",
    ]
    words += "--learning_rate 5e-3 --batch 32 --max_steps 3 --logging_steps 1 --use_cpu".split()
    found = []
    for size in ("32", "8"):
        out = tmp_path / size
        assert (
            finetune_bert.main(
                [*words, "--per_device_train_batch_size", size, "--out", str(out)]
            )
            == 0
        )
        found.append(seed3(out)["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.nightly
def test_multiple_choice_is_learnt_and_stands_in_the_table(model, tmp_path):
    data, out = toy(tmp_path / "data", "choice"), tmp_path / "out"
    words = [
        "--models",
        f"2bw={model}",
        "--tasks",
        "choice",
        "--seeds",
        "3",
        "--out",
        str(out),
    ]
    assert table2.main([*words, "--", "--dataset", str(data), *OPTIONS]) == 0
    (row,) = json.loads((out / "table2.json").read_text())["rows"]
    assert (row["task"], row["label"], row["runs"]) == (
        "choice",
        "2bw",
        {"2bw seed 3": 100.0},
    )


def test_the_label_of_a_small_task_is_the_place_of_the_next_span():
    documents = finetune_bert.read_library(size := 10**6)
    follows = {
        pair
        for text in documents
        for pair in itertools.pairwise(finetune_bert.spans(text))
    }
    for row in finetune_bert.small_task("choice", size)["train"]:
        assert (row["text"], row["endings"][row["label"]]) in follows
    rows = finetune_bert.small_task("order", size)["train"]
    assert {row["label"] for row in rows} == {0, 1, 2}
    for row in rows:
        pair = row["text"], *row["endings"]
        assert (
            row["label"] == 2 or (pair if row["label"] == 0 else pair[::-1]) in follows
        )
