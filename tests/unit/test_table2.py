"""Table 2: the tasks' rows, the small task's data, inputs, the table. Nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_2bw.data.corpus import read_library
from scripts import finetune_bert, table2
from scripts.finetune_bert import LINES, TASKS, example, spans

RACE = {"article": "A text.", "answer": "C", "options": ["w", "x", "y", "z"]}


def test_rows_of_mnli_and_race_as_the_hub_has_them():
    assert example("mnli", {"premise": "one", "hypothesis": "two", "label": 2}) == ([("one", "two")], 2)
    pairs, label = example("race", RACE | {"question": "He is _ ."})
    assert (pairs[0], label, len(pairs)) == (("He is w .", "A text."), 2, 4)
    assert example("race", RACE | {"question": "Who?"})[0][3] == ("Who? z", "A text.")


def test_the_small_task_is_of_spans_that_follow_each_other_and_splits_share_no_document(monkeypatch):
    assert spans("\n".join(["a", "", " b"] * LINES)) == [" ".join("ab" * (LINES // 2))] * 2
    monkeypatch.setitem(TASKS, "choice", TASKS["choice"] | {"examples": 200})
    rows = finetune_bert.small_task("choice", max_bytes=3_000_000)
    library = [spans(text) for text in read_library(3_000_000)]
    at = len(library) * 9 // 10
    for own, documents in ((rows["train"], library[:at]), (rows["validation"], library[at:])):
        follows = {(one, two) for document in documents for one, two in zip(document, document[1:])}
        assert all(len(row["endings"]) == 4 and (row["text"], row["endings"][row["label"]]) in follows for row in own)
        assert {row["label"] for row in own} == {0, 1, 2, 3}


def result(out: Path, name: str, task: str, *accuracies: float) -> None:
    path = out / "finetuning" / name / task
    path.mkdir(parents=True)
    seeds = {str(seed): {"accuracy": {"all": value}} for seed, value in enumerate(accuracies, 1)}
    (path / "results.json").write_text(json.dumps({"settings": {}, "seeds": seeds}))


def test_the_table_has_the_papers_values_beside_ours(tmp_path):
    result(tmp_path, "vanilla", "race", 80.0, 81.0)
    result(tmp_path, "vanilla.2", "race", 79.0)  # another pretraining of the same kind
    result(tmp_path, "2bw+auto", "choice", 78.5)
    assert table2.main(["--out", str(tmp_path)]) == 0
    lines = [line.strip("| ").split(" | ") for line in (tmp_path / "table2.md").read_text().splitlines()]
    assert lines[2:] == [
        ["RACE, accuracy in %", "vanilla", "80.00 ± 1.00 (3)", "80.06"],
        ["RACE, accuracy in %", "vanilla-90", "–", "79.3"],
        ["RACE, accuracy in %", "2bw", "–", "79.48"],
        ["CHOICE, accuracy in %", "2bw+auto", "78.50 (1)", "–"],
    ]
    rows = json.loads((tmp_path / "table2.json").read_text())["rows"]
    assert rows[0]["label"] == "vanilla" and rows[0]["runs"]["vanilla.2 seed 1"] == 79.0
