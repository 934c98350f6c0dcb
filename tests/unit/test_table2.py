"""Table 2: the small tasks' data, inputs, accuracies, the table, the jobs, refusals. Nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest

from megatron_2bw.data.corpus import read_library
from megatron_2bw.errors import UserError
from scripts import finetune_bert, finetune_tasks, table2
from scripts.finetune_tasks import LINES, TASKS, example, load, small, spans
from scripts.paper_data import PAPER

RACE = {"example_id": "high19088.txt", "article": "A text.", "answer": "C", "options": ["w", "x", "y", "z"]}


# --- data ------------------------------------------------------------------------------------------------------------


def test_rows_of_mnli_and_race_as_the_hub_has_them():
    mnli = {"premise": "one", "hypothesis": "two", "label": 2}
    assert example("mnli", mnli, "validation_matched") == ([("one", "two")], 2, "matched")
    pairs, label, group = example("race", RACE | {"question": "He is _ ."}, "validation")
    assert (pairs[0], label, group, len(pairs)) == (("He is w .", "A text."), 2, "high", 4)
    pairs, _, group = example("race", RACE | {"question": "Who?", "example_id": "middle1.txt"}, "validation")
    assert (pairs[3], group) == (("Who? z", "A text."), "middle")


@pytest.fixture(scope="module")
def documents() -> list[list[str]]:
    return [found for text in read_library(600_000) if len(found := spans(text)) > 1]


def test_order_swaps_half_of_the_consecutive_spans(documents):
    rows = small("order", documents, 400, "order train")
    follows = {(one, two) for document in documents for one, two in zip(document, document[1:])}
    for row in rows:
        pair = (row["first"], row["second"])
        assert (pair[::-1] if row["label"] else pair) in follows
    assert 150 < sum(row["label"] for row in rows) < 250
    assert rows == small("order", documents, 400, "order train") != small("order", documents, 400, "order validation")


def test_choice_has_one_ending_that_follows(documents):
    rows = small("choice", documents, 200, "choice train")
    follows = {(one, two) for document in documents for one, two in zip(document, document[1:])}
    for row in rows:
        assert len(row["endings"]) == 4 and (row["text"], row["endings"][row["label"]]) in follows
    assert {row["label"] for row in rows} == {0, 1, 2, 3}


def test_a_span_has_so_many_lines():
    assert spans("\n".join(["a", "", " b"] * LINES)) == [" ".join("ab" * (LINES // 2))] * 2
    assert spans("a\n" * (LINES - 1)) == []


def test_the_files_are_the_same_at_each_call_and_share_no_document(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "order", TASKS["order"] | {"examples": {"train": 300, "validation": 300}})
    texts = []
    for name in ("one", "two"):
        finetune_tasks.write_small("order", tmp_path / name, max_bytes=600_000)
        texts.append([(tmp_path / name / f"{split}.jsonl").read_text() for split in ("train", "validation")])
    assert texts[0] == texts[1]
    library = [set(spans(text)) for text in read_library(600_000)]
    for split, own in zip(texts[0], (library[: len(library) * 9 // 10], library[len(library) * 9 // 10 :])):
        rows = [json.loads(line) for line in split.splitlines()]
        assert all(any(row["first"] in found and row["second"] in found for found in own) for row in rows)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def folder(path: Path, **splits: list) -> str:
    path.mkdir()
    for split, rows in splits.items():
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_json_lines_and_saved_datasets_are_the_same(tmp_path, cache):
    import datasets

    rows = [{"premise": "one", "hypothesis": "two", "label": label} for label in (0, 2, -1, 1)]
    name = folder(tmp_path / "lines", train=rows, validation_matched=rows[:1], validation_mismatched=rows[1:3])
    found = load("mnli", name, tmp_path)
    assert [label for _, label, _ in found["train"]] == [0, 2, 1]  # -1: without a label
    assert found["validation_mismatched"] == [([("one", "two")], 2, "mismatched")]
    splits = ("train", "validation_matched", "validation_mismatched")
    saved = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split in splits})
    saved.save_to_disk(tmp_path / "saved")
    assert load("mnli", str(tmp_path / "saved"), tmp_path)["train"] == found["train"]


@pytest.mark.parametrize(
    "row, says",
    [
        ({"first": "a", "second": "b", "label": 2}, "row 1 of train is no example of --task order"),
        ({"first": "a", "second": "b", "label": "maybe"}, "row 1 of train is no example"),
        ({"first": "a", "second": None, "label": 1}, "row 1 of train is no example"),
    ],
)
def test_a_wrong_row_is_named(row, says, tmp_path, cache):
    good = {"first": "a", "second": "b", "label": "0"}
    row["label"] = str(row["label"])  # a column has one type
    with pytest.raises(UserError, match=says):
        load("order", folder(tmp_path / "data", train=[good, row], validation=[good]), tmp_path)


def test_missing_files_splits_and_columns_are_named(tmp_path, cache):
    import datasets

    with pytest.raises(UserError, match="it has no validation.jsonl; --task race needs train.jsonl, validation.jsonl"):
        load("race", folder(tmp_path / "one", train=[RACE]), tmp_path)
    datasets.DatasetDict({"train": datasets.Dataset.from_list([RACE])}).save_to_disk(tmp_path / "two")
    with pytest.raises(UserError, match="it has no split validation"):
        load("race", str(tmp_path / "two"), tmp_path)
    with pytest.raises(UserError, match="row 0 of train is no example of --task race"):
        load("race", folder(tmp_path / "three", train=[RACE], validation=[RACE]), tmp_path)  # no question


# --- inputs and accuracies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first, second, length", [(3, 4, 20), (30, 4, 20), (4, 30, 20), (30, 30, 20), (30, 30, 21)])
def test_a_pair_loses_the_end_of_its_longer_text(first, second, length):
    one, two = list(range(100, 100 + first)), list(range(200, 200 + second))
    tokens, types = finetune_bert.joined(one, two, length, 1, 2)
    while len(one) + len(two) > length - 3:  # as Megatron's own data
        (one if len(one) > len(two) else two).pop()
    assert tokens == [1, *one, 2, *two, 2]
    assert types == [0] * (len(one) + 2) + [1] * (len(two) + 1)


def test_the_accuracy_of_all_examples_and_of_groups():
    examples = [([], 0, "high"), ([], 1, "high"), ([], 1, "middle"), ([], 0, "middle"), ([], 1, "middle")]
    logits = numpy.array([[1, 0], [1, 0], [0, 1], [1, 0], [0, 1]])
    found = finetune_bert.accuracy(logits, examples)
    assert found == pytest.approx({"all": 80.0, "high": 50.0, "middle": 100.0})
    with pytest.raises(ValueError):
        finetune_bert.accuracy(logits[:4], examples)


def test_a_checkpoint_that_is_not_whole_is_passed_over(tmp_path):
    for step, state in ((9, "{}"), (10, '{"cut'), (100, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert finetune_bert.last_checkpoint(tmp_path).name == "checkpoint-9"
    assert finetune_bert.last_checkpoint(tmp_path / "none") is None


CONFIG = {"model_type": "megatron-bert", "layer_norm_eps": 1e-5, "max_position_embeddings": 64, "vocab_size": 32}


@pytest.mark.parametrize(
    "config, says",
    [
        (None, "No such file"),
        ("{", "config.json is not JSON"),
        (CONFIG | {"model_type": "bert"}, "its model_type is bert, not megatron-bert"),
        ({name: value for name, value in CONFIG.items() if name != "layer_norm_eps"}, "has no layer_norm_eps"),
        (CONFIG, "it holds no weights"),
    ],
)
def test_a_wrong_model_is_refused_in_one_line(config, says, tmp_path, capsys):
    if config is not None:
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    assert finetune_bert.main(["--task", "order", "--model", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    line = capsys.readouterr().err.strip()
    assert "\n" not in line and f"--model {tmp_path}: " in line and says in line


@pytest.mark.parametrize(
    "words, says",
    [
        ("--task squad", "--task"),
        ("--task race --batch 30 --micro-batch-size 4", "--batch 30: 1 processes with --micro-batch-size 4"),
        ("--task race --lr 0", "--lr 0.0: it must be above 0"),
        ("--task race --seeds 1,x", "--seeds: x is not a whole number"),
        ("--task race --save-steps 0", "--save-steps 0: it must be at least 1"),
        ("--task race --length 4", "--length 4: it must be at least 8"),
    ],
)
def test_a_wrong_option_is_named(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        finetune_bert.main([*words.split(), "--model", "none"])
    assert ended.value.code == 2 and says in capsys.readouterr().err.splitlines()[-1]


def test_results_of_other_settings_are_not_mixed(tmp_path):
    options = finetune_bert.parse(["--task", "race", "--model", "m", "--out", str(tmp_path)])
    (tmp_path / "results.json").write_text(json.dumps({"settings": {"task": "race", "lr": 1e-5}, "seeds": {"1": {}}}))
    assert finetune_bert.stored(options, {"task": "race", "lr": 1e-5})["seeds"] == {"1": {}}
    with pytest.raises(UserError, match="it holds results with lr 1e-05, not 2e-05; give another --out"):
        finetune_bert.stored(options, {"task": "race", "lr": 2e-5})


# --- the table -------------------------------------------------------------------------------------------------------


def result(out: Path, name: str, task: str, *accuracies: float) -> None:
    path = out / "finetuning" / name / task
    path.mkdir(parents=True)
    seeds = {str(seed): {"accuracy": {"all": value}} for seed, value in enumerate(accuracies, 1)}
    (path / "results.json").write_text(json.dumps({"settings": {}, "seeds": seeds}))


def test_the_table_has_the_papers_values_beside_ours(tmp_path, capsys):
    result(tmp_path, "vanilla", "race", 80.0, 81.0)
    result(tmp_path, "vanilla.2", "race", 79.0)  # another pretraining of the same kind
    result(tmp_path, "2bw+both", "race", 78.5)
    result(tmp_path, "2bw", "order", 90.0, 92.0, 94.0)
    assert table2.main(["--report-only", "--out", str(tmp_path)]) == 0
    lines = [line.strip("| ").split(" | ") for line in (tmp_path / "table2.md").read_text().splitlines()]
    assert lines[0] == ["task", "", "vanilla", "vanilla-90", "2bw", "2bw+both"]
    assert lines[2] == ["RACE, accuracy in %", "here", "80.00 ± 1.00 (3)", "–", "–", "78.50 (1)"]
    assert lines[3] == ["paper", "80.06", "79.30", "79.48", "–"]
    assert lines[4] == ["ORDER, accuracy in %", "here", "–", "–", "92.00 ± 2.00 (3)", "–"]
    assert len(lines) == 5 and (tmp_path / "table2.png").stat().st_size
    rows = json.loads((tmp_path / "table2.json").read_text())["rows"]
    assert next(row for row in rows if row["label"] == "vanilla")["runs"]["vanilla.2 seed 1"] == 79.0


def test_the_papers_values_are_those_of_its_claims():
    claims = " ".join(str(claim["says"]) for name in ("table2", "5") for claim in PAPER["figures"][name]["claims"])
    for values in PAPER["figures"]["table2"]["values"].values():
        assert all(f"{value:.2f}" in claims for value in values.values())


def test_a_second_model_of_a_label_has_a_name_of_its_own():
    found = table2.names([("vanilla", "a"), ("2bw", "b"), ("vanilla", "c")])
    assert found == [("vanilla", Path("a").resolve()), ("2bw", Path("b").resolve()), ("vanilla.2", Path("c").resolve())]


def test_a_folder_without_a_model_fails_alone_and_in_one_line(tmp_path, capsys):
    result(tmp_path, "vanilla", "race", 80.0)
    (tmp_path / "empty").mkdir()
    assert table2.main(["--models", f"2bw={tmp_path / 'empty'}", "--tasks", "race", "--out", str(tmp_path)]) == 1
    first, last = capsys.readouterr().err.strip().splitlines()
    assert first.endswith("empty holds neither a config.json of transformers nor a Megatron checkpoint")
    assert last == "table2.py: error: every model failed, see above"


@pytest.mark.parametrize(
    "words, says",
    [
        ("", "give one of --models or --gpt, --small, --cluster, --report-only, not none"),
        ("--small --report-only", "not --small and --report-only"),
        ("--models vanila=a", "vanila: give NAME=DIR"),
        ("--models vanilla", "vanilla: give NAME=DIR"),
        ("--submit --small", "--submit: give --cluster"),
        ("--small --variants 2bw", "--variants: vanilla must be one of them"),
        ("--small --seeds 1,b", "b is not a whole number"),
        ("--small --iterations 3", "--iterations 3: it must be at least 20"),
        ("--gpt vanilla=a --wikitext none", "--wikitext none: no such file"),
        ("--small --tasks squad", "squad is not one of mnli, race, order, choice"),
    ],
)
def test_wrong_words_are_named(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        table2.main(words.split())
    assert ended.value.code == 2 and says in capsys.readouterr().err.splitlines()[-1]


def test_the_jobs_are_figure_5s_and_one_for_each_model(tmp_path, capsys):
    own = ["--cluster", "p3.16xlarge", "--out", str(tmp_path), "--sbatch=--account=me"]
    words = [*own, "--", "--precision", "fp16"]
    assert table2.main(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "sbatch" in line]
    trained = [line for line in lines if "pretrain_bert_2bw.sbatch" in line]
    tuned = [line for line in lines if "table2.py" in line]
    assert len(trained) == len(tuned) == 3 and not any("gpt" in line for line in lines)
    for line, label, name in zip(tuned, ("vanilla", "2bw", "vanilla-90"), ("5-bert", "5-bert", "5-bert-90")):
        assert (
            f"--models {label}=" in line and f"/{name}-bert-355m" in line and "/checkpoints --tasks mnli,race" in line
        )
        assert f"--dependency=afterok:JOB_OF_{label.upper()}" in line and "--account=me" in line
        assert "--seeds 1,2,3 -- --precision fp16" in line and "--gpus 8" in line
