"""The paper's figures: the data file, the rows of the report, the command line. Nothing is trained."""

from __future__ import annotations

import csv
import itertools
import re
import sys

import pytest

from megatron_2bw.convergence import options as convergence_options
from megatron_2bw.models.model import PRESETS
from scripts import paper, paper_figures
from scripts.paper_data import PAPER, SYSTEMS, grid, panels
from scripts.paper_figures import CHECKS, Claim, Point, judge_ratio
from scripts.slurm import sweep

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


def test_every_check_decides_a_claim():
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


def test_the_sweep_and_convergence_read_the_papers_settings(tmp_path):
    options = sweep.parse(["submit", "--figure", "5", "--out", str(tmp_path), "--dry-run"])
    (one, *_) = grid(options.panels)
    variables, command = sweep.sbatch(one, tmp_path / one.name, options)
    words = " ".join(command)
    assert f"--lr {PAPER['training']['lr']} {PAPER['training']['flags'].strip()}" in words
    assert "--train-iters 300000" in words and "--time=" not in words and "--no-requeue" not in words
    assert variables["CHECKPOINTS"].endswith("checkpoints") and "openwebtext-gpt" in variables["DATA_ARGS"]
    short = sweep.parse(["submit", "--figure", "table1", "--out", str(tmp_path), "--dry-run"])
    variables, command = sweep.sbatch(grid(short.panels)[0], tmp_path, short)
    assert variables["PRECISION"] == "fp32" and "--fp16" not in command
    assert command[-4:] == ["--seq-length", "128", "--max-position-embeddings", "128"]
    chosen = convergence_options.parse(["name", "--paper", "--", "--train-iters", "100"])
    assert chosen.lr == (PAPER["training"]["lr"],)
    words = convergence_options.defaults(chosen, chosen.flags)
    assert set(PAPER["training"]["flags"].split()) <= set(words)
    assert not {"cosine", "--lr-warmup-iters"} & set(words)
    assert "cosine" in convergence_options.defaults(convergence_options.parse(["name"]), [])


def at(series: str, batch: int, predicted: float | str, **more: object) -> Point:
    return Point("6a", "panel", series, batch, predicted, **{"free": predicted} | more)


RATIO = {"paper": 2.0, "ratio": ["PipeDream-2BW", "GPipe"], "panels": ["6a"]}


@pytest.mark.parametrize(
    "points, predicted, holds",
    [
        ([at("PipeDream-2BW", 64, 20.0), at("GPipe", 64, 10.0)], "2.00 (6a at 64)", True),
        ([at("PipeDream-2BW", 64, 24.0), at("GPipe", 64, 10.0)], "2.40 (6a at 64)", False),
        ([at("PipeDream-2BW", 64, 20.0), at("GPipe", 64, "OOM")], "no ratio: out of memory", False),
        (
            [at(name, batch, speed) for name, batch, speed in (("PipeDream-2BW", 64, 11.0), ("GPipe", 64, 10.0))]
            + [at("PipeDream-2BW", 256, 21.0), at("GPipe", 256, 10.0)],
            "2.10 (6a at 256)",
            True,
        ),
    ],
)
def test_a_ratio_is_the_largest_and_has_a_bar(points, predicted, holds):
    row = Claim("says", "source", "2")
    judge_ratio(RATIO, row, points)
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


def test_megatron_numbers_the_ranks_as_figure_4_draws_them():
    from megatron.core.parallel_state import RankGenerator

    for order, replicas in (("tp-cp-ep-dp-pp", [[0, 1], [2, 3], [4, 5], [6, 7]]), ("tp-cp-ep-pp-dp", None)):
        generator = RankGenerator(tp=1, ep=1, dp=2, pp=4, cp=1, order=order)
        assert generator.get_ranks("dp") == (replicas or [[rank, rank + 4] for rank in range(4)])
    text, holds = CHECKS["placement"]([])
    assert holds and "tp-dp-pp: replicas on 1, 1 of 3" in text and "tp-pp-dp: replicas on 2, 0 of 3" in text


def call(monkeypatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["paper.py", *map(str, words)])
    return paper.main()


def test_a_figure_has_a_page_a_picture_and_a_table(tmp_path, monkeypatch, capsys):
    assert call(monkeypatch, "--figure", "8", "--skip-measurements", "--out", tmp_path) == 0
    assert (tmp_path / "figure8.png").read_bytes().startswith(b"\x89PNG") and not (tmp_path / "report.md").exists()
    page = (tmp_path / "figure8.md").read_text()
    assert page.startswith("## Figure 8: ") and "(figure8.png)" in page
    for claim in PAPER["figures"]["8"]["claims"]:
        assert claim["says"] in page
    with open(tmp_path / "figure8.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * len(SYSTEMS) and all(float(row["predicted"]) > 1 for row in rows)
    assert re.search(r"Figure 8: \d of 6 claims hold", capsys.readouterr().out)


@pytest.mark.parametrize("figure", ["2", "4", "8", "9", "10", "table2"])
def test_the_page_in_docs_is_what_the_command_writes(figure, tmp_path, monkeypatch):
    assert call(monkeypatch, "--figure", figure, "--skip-measurements", "--out", tmp_path) == 0
    report = (paper.ROOT / "docs" / "paper" / "report.md").read_text()
    again = "run: python scripts/paper.py --skip-measurements --out docs/paper"
    assert (tmp_path / f"figure{figure}.md").read_text() in report, again


@pytest.mark.parametrize(
    "words, line",
    [
        (["--figure", "12"], "--figure: 12 is not one of 1, 2, 3"),
        (["--figure", "6", "--submit"], "--submit: give --cluster"),
        (["--cluster", "p3.16xlarge"], "--cluster: give --figure, whose jobs"),
        (["--figure", "6", "--cluster", "x", "--submit", "--collect"], "--collect: it comes after --submit"),
        (["--figure", "6", "--", "--bf16"], "--bf16: it is for jobs; give --cluster"),
    ],
)
def test_wrong_flags_are_told_in_one_line(words, line, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, "--out", tmp_path / "out", *words)
    error = capsys.readouterr().err
    assert end.value.code == 2 and line in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


CLUSTER = "servers: {}\ngpus_per_server: 4\ngpu: V100-16GB\ninside: {{gb_s: 130, latency_us: 5}}\n"
CLUSTER += "between: {{gb_s: 2.5, latency_us: 50}}\n"


def test_jobs_for_ones_own_cluster(tmp_path, monkeypatch, capsys):
    mine = tmp_path / "mine.yaml"
    mine.write_text(CLUSTER.format(2))
    assert call(monkeypatch, "--figure", "6", "--cluster", mine, "--out", tmp_path / "out") == 0
    out, err = capsys.readouterr()
    left, jobs = err.splitlines(), out.splitlines()
    assert len(left) == 2 and "6b is left out: it needs 64 GPUs" in left[0] and not (tmp_path / "out").exists()
    assert len(jobs) == len(grid([panels("6")[0]])) and all("--nodes=2 --gpus-per-node=4" in line for line in jobs)
    mine.write_text(CLUSTER.format(1))
    assert call(monkeypatch, "--figure", "6", "--cluster", mine, "--out", tmp_path / "out") == 1
    assert "it has 4 GPUs, fewer than any run of figure 6" in capsys.readouterr().err
    assert call(monkeypatch, "--figure", "1", "--cluster", mine, "--out", tmp_path / "out") == 1
    assert "--figure 1: nothing of it is trained" in capsys.readouterr().err
    assert call(monkeypatch, "--figure", "8", "--collect", "--out", tmp_path / "out") == 1
    assert "--collect: nothing was submitted for figure 8" in capsys.readouterr().err
