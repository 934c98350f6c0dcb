"""megatron-2bw gpu-check: what it does with rows that fail, hang or are skipped, what it continues from, its table."""

from __future__ import annotations

import json

import pytest
import torch

from megatron_2bw import cli
from megatron_2bw.errors import UserError
from megatron_2bw.gpu_check import observe, rows, runner
from megatron_2bw.gpu_check.rows import Failed, Row
from megatron_2bw.gpu_check.runner import FAILED, LATER, OK, SKIPPED


def row(run, name="one", seconds=5.0, needs=()) -> Row:
    return Row("part", name, "what it claims", run, needs, seconds)


def go(path, *each: Row, minutes=10.0, again=False) -> tuple[int, dict]:
    status = runner.run(each, "cpu", minutes, path, again)
    found = json.loads(path.read_text())["rows"] if path.exists() else {}
    return status, {key.removeprefix("part: "): entry for key, entry in found.items()}


def fails(check):
    raise Failed("weights differ by 1.0e-03")


def test_all_is_well(tmp_path, capsys):
    status, found = go(tmp_path / "new" / "r.json", row(lambda check: {"share": 0.25, "calls": {"a": 2.0}}))
    assert status == 0 and found["one"]["result"] == OK and found["one"]["figures"]["share"] == 0.25
    assert found["one"]["what"] == "what it claims"
    shown = capsys.readouterr().out
    assert "part: one  ok  share 0.25, calls {a: 2}" in shown and "1 ok, 0 FAILED, 0 hangs" in shown
    assert f"torch: {torch.__version__}" in shown and "on the CPU: no figures" in shown


def test_a_row_that_fails_is_named_and_the_others_run(tmp_path, capsys):
    def breaks(check):
        raise ZeroDivisionError("of what\nnobody knows")

    path = tmp_path / "r.json"
    each = [row(fails), row(breaks, "two"), row(lambda check: {}, "three", needs=("cuda",)), row(lambda check: {}, "4")]
    status, found = go(path, *each)
    assert status == 1
    assert [entry["result"] for entry in found.values()] == [FAILED, FAILED, SKIPPED, OK]
    assert found["one"]["why"] == "weights differ by 1.0e-03"
    assert found["two"]["why"] == "ZeroDivisionError: of what" and "nobody knows" in found["two"]["log"]
    shown = capsys.readouterr().out
    assert "part: one    FAILED  weights differ by 1.0e-03" in shown
    assert "part: three  skipped  needs a GPU" in shown and "1 ok, 2 FAILED, 0 hangs, 1 skipped, 0 not run" in shown


def test_rows_with_a_result_do_not_run_again(tmp_path):
    path, runs = tmp_path / "r.json", []
    first, second = row(lambda check: runs.append(1) or {}), row(fails, "two")
    assert go(path, first)[0] == 0 and go(path, first, second)[0] == 1 and len(runs) == 1
    assert go(path, first, second)[0] == 1, "a failure of an earlier call is still one"
    assert go(path, first)[0] == 0, "only the rows that were asked for decide"
    assert go(path, first, again=True)[0] == 0 and len(runs) == 2
    assert list(go(path, first)[1]) == ["one", "two"], "the table keeps the others"


def test_no_row_starts_that_could_end_too_late(tmp_path):
    path = tmp_path / "r.json"
    status, found = go(path, row(lambda check: {}, seconds=61.0), row(lambda check: {}, "two", 5.0), minutes=1)
    assert status == 0 and [entry["result"] for entry in found.values()] == [LATER, OK]
    status, found = go(path, row(lambda check: {}, seconds=61.0), minutes=2)
    assert status == 0 and found["one"]["result"] == OK


def test_results_of_another_machine_are_not_continued(tmp_path):
    path = tmp_path / "r.json"
    go(path, row(lambda check: {}))
    content = json.loads(path.read_text())
    content["machine"]["torch"] = "2.0"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"--json {path}: results with torch 2.0, not "):
        go(path, row(lambda check: {}))
    assert list(go(path, row(lambda check: {}, "two"), again=True)[1]) == ["two"]
    path.write_text("{")
    with pytest.raises(UserError, match="not a file of results"):
        go(path, row(lambda check: {}))


def run_of(*losses: float, weight: float = 1.0) -> list[observe.Observed]:
    return [observe.Observed(list(losses), [torch.tensor([weight, 2.0])])]


def test_what_counts_as_a_difference():
    same = run_of(1.0, 2.0)
    assert rows.compared(same, run_of(1.0, 2.0)) == {"iterations": 2, "differences": 0.0}
    for other in (run_of(1.0, 2.0000002), run_of(1.0, 2.0, weight=1.0001), run_of(1.0, float("nan")), run_of()):
        with pytest.raises(Failed):
            rows.compared(same, other)
    assert rows.compared(same, run_of(1.0, 2.0, weight=1.01), tolerance=0.05)["differences"] > 0
    with pytest.raises(Failed):
        rows.compared(same, [observe.Observed([1.0, 2.0], [])])


def test_gaps_between_kernels_of_several_streams():
    spans = [(0, 10), (5, 20), (2_000_020, 2_000_030), (2_000_022, 2_000_025)]
    found = observe.gaps(spans)
    assert found["longest_gap_ms"] == 2.0 and found["gpu_busy_share"] == pytest.approx(30 / 2_000_030)
    assert observe.gaps([]) == {}


def test_rows_have_names_of_their_own_and_fit_into_a_part():
    assert len({(each.part, each.name) for each in rows.ROWS}) == len(rows.ROWS)
    for each in rows.ROWS:
        assert each.what and each.seconds <= 300 and set(each.needs) <= set(rows.NEEDS)


@pytest.mark.parametrize(
    "words, line",
    [
        (["gpu-check", "--part", "costs"], "costs is not one of reference, ranks, hazards"),
        (["gpu-check", "--row", "nothing"], "--row nothing: no such row; rows are fp32; bf16; untied, 1 queue"),
        (["gpu-cheque"], "gpu-cheque is not a command (did you mean gpu-check?): see megatron-2bw --help"),
    ],
)
def test_wrong_words(words, line, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2 and line in capsys.readouterr().err


def test_rows_without_a_gpu():
    """Each part but those that are about CUDA has rows that run on the CPU."""
    assert {each.part for each in rows.ROWS if "cuda" not in each.needs} == {"reference", "ranks", "cost", "thread"}


def test_cuda_must_be_there(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["gpu-check", "--device", "cuda"])
    assert end.value.code == 2 and "--device cuda: torch finds no GPU here" in capsys.readouterr().err
