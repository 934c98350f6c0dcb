"""The paper's figures: the data file, the rows of the report, the command line. Nothing
is trained."""

from __future__ import annotations

import csv
import itertools
import json
import sys

import pytest

from megatron_2bw.schedules import SCHEDULES, TwoBW
from megatron_2bw.tools.planner.descriptions.model import PRESETS
from scripts import paper, paper_data, paper_figures
from scripts.paper_data import FIRST, PAPER, SYSTEMS, grid, panels
from scripts.paper_figures import Claim, Point, judge_ratio

TRAINED = [name for name, figure in PAPER["figures"].items() if "runs" in figure]


def test_the_data_has_every_figure_and_table():
    assert set(PAPER["figures"]) == {
        *map(str, range(1, 12)),
        "table1",
        "table2",
        "text",
    }
    assert set(TRAINED) == {"5", "6", "7", "8", "9", "10", "table1"}
    for figure, spec in PAPER["figures"].items():
        assert spec["title"] and spec["claims"], figure
        for claim in spec["claims"]:
            assert (
                len([kind for kind in ("ratio", "fit", "id") if kind in claim]) == 1
            ), claim
            assert claim["source"] and str(claim["paper"]), claim
            check = getattr(paper_figures, claim.get("id", "").replace("-", "_"), None)
            assert (
                spec.get("decides") == "measurement"
                or "id" not in claim
                or callable(check)
            )
            assert not set(claim.get("panels", ())) - {
                panel.figure for panel in panels(figure)
            }


@pytest.mark.parametrize("figure", TRAINED)
def test_every_run_is_legal_and_has_a_name_of_its_own(figure):
    runs = grid(panels(figure))
    assert runs and len({run.name for run in runs}) == len(runs)
    for run in runs:
        plan, model, shape = run.plan, PRESETS[run.panel.model], dict(run.panel.shape)
        assert (plan.gpus, plan.global_batch) == (run.panel.gpus, run.batch), run.name
        assert (
            model.layers % plan.depth == 0
            and shape.get("heads", model.heads) % plan.tensor == 0
        )
        assert plan.schedule != "2bw" or plan.microbatches >= plan.depth


def at(series: str, batch: int, predicted: float | str, **more: object) -> Point:
    return Point("6a", "panel", series, batch, predicted, **more)


RATIO = {"paper": 2.0, "ratio": ["PipeDream-2BW", "GPipe"], "panels": ["6a"]}


@pytest.mark.parametrize(
    "paper, speeds, predicted, holds",
    [
        (2.0, [(64, 20.0, 10.0)], "6a 2.00", True),
        (2.0, [(64, 24.0, 10.0)], "6a 2.40", False),
        (2.0, [(64, 20.0, "OOM")], "no ratio: out of memory", False),
        (2.0, [(64, 11.0, 10.0), (256, 21.0, 10.0)], "6a 2.10", True),
        ("faster", [(64, 11.0, 10.0)], "6a 1.10", True),
        ("slightly more", [(64, 12.0, 10.0)], "6a 1.20", False),
        ("slower", [(64, 11.0, 10.0)], "6a 1.10", False),
        ("at most 1.33", [(64, 13.4, 10.0)], "6a 1.34", False),
    ],
)
def test_the_largest_ratio_is_compared_with_the_papers_value(
    paper, speeds, predicted, holds
):
    row = Claim("says", "source", "2")
    pairs = [
        (at("PipeDream-2BW", batch, one), at("GPipe", batch, two))
        for batch, one, two in speeds
    ]
    judge_ratio({**RATIO, "paper": paper}, row, list(itertools.chain(*pairs)))
    assert row.predicted == predicted and row.holds is holds


def judged(figure: str, tmp_path) -> dict[str, Claim]:
    found = paper.predicted(figure, FIRST)
    return {row.says: row for row in paper.judged(figure, found, {}, tmp_path, False)}


class Older(TwoBW):
    """A fault: forwards run on the weights before those of the schedule."""

    def version(self, shape, stage, microbatch):
        return max(super().version(shape, stage, microbatch) - 1, shape.first)


def test_a_planted_fault_turns_the_verdict_that_it_must(tmp_path, monkeypatch):
    """In the lists, in a constant of the cost model, and in a measurement."""
    lists = [row.holds for row in judged("2", tmp_path).values()]
    monkeypatch.setitem(SCHEDULES, "2bw", Older())
    assert lists == [True] * 3 and [
        row.holds for row in judged("2", tmp_path).values()
    ] == [False, True, False]

    monkeypatch.setitem(
        PAPER["figures"]["8"], "claims", PAPER["figures"]["8"]["claims"][:2]
    )
    first, other = judged("8", tmp_path).values()
    # 15.15 GiB fit then
    assert first.holds and [turn.split(":")[0] for turn in first.turns] == [
        "no reserve"
    ]
    assert other.holds and other.turns == []
    large = paper_data.named_cluster("p3dn.24xlarge")
    monkeypatch.setattr(paper_data, "named_cluster", lambda name: large)
    assert [row.holds for row in judged("8", tmp_path).values()] == [False, True]

    losses, (say, *_) = (
        (paper.ROOT / PAPER["convergence"]["gpt"]).read_text(),
        judged("5", tmp_path),
    )
    content = json.loads(losses)
    for entry in content["summary"]:
        if entry["variant"] == "2bw":
            own = entry["validation_loss"]["by_seed"]
            entry["validation_loss"]["by_seed"] = {
                seed: loss + 0.1 for seed, loss in own.items()
            }
    (tmp_path / "worse.json").write_text(json.dumps(content))
    before = judged("5", tmp_path)[say].holds
    monkeypatch.setitem(PAPER["convergence"], "gpt", tmp_path / "worse.json")
    assert before is True and judged("5", tmp_path)[say].holds is False


def test_a_bar_is_the_fastest_microbatch_that_fits():
    own = [panel for panel in panels("6") if panel.figure == "6a"]
    found = {
        (point.series, point.x): point for point in paper_figures.points("6", own, {})
    }
    assert set(found) == set(itertools.product(SYSTEMS, (64, 256)))
    best = found["PipeDream-2BW", 64]
    assert (
        best.plan.endswith("b8")
        and isinstance(best.predicted, float)
        and best.gib < best.room
    )
    names = [run.name for run in grid(own, ["PipeDream-2BW"]) if run.batch == 64]
    speeds = {
        name: {"samples_per_second": float(place)}
        for place, name in enumerate(names, 1)
    }
    again = {
        (point.series, point.x): point
        for point in paper_figures.points("6", own, speeds)
    }
    assert (
        again["PipeDream-2BW", 64].measured == len(names)
        and again["GPipe", 64].measured == ""
    )


def test_figure_11_has_the_largest_model_and_jobs_around_it():
    found = {
        (point.series, point.x): point for point in paper_figures.largest_models({})
    }
    sizes = [
        found["2 gradient slots", depth].predicted
        for depth in PAPER["figures"]["11"]["depths"]
    ]
    assert (
        sizes == sorted(sizes)
        and found["1 gradient slot", 64].predicted >= sizes[-1] > 20
    )
    fits = {}
    for run in grid(paper_figures.largest_panels()):
        shape = dict(run.panel.shape)
        assert shape["layers"] % run.plan.depth == 0 and run.plan.gpus == 64
        fits.setdefault(run.plan.depth, []).append(run.cost.fits(run.plan))
    assert set(map(tuple, fits.values())) == {(True, False)}
    rows = [
        run.row() | {"status": "completed"}
        for run in grid(paper_figures.largest_panels()[:1])
    ]
    (point, *_) = [
        p
        for p in paper_figures.largest_models({"a": rows[0]})
        if p.series == "2 gradient slots"
    ]
    assert point.measured == pytest.approx(point.predicted, rel=1e-12)


def call(monkeypatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["paper.py", *map(str, words)])
    return paper.main()


@pytest.mark.parametrize("figure", ["2", "4", "5", "8", "9", "10", "table2"])
def test_the_page_in_docs_is_what_the_command_writes(
    figure, tmp_path, monkeypatch, capsys
):
    assert (
        call(monkeypatch, "--figure", figure, "--skip-measurements", "--out", tmp_path)
        == 0
    )
    report = (paper.ROOT / "docs" / "paper" / "report.md").read_text()
    again = "run: python scripts/paper.py --skip-measurements --out docs/paper"
    page = (tmp_path / f"figure{figure}.md").read_text()
    assert page in report, again
    assert all(claim["says"] in page for claim in PAPER["figures"][figure]["claims"])
    with open(tmp_path / f"figure{figure}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert (
        rows
        and (f"(figure{figure}.png)" in page)
        == (tmp_path / f"figure{figure}.png").exists()
    )
    assert (
        not (tmp_path / "report.md").exists()
        and "claims hold" in capsys.readouterr().out
    )
