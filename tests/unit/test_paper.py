"""The paper's figures: the data file, the rows of the report, the command line. Nothing
is trained."""

import csv
import itertools
import json
import sys

import pytest

from megatron_2bw.schedules import SCHEDULES, TwoBW
from megatron_2bw.tools.planner.descriptions.model import PRESETS
from scripts import paper, paper_claims, paper_data, paper_figures
from scripts.paper_data import FIRST, PAPER, SYSTEMS, grid, panels
from scripts.paper_figures import Claim, Point, judge_ratio

FIGURES = PAPER["figures"]
TRAINED = [name for name, figure in FIGURES.items() if "runs" in figure]


@pytest.mark.parametrize("figure", FIGURES)
def test_every_claim_can_be_judged(figure):
    names = {panel.figure for panel in panels(figure)}
    for claim in FIGURES[figure]["claims"]:
        assert len(claim.keys() & {"ratio", "fit", "held", "id"}) == 1, claim
        assert set(claim.get("panels", ())) <= names, claim
        if "id" in claim and FIGURES[figure].get("decides") != "measurement":
            assert hasattr(paper_claims, claim["id"].replace("-", "_")), claim


@pytest.mark.parametrize("figure", TRAINED)
def test_every_run_is_legal_and_has_a_name_of_its_own(figure):
    runs = grid(panels(figure))
    names = {run.name for run in runs}
    assert len(names) == len(runs) > 0
    for run in runs:
        plan = run.plan
        model = PRESETS[run.panel.model]
        heads = dict(run.panel.shape).get("heads", model.heads)
        assert plan.gpus == run.panel.gpus, run.name
        assert plan.global_batch == run.batch
        assert model.layers % plan.depth == heads % plan.tensor == 0
        assert plan.schedule != "2bw" or plan.microbatches >= plan.depth


@pytest.mark.parametrize(
    "paper_value, speeds, predicted, holds",
    [
        (2.0, [(64, 24.0, 10.0)], "6a 2.40", False),
        (2.0, [(64, 20.0, "OOM")], "no ratio: out of memory", False),
        (2.0, [(64, 11.0, 10.0), (256, 21.0, 10.0)], "6a 2.10", True),
        ("slightly more", [(64, 12.0, 10.0)], "6a 1.20", False),
        ("at most 1.33", [(64, 13.4, 10.0)], "6a 1.34", False),
    ],
)
def test_the_largest_ratio_is_compared_with_the_papers_value(
    paper_value, speeds, predicted, holds
):
    points = []
    for batch, one, two in speeds:
        points.append(Point("6a", "panel", "PipeDream-2BW", batch, one))
        points.append(Point("6a", "panel", "GPipe", batch, two))
    row = Claim("says", "source", "2")
    spec = {"ratio": ["PipeDream-2BW", "GPipe"], "panels": ["6a"]}
    judge_ratio(spec | {"paper": paper_value}, row, points)
    assert (row.predicted, row.holds) == (predicted, holds)


def judged(figure: str, tmp_path) -> list[Claim]:
    found = paper.predicted(figure, FIRST)
    return paper.judged(figure, found, {}, tmp_path, False)


def verdicts(figure: str, tmp_path) -> list[bool | None]:
    return [row.holds for row in judged(figure, tmp_path)]


class Older(TwoBW):
    """A fault: forwards run on the weights before those of the schedule."""

    def version(self, shape, stage, microbatch):
        return max(super().version(shape, stage, microbatch) - 1, shape.first)


def test_a_fault_in_the_lists_turns_the_verdict(tmp_path, monkeypatch):
    assert verdicts("2", tmp_path) == [True, True, True]
    monkeypatch.setitem(SCHEDULES, "2bw", Older())
    assert verdicts("2", tmp_path) == [False, True, False]


def test_a_larger_memory_turns_the_verdict(tmp_path, monkeypatch):
    monkeypatch.setitem(FIGURES["8"], "claims", FIGURES["8"]["claims"][:2])
    first, other = judged("8", tmp_path)
    assert first.holds and other.holds and other.turns == []
    # 15.15 GiB fit then
    assert [turn.split(":")[0] for turn in first.turns] == ["no reserve"]
    large = paper_data.named_cluster("p3dn.24xlarge")
    monkeypatch.setattr(paper_data, "named_cluster", lambda name: large)
    assert verdicts("8", tmp_path) == [False, True]


def test_a_worse_loss_turns_the_verdict(tmp_path, monkeypatch):
    assert verdicts("5", tmp_path)[0] is True
    content = paper_claims.recorded(PAPER["convergence"]["gpt"])
    for entry in content["summary"]:
        if entry["variant"] == "2bw":
            losses = entry["validation_loss"]["by_seed"]
            for seed in losses:
                losses[seed] += 0.1
    worse = tmp_path / "worse.json"
    worse.write_text(json.dumps(content))
    monkeypatch.setitem(PAPER["convergence"], "gpt", worse)
    assert verdicts("5", tmp_path)[0] is False


def by_place(points: list[Point]) -> dict[tuple, Point]:
    return {(point.series, point.x): point for point in points}


def test_a_bar_is_the_fastest_microbatch_that_fits():
    own = [panel for panel in panels("6") if panel.figure == "6a"]
    bars = by_place(paper_figures.points("6", own, {}))
    assert set(bars) == set(itertools.product(SYSTEMS, (64, 256)))
    best = bars["PipeDream-2BW", 64]
    assert best.plan.endswith("b8")
    assert best.predicted > 0 and best.gib < best.room
    speeds = {}
    for run in grid(own, ["PipeDream-2BW"]):
        if run.batch == 64:
            speeds[run.name] = {"samples_per_second": len(speeds) + 1.0}
    bars = by_place(paper_figures.points("6", own, speeds))
    assert bars["PipeDream-2BW", 64].measured == len(speeds)
    assert bars["GPipe", 64].measured == ""


def test_figure_11_has_the_largest_model():
    points = by_place(paper_figures.largest_models(FIRST))
    depths = FIGURES["11"]["depths"]
    sizes = [points["2 gradient slots", depth].predicted for depth in depths]
    assert sizes == sorted(sizes)
    assert points["1 gradient slot", 64].predicted >= sizes[-1] > 20


@pytest.mark.parametrize("figure", ["2", "4", "5", "8", "9", "10", "table2"])
def test_the_page_in_docs_is_what_the_command_writes(
    figure, tmp_path, monkeypatch, capsys
):
    words = ["--figure", figure, "--skip-measurements", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["paper.py", *words])
    assert paper.main() == 0
    assert "claims hold" in capsys.readouterr().out
    page = (tmp_path / f"figure{figure}.md").read_text()
    report = (paper.ROOT / "docs/paper/report.md").read_text()
    again = "run: python scripts/paper.py --skip-measurements --out docs/paper"
    assert page in report, again
    with open(tmp_path / f"figure{figure}.csv", newline="") as file:
        assert list(csv.DictReader(file))
    picture = f"figure{figure}.png"
    assert (f"({picture})" in page) == (tmp_path / picture).exists()
