"""The paper's figures: the data file, the rows of the report, the command line. Nothing is trained."""

from __future__ import annotations

import csv
import itertools
import sys

import pytest

from megatron_2bw.models.model import PRESETS
from scripts import paper, paper_figures
from scripts.paper_data import PAPER, SYSTEMS, grid, panels
from scripts.paper_figures import CHECKS, Claim, Point, judge_ratio

TRAINED = [name for name, figure in PAPER["figures"].items() if "runs" in figure]


def test_the_data_has_every_figure_and_table():
    assert set(PAPER["figures"]) == {*map(str, range(1, 12)), "table1", "table2", "text"}
    assert set(TRAINED) == {"5", "6", "7", "8", "9", "10", "table1"}
    for figure, spec in PAPER["figures"].items():
        assert spec["title"] and spec["claims"], figure
        for claim in spec["claims"]:
            kinds = [kind for kind in ("ratio", "fit", "id") if kind in claim]
            assert len(kinds) == 1 or not kinds and claim["note"].startswith("not measured here"), claim
            assert claim["source"] and str(claim["paper"]), claim
            assert figure == "5" or "id" not in claim or claim["id"] in CHECKS
            assert not set(claim.get("panels", ())) - {panel.figure for panel in panels(figure)}
    used = {claim.get("id") for figure in PAPER["figures"].values() for claim in figure["claims"]}
    assert set(CHECKS) <= used


@pytest.mark.parametrize("figure", TRAINED)
def test_every_run_is_legal_and_has_a_name_of_its_own(figure):
    runs = grid(panels(figure))
    assert runs and len({run.name for run in runs}) == len(runs)
    for run in runs:
        plan, model, shape = run.plan, PRESETS[run.panel.model], dict(run.panel.shape)
        assert (plan.gpus, plan.global_batch) == (run.panel.gpus, run.batch), run.name
        assert model.layers % plan.depth == 0 and shape.get("heads", model.heads) % plan.tensor == 0
        assert plan.schedule != "2bw" or plan.microbatches >= plan.depth


def at(series: str, batch: int, predicted: float | str, **more: object) -> Point:
    return Point("6a", "panel", series, batch, predicted, **{"free": predicted} | more)


RATIO = {"paper": 2.0, "ratio": ["PipeDream-2BW", "GPipe"], "panels": ["6a"]}


@pytest.mark.parametrize(
    "speeds, predicted, holds",
    [
        ([(64, 20.0, 10.0)], "2.00 (6a at 64)", True),
        ([(64, 24.0, 10.0)], "2.40 (6a at 64)", False),
        ([(64, 20.0, "OOM")], "no ratio: out of memory", False),
        ([(64, 11.0, 10.0), (256, 21.0, 10.0)], "2.10 (6a at 256)", True),
    ],
)
def test_a_ratio_is_the_largest_and_has_a_bar(speeds, predicted, holds):
    row = Claim("says", "source", "2")
    pairs = [(at("PipeDream-2BW", batch, one), at("GPipe", batch, two)) for batch, one, two in speeds]
    judge_ratio(RATIO, row, list(itertools.chain(*pairs)))
    assert row.predicted.startswith(predicted) and row.holds is holds and "bar 1.7 to 2.3" in row.notes


def test_where_the_rank_order_changes_the_ratio_both_are_told():
    points = [at("PipeDream-2BW", 64, 20.0, free=30.0, measured=18.0), at("GPipe", 64, 10.0, measured=6.0)]
    row = Claim("says", "source", "2")
    judge_ratio(RATIO, row, points)
    assert row.predicted == "2.00 (6a at 64)" and row.on_cluster == "3.00"
    assert "with the faster rank order of each system: 3.00 (6a at 64)" in row.notes and row.only == ""
    low = {**RATIO, "bar": [2.9, 3.1]}
    row = Claim("says", "source", "2")
    judge_ratio(low, row, points)
    assert row.holds is False and row.only == "the faster rank order of each system"
    assert paper.claim_row(row)["holds"] == "only with the faster rank order of each system"


def test_a_bar_is_the_fastest_microbatch_that_fits():
    own = [panel for panel in panels("6") if panel.figure == "6a"]
    found = {(point.series, point.x): point for point in paper_figures.points("6", own, {})}
    assert set(found) == set(itertools.product(SYSTEMS, (64, 256)))
    best = found["PipeDream-2BW", 64]
    assert best.plan.endswith("b8") and isinstance(best.predicted, float) and best.gib < 12.64
    names = [run.name for run in grid(own, ["PipeDream-2BW"]) if run.batch == 64]
    speeds = {name: {"samples_per_second": float(place)} for place, name in enumerate(names, 1)}
    again = {(point.series, point.x): point for point in paper_figures.points("6", own, speeds)}
    assert again["PipeDream-2BW", 64].measured == len(names) and again["GPipe", 64].measured == ""


def test_gpipe_admits_as_many_microbatches_as_fit():
    """And in Figure 8 all of them, as in section 5.3."""
    (run, *_) = [run for run in grid(panels("6"), ["GPipe"]) if (run.batch, run.microbatch) == (64, 1)]
    plan = run.plan
    assert 1 < plan.gpipe_round < plan.microbatches and run.cost.fits(plan)
    assert not run.cost.fits(plan.changed(gpipe_round=plan.microbatches))
    assert f"--gpipe-round {plan.gpipe_round}" in " ".join(plan.flags("fp16"))
    assert all(run.plan.gpipe_round is None for run in grid(panels("8"), ["GPipe"]))


def test_figure_11_has_the_largest_model_and_jobs_around_it():
    found = {(point.series, point.x): point for point in paper_figures.largest_models({})}
    sizes = [found["2 gradient slots", depth].predicted for depth in PAPER["figures"]["11"]["depths"]]
    assert sizes == sorted(sizes) and found["1 gradient slot", 64].predicted >= sizes[-1] > 20
    fits = {}
    for run in grid(paper_figures.largest_panels()):
        shape = dict(run.panel.shape)
        assert shape["layers"] % run.plan.depth == 0 and run.plan.gpus == 64
        fits.setdefault(run.plan.depth, []).append(run.cost.fits(run.plan))
    assert set(map(tuple, fits.values())) == {(True, False)}
    rows = [run.row() | {"status": "completed"} for run in grid(paper_figures.largest_panels()[:1])]
    (point, *_) = [p for p in paper_figures.largest_models({"a": rows[0]}) if p.series == "2 gradient slots"]
    assert point.measured == pytest.approx(point.predicted, rel=1e-12)


def test_rows_of_benchmarks():
    rows = [{"schedule": "2bw", "m": 8, "e": 0.9}, {"schedule": "gpipe", "m": 8, "e": 0.45}]
    two, gpipe = {"schedule": "2bw", "m": 8}, {"schedule": "gpipe"}
    assert paper.measured_here({"of": "e", "ratio": [two, gpipe]}, rows) == "2.00"
    assert paper.measured_here({"of": "m", "row": gpipe}, rows) == "8"
    assert paper.measured_here({"of": "m", "pair": [two, gpipe]}, rows) == "8 against 8"


def call(monkeypatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["paper.py", *map(str, words)])
    return paper.main()


@pytest.mark.parametrize("figure", ["2", "4", "8", "9", "10", "table2"])
def test_the_page_in_docs_is_what_the_command_writes(figure, tmp_path, monkeypatch, capsys):
    assert call(monkeypatch, "--figure", figure, "--skip-measurements", "--out", tmp_path) == 0
    report = (paper.ROOT / "docs" / "paper" / "report.md").read_text()
    again = "run: python scripts/paper.py --skip-measurements --out docs/paper"
    page = (tmp_path / f"figure{figure}.md").read_text()
    assert page in report, again
    assert all(claim["says"] in page for claim in PAPER["figures"][figure]["claims"])
    with open(tmp_path / f"figure{figure}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows and (f"(figure{figure}.png)" in page) == (tmp_path / f"figure{figure}.png").exists()
    assert not (tmp_path / "report.md").exists() and "claims hold" in capsys.readouterr().out
