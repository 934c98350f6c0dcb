"""Every figure and table of the PipeDream-2BW paper: predicted, measured here and on a
cluster, and its own values.

    python scripts/paper.py                                          # all of it:
    out/paper/report.md python scripts/paper.py --figure 6,8 --skip-measurements python
    scripts/paper.py --figure 6 --collect out/figure6         # with what
    scripts/slurm/sweep.py measured

Each figure gets a page, a picture and a table (CSV) in --out; report.md joins all
pages. The predictions are those of the planner's cost model. What is measured here
comes from benchmarks on this machine, a few minutes in all, or with --skip-measurements
from their recorded results.

Invariant: all settings and all of the paper's values come from scripts/paper.yaml.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.tables import table
from megatron_2bw.base.errors import Parser, UserError, names_of, run_program
from megatron_2bw.base.files import write_csv, write_whole
from megatron_2bw.run.start.torchrun import ROOT
from megatron_2bw.schedules import SCHEDULES, Shape
from megatron_2bw.tools.convergence import plot as convergence_plot
from megatron_2bw.tools.timelines.picture import draw_shapes
from scripts import paper_figures
from scripts.paper_data import FIRST, PAPER, READINGS, Panel, Reading, panels
from scripts.paper_figures import Claim, Point
from scripts.paper_picture import draw, draw_placement
from scripts.slurm import sweep

NAMES = tuple(PAPER["figures"])

# Figures 1 to 3 are timelines of the lists that the runtime executes: stacked
# schedules, each with its shape.
TIMELINES: dict[str, dict[str, Any]] = {
    "1": {
        "panels": [("gpipe", Shape(4, 4, 0, 2)), ("pipedream", Shape(4, 1, 0, 16))],
        "until": 42,
    },
    "2": {"panels": [("2bw", Shape(4, 4, 0, 4))], "versions": True},
    "3": {
        "panels": [("gpipe", Shape(2, 4, 0, 2)), ("pipedream-flush", Shape(2, 4, 0, 2))]
    },
}


def title(figure: str) -> str:
    return {"table1": "Table 1", "table2": "Table 2", "text": "The text"}.get(
        figure, f"Figure {figure}"
    )


# --- what is measured here
# --------------------------------------------------------------------------------------


@cache
def measured_rows(name: str, out: Path, fresh: bool) -> list[dict[str, Any]]:
    """The rows of a benchmark of paper.yaml; `fresh` ones are of a run now."""
    rows = []
    for part in PAPER["measured"][name]["parts"]:
        path = ROOT / part["recorded"]
        if fresh and "command" in part:
            path = out / "measured" / path.name
            command = [
                sys.executable,
                *shlex.split(part["command"]),
                "--json",
                str(path),
            ]
            print(f"paper.py: python {part['command']}", flush=True)
            if subprocess.run(command, cwd=ROOT, check=False).returncode:
                remedy = "--skip-measurements takes recorded results"
                raise UserError(
                    f"{part['command'].split()[0]} failed, see above; {remedy}"
                )
        rows += json.loads(path.read_text())["rows"]
    return rows


def measured_here(spec: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float:
    """The value that a claim takes from the rows: of one row, or the ratio of a
    pair."""

    def value(wanted: Mapping[str, Any]) -> float:
        return next(
            row[spec["of"]]
            for row in rows
            if all(row[name] == word for name, word in wanted.items())
        )

    if "row" in spec:
        return value(spec["row"])
    one, two = map(value, spec["ratio"])
    return one / two


# of Student's distribution, for so many values
T95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}


def judge_measured(
    spec: Mapping[str, Any], row: Claim, found: Mapping[str, Sequence[float]], unit: str
) -> None:
    """Fills the row with mean and interval of 95 % of each label's values. That of 2bw
    must lie below spec["most"] and the tolerance, or above spec["least"]; if it has
    values on both sides, nothing is decided."""
    texts = {}
    for label, values in found.items():
        mean, half = (
            statistics.fmean(values),
            T95[len(values)] * statistics.stdev(values) / math.sqrt(len(values)),
        )
        texts[label] = f"{mean:+.2f} ± {half:.2f}"
        if label == "2bw":
            side, value = (1, spec["most"]) if "most" in spec else (-1, spec["least"])
            beyond = side * (mean - value) - PAPER["tolerance"] * abs(value)
            row.holds = None if abs(beyond) < half else beyond <= 0
    row.here = f"{texts.pop('2bw')} {unit}"
    row.notes += [
        f"{len(values)} seeds",
        *(f"{label}: {text}" for label, text in texts.items()),
    ]


def judge_losses(
    spec: Mapping[str, Any], row: Claim, collected: Mapping[str, Mapping[str, Any]]
) -> None:
    """Figure 5, in the paper's statistic: the gap in perplexity, and the iterations
    that it stands for; by the recorded runs (docs/convergence.md)."""
    real = {
        (entry["figure"], entry["schedule"]): entry["validation_loss"]
        for entry in collected.values()
    }
    two, one = (
        real.get(pair)
        for pair in ((spec["two_bw"], "2bw"), (spec["vanilla"], "pipedream-flush"))
    )
    if one and two:
        row.on_cluster = f"{100 * (math.exp(two - one) - 1):+.2f} % perplexity"
    content = json.loads((ROOT / PAPER["convergence"][spec["task"]]).read_text())
    rows = {entry["variant"]: entry for entry in content["summary"]}
    vanilla, found = rows.pop("vanilla")["validation_loss"]["by_seed"], {}
    for variant, entry in rows.items():
        losses = entry["validation_loss"]["by_seed"]
        found[variant] = [
            100 * math.expm1(loss - vanilla[seed]) for seed, loss in losses.items()
        ]
        # of the recorded runs; megatron-2bw convergence has no lag now
        if spec["id"] == "lag":
            found[variant] = [
                100 * lag / content["iterations"]
                for lag in entry["lag_iterations"]["by_seed"].values()
            ]
    judge_measured(
        spec,
        row,
        found,
        "% of the iterations" if spec["id"] == "lag" else "% perplexity",
    )
    row.notes.append(
        f"a small model, {content['iterations']} iterations at {content['learning_rates'][0]}"
    )


def judge_accuracy(spec: Mapping[str, Any], row: Claim) -> None:
    """Table 2 in small: points of accuracy above vanilla's, of the same pretraining and
    finetuning seeds."""
    table2 = json.loads((ROOT / "docs" / "table2.json").read_text())["rows"]
    rows = {
        entry["label"]: entry["runs"]
        for entry in table2
        if entry["task"] == spec["task"]
    }
    vanilla, found = [*rows.pop("vanilla").values()], {}
    for label, runs in rows.items():
        found[label] = [
            value - other for value, other in zip(runs.values(), vanilla, strict=True)
        ]
    judge_measured(spec, row, found, f"points in `{spec['task']}`")


# --- a figure
# --------------------------------------------------------------------------------------


def judge(
    spec: Mapping[str, Any],
    row: Claim,
    figure: str,
    found: list[Point],
    reading: Reading,
) -> None:
    """Fills the row with what the cost model or the lists say."""
    if "ratio" in spec:
        paper_figures.judge_ratio(spec, row, found)
    elif "fit" in spec:
        paper_figures.judge_fit(spec, row, found)
    elif check := getattr(paper_figures, spec["id"].replace("-", "_"), None):
        row.predicted, row.holds = check(found, reading)


def judged(
    figure: str,
    found: list[Point],
    collected: Mapping[str, Any],
    out: Path,
    fresh: bool,
) -> list[Claim]:
    """The claims of a figure as rows; a prediction is judged again under each
    reading."""
    spec, rows, others = PAPER["figures"][figure], [], {}
    if spec.get("decides", "prediction") == "prediction":
        of_time = spec.get("y", "samples").startswith("samples") and figure != "11"
        others = {
            reading: predicted(figure, reading)
            for reading in READINGS
            if of_time or reading.of_memory
        }
    for claim in spec["claims"]:
        row = Claim(
            claim["says"],
            claim["source"],
            str(claim["paper"]),
            spec.get("decides", "prediction"),
        )
        rows.append(row)
        judge(claim, row, figure, found, FIRST)
        for reading, points in others.items():
            other = replace(row)
            judge(claim, other, figure, points, reading)
            if other.holds != row.holds:
                row.turns.append(f"{reading.name}: {other.predicted}")
        if figure == "5":
            judge_losses(claim, row, collected)
        if figure == "table2":
            judge_accuracy(claim, row)
        if here := claim.get("here"):
            value = measured_here(here, measured_rows(here["rows"], out, fresh))
            row.here = f"{value:.3g}"
            if isinstance(claim["paper"], (int, float)):
                row.here += (
                    " (yes)" if paper_figures.agrees(claim["paper"], value) else " (no)"
                )
        row.notes += [
            claim[name]
            for name in ("why", "note")
            if name in claim and (name == "note" or not row.holds)
        ]
    return rows


def predicted(
    figure: str,
    reading: Reading,
    own: Sequence[Panel] = (),
    collected: Mapping[str, Any] | None = None,
) -> list[Point]:
    """The points of a figure under a reading."""
    if figure == "11":
        return paper_figures.largest_models(collected or {}, reading)
    has_points = "panel" in PAPER["figures"][figure]
    return (
        paper_figures.points(figure, own or panels(figure), collected or {}, reading)
        if has_points
        else []
    )


def picture(figure: str, found: list[Point], path: Path) -> bool:
    """Draw the figure; False if it has no picture."""
    spec = PAPER["figures"][figure]
    if figure in TIMELINES:
        chosen = dict(TIMELINES[figure])
        draw_shapes(
            [(SCHEDULES[name], shape) for name, shape in chosen.pop("panels")],
            path,
            **chosen,
        )
    elif figure == "4":
        draw_placement(path, 4, 2, 2)
    elif figure == "5":
        convergence_plot.draw(
            json.loads((ROOT / PAPER["convergence"]["gpt"]).read_text()), path
        )
    elif found:
        values, dots = ({point.panel: {} for point in found} for _ in range(2))
        for point in found:
            values[point.panel][point.series, point.x] = point.predicted
            dots[point.panel][point.series, point.x] = point.measured or point.paper
        draw(values, dots, spec, path)
    else:
        return False
    return True


def claim_row(row: Claim) -> dict[str, str]:
    """As a row of the report, and of the figure's CSV if it has no numbers."""
    return {
        "claim": row.says,
        "paper": f"{row.paper} ({row.source})",
        "predicted": row.predicted or "–",
        "holds": {True: "yes", False: "**no**", None: "open"}[row.holds],
        "decided by": row.decides,
        "turns with": "; ".join(row.turns) or "–",
        "measured here": row.here or "–",
        "on the cluster": row.on_cluster or "–",
        "notes": "; ".join(row.notes),
    }


def point_row(point: Point) -> dict[str, str]:
    values = {
        "paper": point.paper,
        "predicted": point.predicted,
        "measured": point.measured,
    }
    shown = {
        name: value if isinstance(value, str) else f"{value:.4g}"
        for name, value in values.items()
    }
    return {
        "panel": point.panel,
        "series": point.series,
        "x": str(point.x),
        **shown,
        "plan": point.plan,
    }


def page(figure: str, found: list[Point], rows: list[Claim], drawn: bool) -> str:
    """The Markdown of a figure: its picture, its claims, its numbers."""
    spec, parts = PAPER["figures"][figure], []
    if drawn:
        parts.append(f"![{title(figure)}: {spec['title']}](figure{figure}.png)")
    lines = [claim_row(row) for row in rows]
    lines = [lines[0], ["---"] * len(lines[0]), *(line.values() for line in lines)]
    parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    if "assumed" in spec:
        parts.append(textwrap.fill(f"Assumed: {spec['assumed'].strip()}.", 118))
    if found:
        parts.append(table([point_row(point) for point in found]))
    return f"## {title(figure)}: {spec['title']}\n\n" + "\n\n".join(parts) + "\n"


def write_figure(figure: str, options: argparse.Namespace) -> tuple[str, list[Claim]]:
    """Write the figure's picture, table and page to --out. Returns the page and its
    claims."""
    collected, own = {}, panels(figure)
    if options.collect:
        collected = {
            row["run"]: row for row in sweep.rows(options.collect, options.warm_up)
        }
        if not collected:
            raise UserError(f"--collect {options.collect}: nothing was submitted to it")
        own = list(
            dict.fromkeys(run.panel for run, _, _ in sweep.stored(options.collect))
        )
    found = predicted(figure, FIRST, own, collected)
    rows = judged(figure, found, collected, options.out, not options.skip_measurements)
    options.out.mkdir(parents=True, exist_ok=True)
    drawn = picture(figure, found, options.out / f"figure{figure}.png")
    entries = [asdict(point) for point in found] or [claim_row(row) for row in rows]
    write_csv(options.out / f"figure{figure}.csv", entries)
    content = page(figure, found, rows, drawn)
    if options.figure != NAMES:
        write_whole(options.out / f"figure{figure}.md", content)
    return content, rows


# --- the command
# --------------------------------------------------------------------------------------


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="paper.py", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    option, folder = parser.add_argument, lambda text: Path(text).resolve()
    option(
        "--figure",
        type=names_of(NAMES),
        default=NAMES,
        metavar="NAME,...",
        help=f"of {', '.join(NAMES)} (all)",
    )
    option("--out", type=folder, default=ROOT / "out" / "paper", metavar="DIR")
    option(
        "--skip-measurements",
        action="store_true",
        help="take the recorded results of the benchmarks",
    )
    option(
        "--collect",
        type=folder,
        metavar="DIR",
        help="add what a figure's jobs measured (scripts/slurm/sweep.py)",
    )
    option(
        "--warm-up",
        type=int,
        default=10,
        metavar="N",
        help="with --collect: iterations not counted (10)",
    )
    options = parser.parse_args(words)
    if options.collect and len(options.figure) > 1:
        parser.error("--collect: give the --figure whose jobs are in it")
    return options


def run(options: argparse.Namespace) -> int:
    texts, claims = [], []
    for figure in options.figure:
        text, rows = write_figure(figure, options)
        print(
            f"{title(figure)}: {sum(row.holds is True for row in rows)} of {len(rows)} claims hold",
            flush=True,
        )
        texts.append(text)
        claims += rows
    if options.figure == NAMES:
        write_whole(options.out / "report.md", "\n".join([head(claims), *texts]))
    pages = (
        ["report.md"]
        if options.figure == NAMES
        else [f"figure{figure}.md" for figure in options.figure]
    )
    print(f"wrote {', '.join(pages)} in {options.out}")
    return 0


def head(claims: list[Claim]) -> str:
    counts = Counter((row.decides, row.holds) for row in claims)
    lines = ["| decided by | hold | do not | open |", "| --- | ---: | ---: | ---: |"]
    for way in dict.fromkeys(row.decides for row in claims):
        lines.append(
            f"| {way} | {' | '.join(str(counts[way, word]) for word in (True, False, None))} |"
        )
    turning = sum(bool(row.turns) for row in claims)
    items = [f"| {reading.name} | {reading.says} |" for reading in READINGS]
    items = ["| reading | |", "| --- | --- |", *items]
    here = (
        textwrap.fill(f"- {entry['what']}", 118, subsequent_indent="  ")
        for entry in PAPER["measured"].values()
    )
    listed, readings, measured = ("\n".join(part) for part in (lines, items, here))
    hold = f"{len(claims)} claims: {sum(row.holds is True for row in claims)} hold"
    return f"""# The paper, figure by figure

{hold}. A number holds within {PAPER["tolerance"]:.0%} of the paper's. A measured gap
holds if its interval of 95 % is not beyond that, and is open if only a part of it is.

{listed}

Predictions are of the planner's cost model for the paper's servers; nothing was run on them. {turning} of them turn
under another reading of what the text leaves open, or of a constant that has no source:

{readings}

Measured here:

{measured}
"""


def main() -> int:
    options = parse(sys.argv[1:])
    return run_program("paper.py", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
