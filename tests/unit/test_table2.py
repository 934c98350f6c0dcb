"""Table 2: the tasks' rows, the small tasks' data, inputs, accuracies, the table. Nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest

from megatron_2bw.data.corpus import read_library
from megatron_2bw.errors import UserError
from scripts import finetune_bert, table2
from scripts.finetune_bert import LINES, TASKS, example, small, spans
from scripts.paper_data import PAPER

RACE = {"example_id": "high19088.txt", "article": "A text.", "answer": "C", "options": ["w", "x", "y", "z"]}


def test_rows_of_mnli_and_race_as_the_hub_has_them():
    mnli = {"premise": "one", "hypothesis": "two", "label": 2}
    assert example("mnli", mnli, "validation_matched") == ([("one", "two")], 2, "matched")
    pairs, label, group = example("race", RACE | {"question": "He is _ ."}, "validation")
    assert (pairs[0], label, group, len(pairs)) == (("He is w .", "A text."), 2, "high", 4)
    pairs, _, group = example("race", RACE | {"question": "Who?", "example_id": "middle1.txt"}, "validation")
    assert (pairs[3], group) == (("Who? z", "A text."), "middle")


def test_small_tasks_are_of_spans_that_follow_each_other():
    assert spans("\n".join(["a", "", " b"] * LINES)) == [" ".join("ab" * (LINES // 2))] * 2
    documents = [found for text in read_library(600_000) if len(found := spans(text)) > 1]
    follows = {(one, two) for document in documents for one, two in zip(document, document[1:])}
    rows = small("order", documents, 400, "order train")
    for row in rows:
        pair = (row["first"], row["second"])
        assert (pair[::-1] if row["label"] else pair) in follows
    assert 150 < sum(row["label"] for row in rows) < 250
    assert rows == small("order", documents, 400, "order train") != small("order", documents, 400, "order validation")
    rows = small("choice", documents, 200, "choice train")
    for row in rows:
        assert len(row["endings"]) == 4 and (row["text"], row["endings"][row["label"]]) in follows
    assert {row["label"] for row in rows} == {0, 1, 2, 3}


def test_training_and_validation_share_no_document(monkeypatch):
    monkeypatch.setitem(TASKS, "order", TASKS["order"] | {"examples": {"train": 300, "validation": 300}})
    rows = finetune_bert.small_task("order", max_bytes=600_000)
    library = [set(spans(text)) for text in read_library(600_000)]
    at = len(library) * 9 // 10
    for own, documents in ((rows["train"], library[:at]), (rows["validation"], library[at:])):
        assert all(any(row["first"] in found and row["second"] in found for found in documents) for row in own)


@pytest.fixture
def tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[CLS]", "[SEP]", "[PAD]", *map(str, range(40))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]")
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(tmp_path)
    return finetune_bert.tokenizer_of(str(tmp_path))


@pytest.mark.parametrize("first, second, length", [(3, 4, 20), (30, 4, 20), (4, 30, 20), (30, 30, 21)])
def test_a_pair_loses_the_end_of_its_longer_text(first, second, length, tokenizer):
    """Also with a tokenizer that has no template of its own."""
    one, two = list(range(first)), list(range(second))
    row = finetune_bert.dataset([([(" ".join(map(str, one)), " ".join(map(str, two)))], 1, "")], tokenizer, length)[0]
    while len(one) + len(two) > length - 3:  # as Megatron's own data
        (one if len(one) > len(two) else two).pop()
    ids = [[number + 3 for number in text] for text in (one, two)]
    assert row["input_ids"] == [0, *ids[0], 1, *ids[1], 1]
    assert row["token_type_ids"] == [0] * (len(one) + 2) + [1] * (len(two) + 1) and row["label"] == 1


def test_the_accuracy_of_all_examples_and_of_groups():
    examples = [([], 0, "high"), ([], 1, "high"), ([], 1, "middle"), ([], 0, "middle"), ([], 1, "middle")]
    logits = numpy.array([[1, 0], [1, 0], [0, 1], [1, 0], [0, 1]])
    found = finetune_bert.accuracy(logits, examples)
    assert found == pytest.approx({"all": 80.0, "high": 50.0, "middle": 100.0})


def test_results_of_other_settings_are_not_mixed(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"settings": {"task": "race"}, "seeds": {"1": {}}}))
    options = finetune_bert.parse(["--task", "race", "--model", "m", "--out", str(tmp_path)])
    with pytest.raises(UserError, match="it holds results of other settings; give another --out"):
        finetune_bert.run(options)


def result(out: Path, name: str, task: str, *accuracies: float) -> None:
    path = out / "finetuning" / name / task
    path.mkdir(parents=True)
    seeds = {str(seed): {"accuracy": {"all": value}} for seed, value in enumerate(accuracies, 1)}
    (path / "results.json").write_text(json.dumps({"settings": {}, "seeds": seeds}))


def test_the_table_has_the_papers_values_beside_ours(tmp_path):
    result(tmp_path, "vanilla", "race", 80.0, 81.0)
    result(tmp_path, "vanilla.2", "race", 79.0)  # another pretraining of the same kind
    result(tmp_path, "2bw+both", "race", 78.5)
    result(tmp_path, "2bw", "order", 90.0, 92.0, 94.0)
    assert table2.main(["--out", str(tmp_path)]) == 0
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


def test_models_of_a_label_and_a_wrong_label(capsys):
    found = table2.parse(["--models", "vanilla=a,2bw=b,vanilla=c"]).models
    assert found == [("vanilla", Path("a").resolve()), ("2bw", Path("b").resolve()), ("vanilla.2", Path("c").resolve())]
    with pytest.raises(SystemExit) as ended:
        table2.main(["--models", "vanila=a"])
    assert ended.value.code == 2 and "--models: vanila=a: give LABEL=DIR" in capsys.readouterr().err.splitlines()[-1]
