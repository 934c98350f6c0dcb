"""megatron-2bw gpu-check: what it does with rows that fail, hang or are skipped; ranks
that share a GPU."""

import json

import pytest
import torch

from megatron_2bw import cli
from megatron_2bw.base.local_ranks import on_gpu
from megatron_2bw.tools.gpu_check import rows, runner
from megatron_2bw.tools.gpu_check.rows import Failed, Observed, Row
from megatron_2bw.tools.gpu_check.runner import FAILED, OK, SKIPPED


def row(run, name="one", seconds=5.0, needs=()) -> Row:
    return Row(name, "what it claims", run, needs, seconds)


def go(path, *each: Row) -> tuple[int, dict]:
    status = runner.run_rows(each, "cpu", path)
    return status, json.loads(path.read_text())["rows"]


def nothing(check) -> dict:
    return {}


def test_a_row_that_fails_is_named_and_the_others_run(tmp_path, capsys):
    def fails(check):
        raise Failed("weights differ by 1.0e-03")

    def breaks(check):
        raise ZeroDivisionError("of what\nnobody knows")

    skipped = row(nothing, "three", needs=("cuda",))
    each = [row(fails), row(breaks, "two"), skipped, row(nothing, "four")]
    status, found = go(tmp_path / "new" / "r.json", *each)
    assert status == 1
    results = [entry["result"] for entry in found.values()]
    assert results == [FAILED, FAILED, SKIPPED, OK]
    assert found["one"]["why"] == "weights differ by 1.0e-03"
    assert found["two"]["why"] == "ZeroDivisionError: of what"
    assert "nobody knows" in found["two"]["log"]
    assert "1 ok, 2 FAILED, 0 hangs, 1 skipped" in capsys.readouterr().out
    assert go(tmp_path / "r.json", row(nothing))[0] == 0


def run_of(*losses: float, weight: float = 1.0) -> list[Observed]:
    return [Observed(list(losses), [torch.tensor([weight, 2.0])])]


DIFFERENT = {
    "a loss": run_of(1.0, 2.0000002),
    "a weight": run_of(1.0, 2.0, weight=1.0001),
    "NaN": run_of(1.0, float("nan")),
    "nothing": run_of(),
}


@pytest.mark.parametrize("other", DIFFERENT.values(), ids=DIFFERENT)
def test_what_counts_as_a_difference(other):
    with pytest.raises(Failed):
        rows.compared(run_of(1.0, 2.0), other)


def test_what_is_the_same():
    same = run_of(1.0, 2.0)
    equal = {"iterations": 2, "differences": 0.0}
    assert rows.compared(same, run_of(1.0, 2.0)) == equal
    near = run_of(1.0, 2.0, weight=1.01)
    assert rows.compared(same, near, tolerance=0.05)["differences"] > 0


def test_a_machine_without_a_gpu(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["gpu-check", "--device", "cuda"])
    assert "error: --device cuda: " in capsys.readouterr().err


def test_ranks_share_gpus():
    """Ranks on one GPU call themselves different hosts; with a GPU for each, NCCL keeps
    its settings."""
    shared = [on_gpu(rank, 4, 2) for rank in range(4)]
    assert [each["LOCAL_RANK"] for each in shared] == ["0", "1", "0", "1"]
    assert len({each["NCCL_HOSTID"] for each in shared}) == 4
    assert not any(name.startswith("NCCL") for name in on_gpu(1, 2, 2))
