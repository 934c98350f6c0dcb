"""scripts/finetune_bert.py from end to end: a killed and continued run gives the same
bits; toy tasks are learnt."""

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
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


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
    vocabulary = folder / "vocab.txt"
    special = "[PAD] [UNK] [CLS] [SEP] [MASK]".split()
    vocabulary.write_text("\n".join([*special, *WORDS]) + "\n")
    BertTokenizerFast(str(vocabulary)).save_pretrained(folder)
    torch.manual_seed(1)
    config = MegatronBertConfig(
        vocab_size=16,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        layer_norm_eps=1e-5,
    )
    MegatronBertForPreTraining(config).save_pretrained(folder)
    return folder


def toy(folder: Path, task: str) -> Path:
    """Examples whose label one word decides: of the hypothesis (mnli), or of the one
    ending with "yes" (choice)."""
    folder.mkdir()
    draw = random.Random(7)

    def text(word: str) -> str:
        words = [*draw.choices(WORDS[:8], k=4), word]
        draw.shuffle(words)
        return " ".join(words)

    def example() -> dict:
        label = draw.randrange(2 if task == "mnli" else 4)
        first = text("a")
        if task == "mnli":
            return {
                "premise": first,
                "hypothesis": text(WORDS[8 + label]),
                "label": label,
            }
        endings = [text("yes" if label == number else "no") for number in range(4)]
        return {"text": first, "endings": endings, "label": label}

    # 23 updates an epoch: no checkpoint is at the end of one.
    splits = {"train": 736} | dict.fromkeys(
        finetune_bert.TASKS[task]["validation"], 100
    )
    for split, count in splits.items():
        lines = [json.dumps(example()) + "\n" for _ in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


OPTIONS = (
    "--learning_rate 5e-3 --batch 32 --max_steps 80 --save_steps 10 --logging_steps "
    "10 --use_cpu"
)


def words(model: Path, data: Path, out: Path) -> list[str]:
    places = f"--model {model} --dataset {data} --out {out}"
    return f"--task mnli --seeds 3 {places} {OPTIONS}".split()


def start(*places: Path) -> subprocess.Popen[str]:
    return program("scripts/finetune_bert.py", *words(*places), start_new_session=True)


def seed3(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())["seeds"]["3"]


@pytest.mark.nightly
def test_killed_and_continued_it_gives_the_same_bits(model, tmp_path, capsys):
    data = toy(tmp_path / "data", "mnli")
    one = tmp_path / "one"
    two = tmp_path / "two"
    whole = start(model, data, one)
    killed = start(model, data, two)
    try:
        until = time.monotonic() + 200
        while not (two / "seed3" / "checkpoint-20" / "trainer_state.json").exists():
            running = killed.poll() is None and time.monotonic() < until
            assert running, "it has ended, or takes long"
            time.sleep(0.005)
        killed.kill()
        assert killed.wait() == -9
        assert json.loads((two / "results.json").read_text())["seeds"] == {}
        # What a kill inside a save leaves: a folder without trainer_state.json, newer
        # than the whole one.
        (two / "seed3" / "checkpoint-1000").mkdir()
        again = end(start(model, data, two), 250)
        first = end(whole, 250)
        assert again.returncode == first.returncode == 0, again.stderr + first.stderr
    finally:
        stop_tree(whole)
        stop_tree(killed)
    assert "starts from " + str(two / "seed3" / "checkpoint-") in again.stdout
    assert seed3(two) == seed3(one)  # accuracy, loss, and the digest of the logits
    assert seed3(one)["accuracy"]["all"] == 100 and seed3(one)["steps"] == 80
    # the checkpoints of a seed that has ended are removed
    assert not (one / "seed3").exists()
    assert finetune_bert.main(words(model, data, two)) == 0  # nothing is left to do
    said = capsys.readouterr().out
    assert "starts from" not in said and "seed 3: all 100.00 %" in said


def test_microbatches_change_nothing(model, tmp_path):
    """There is no dropout; the order of additions in fp32 differs."""
    same = tmp_path / "same"
    shutil.copytree(model, same)
    file = same / "config.json"
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    file.write_text(json.dumps(json.loads(file.read_text()) | off))
    data = toy(tmp_path / "data", "choice")
    words = f"--task choice --model {same} --dataset {data} --seeds 3 --batch 32"
    words += " --learning_rate 5e-3 --max_steps 3 --logging_steps 1 --use_cpu"
    losses = []
    for size in (32, 8):
        out = tmp_path / str(size)
        words += f" --per_device_train_batch_size {size} --out {out}"
        assert finetune_bert.main(words.split()) == 0
        losses.append(seed3(out)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.nightly
def test_multiple_choice_is_learnt_and_stands_in_the_table(model, tmp_path):
    data = toy(tmp_path / "data", "choice")
    out = tmp_path / "out"
    words = f"--models 2bw={model} --tasks choice --seeds 3 --out {out}"
    assert table2.main(f"{words} -- --dataset {data} {OPTIONS}".split()) == 0
    (row,) = json.loads((out / "table2.json").read_text())["rows"]
    assert row["task"] == "choice" and row["label"] == "2bw"
    assert row["runs"] == {"2bw seed 3": 100.0}


def test_the_label_of_a_small_task_is_the_place_of_the_next_span():
    size = 10**6
    follows = set()
    for text in finetune_bert.read_library(size):
        follows.update(itertools.pairwise(finetune_bert.spans(text)))
    for row in finetune_bert.small_task("choice", size)["train"]:
        assert (row["text"], row["endings"][row["label"]]) in follows
    rows = finetune_bert.small_task("order", size)["train"]
    assert {row["label"] for row in rows} == {0, 1, 2}
    for row in rows:
        pair = (row["text"], *row["endings"])
        if row["label"] == 1:
            pair = pair[::-1]
        assert row["label"] == 2 or pair in follows
