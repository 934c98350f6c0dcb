"""Every figure and table of the PipeDream-2BW paper: predicted, measured here and on a cluster, and its own values.

    python scripts/paper.py                                          # all of it: out/paper/report.md
    python scripts/paper.py --figure 6,8 --skip-measurements
    python scripts/paper.py --figure 6 --collect out/figure6         # with what scripts/slurm/sweep.py measured

Each figure gets a page, a picture and a table (CSV) in --out; report.md joins all pages. The predictions are those of
the planner's cost model. What is measured here comes from benchmarks on this machine, a few minutes in all, or with
--skip-measurements from their recorded results.

Invariant: all settings and all of the paper's values come from scripts/paper.yaml.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.tables import table
from megatron_2bw.convergence import plot as convergence_plot
from megatron_2bw.errors import Parser, UserError, names_of, run_program
from megatron_2bw.files import write_csv, write_whole
from megatron_2bw.schedules import SCHEDULES, Shape
from megatron_2bw.start.torchrun import ROOT
from megatron_2bw.timelines.picture import draw_shapes
from scripts import paper_figures
from scripts.paper_data import PAPER, panels
from scripts.paper_figures import Claim, Point
from scripts.paper_picture import draw, draw_placement
from scripts.slurm import sweep

NAMES = tuple(PAPER["figures"])

# Figures 1 to 3 are timelines of the lists that the runtime executes: stacked schedules, each with its shape.
TIMELINES: dict[str, dict[str, Any]] = {
    "1": {"panels": [("gpipe", Shape(4, 4, 0, 2)), ("pipedream", Shape(4, 1, 0, 16))], "until": 42},
    "2": {"panels": [("2bw", Shape(4, 4, 0, 4))], "versions": True},
    "3": {"panels": [("gpipe", Shape(2, 4, 0, 2)), ("pipedream-flush", Shape(2, 4, 0, 2))]},
}


def title(figure: str) -> str:
    return {"table1": "Table 1", "table2": "Table 2", "text": "The text"}.get(figure, f"Figure {figure}")


# --- what is measured here -------------------------------------------------------------------------------------------


@cache
def measured_rows(name: str, out: Path, fresh: bool) -> list[dict[str, Any]]:
    """The rows of a benchmark of paper.yaml; `fresh` ones are of a run now."""
    rows = []
    for part in PAPER["measured"][name]["parts"]:
        path = ROOT / part["recorded"]
        if fresh and "command" in part:
            path = out / "measured" / path.name
            command = [sys.executable, *shlex.split(part["command"]), "--json", str(path)]
            print(f"paper.py: python {part['command']}", flush=True)
            if subprocess.run(command, cwd=ROOT, check=False).returncode:
                remedy = "--skip-measurements takes recorded results"
                raise UserError(f"{part['command'].split()[0]} failed, see above; {remedy}")
        rows += json.loads(path.read_text())["rows"]
    return rows


def measured_here(spec: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The value that a claim takes from the rows: of one row, of a pair of them, or the ratio of a pair."""

    def value(wanted: Mapping[str, Any]) -> float:
        return next(row[spec["of"]] for row in rows if all(row[name] == word for name, word in wanted.items()))

    if "row" in spec:
        return str(value(spec["row"]))
    one, two = map(value, spec.get("ratio") or spec["pair"])
    return f"{one / two:.2f}" if "ratio" in spec else f"{one} against {two}"


def judge_losses(spec: Mapping[str, Any], row: Claim, collected: Mapping[str, Mapping[str, Any]]) -> None:
    """Figure 5, in the paper's statistic: the gap in perplexity, and the iterations that it stands for.

    Measured here: the recorded runs (docs/convergence.md).
    """
    real = {(entry["figure"], entry["schedule"]): entry["validation_loss"] for entry in collected.values()}
    two, one = (real.get(pair) for pair in ((spec["two_bw"], "2bw"), (spec["vanilla"], "pipedream-flush")))
    if one and two:
        row.on_cluster = f"{100 * (math.exp(two - one) - 1):+.2f} % perplexity"
    recorded = PAPER["convergence"]["bert" if spec["id"] == "bert" else "gpt"]
    if not (ROOT / recorded).exists():
        row.notes.append(f"not measured: there is no {recorded}")
        return
    content = json.loads((ROOT / recorded).read_text())
    found = {entry["variant"]: entry for entry in content["summary"] if entry["lr"] == content["learning_rates"][0]}
    by_seed = {name: entry["validation_loss"]["by_seed"] for name, entry in found.items()}
    gaps = [100 * (math.exp(by_seed["2bw"][seed] - loss) - 1) for seed, loss in by_seed["vanilla"].items()]
    gap, lag = sum(gaps) / len(gaps), 100 * found["2bw"]["lag_iterations"]["of_means"] / content["iterations"]
    row.here = f"{lag:.0f} % of the iterations" if spec["id"] == "lag" else f"{gap:+.2f} % perplexity"
    count = f"{len(gaps)} seeds" if len(gaps) > 1 else "one seed"
    row.notes.append(f"small model, {content['iterations']} iterations, {count}; the same rate, warm-up and decay")
    row.holds = lag <= spec["most"] if spec["id"] == "lag" else gap <= spec["most"]


# --- a figure --------------------------------------------------------------------------------------------------------


def judged(figure: str, found: list[Point], collected: Mapping[str, Any], out: Path, fresh: bool) -> list[Claim]:
    """The claims of a figure as rows."""
    rows = []
    for spec in PAPER["figures"][figure]["claims"]:
        row = Claim(spec["says"], spec["source"], str(spec["paper"]))
        rows.append(row)
        if "ratio" in spec:
            paper_figures.judge_ratio(spec, row, found)
        elif "fit" in spec:
            paper_figures.judge_fit(spec, row, found)
        elif figure == "5":
            judge_losses(spec, row, collected)
        elif "note" not in spec or "id" in spec:
            row.predicted, row.holds = paper_figures.CHECKS[spec["id"]](found)
        if "here" in spec:
            row.here = measured_here(spec["here"], measured_rows(spec["here"]["rows"], out, fresh))
        said = {"why": row.holds is False and not row.only, "note": True}
        row.notes += [spec[name] for name, wanted in said.items() if wanted and name in spec]
    return rows


def picture(figure: str, found: list[Point], path: Path) -> bool:
    """Draw the figure; False if it has no picture."""
    spec = PAPER["figures"][figure]
    if figure in TIMELINES:
        chosen = dict(TIMELINES[figure])
        draw_shapes([(SCHEDULES[name], shape) for name, shape in chosen.pop("panels")], path, **chosen)
    elif figure == "4":
        draw_placement(path, 4, 2, 2)
    elif figure == "5" and (ROOT / PAPER["convergence"]["gpt"]).exists():
        convergence_plot.draw_recorded(ROOT / PAPER["convergence"]["gpt"], path)
    elif found:
        values, dots = ({point.panel: {} for point in found} for _ in range(2))
        for point in found:
            values[point.panel][point.series, point.x] = point.predicted
            dots[point.panel][point.series, point.x] = point.measured or point.paper
        for panel, own in values.items() if figure == "table1" else ():  # its order is compared, not its numbers
            both = {"predicted": own, "measured, or the paper's": dots.pop(panel)}
            most = {name: max(numbers.values()) for name, numbers in both.items()}
            values[panel] = {(name, x): both[name][key, x] / most[name] for name in both for key, x in own}
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
        "holds": f"only with {row.only}" if row.only else {True: "yes", False: "**no**", None: "–"}[row.holds],
        "measured here": row.here or "–",
        "on the cluster": row.on_cluster or "–",
        "notes": "; ".join(row.notes),
    }


def point_row(point: Point) -> dict[str, str]:
    values = {"paper": point.paper, "predicted": point.predicted, "other order": point.free, "measured": point.measured}
    shown = {name: value if isinstance(value, str) else f"{value:.4g}" for name, value in values.items()}
    return {"panel": point.panel, "series": point.series, "x": str(point.x), **shown, "plan": point.plan}


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
    """Write the figure's picture, table and page to --out. Returns the page and its claims."""
    collected, own = {}, panels(figure)
    if options.collect:
        collected = {row["run"]: row for row in sweep.rows(options.collect, options.warm_up)}
        if not collected:
            raise UserError(f"--collect {options.collect}: nothing was submitted to it")
        own = list(dict.fromkeys(run.panel for run, _, _ in sweep.stored(options.collect)))
    found = paper_figures.largest_models(collected) if figure == "11" else []
    if "panel" in PAPER["figures"][figure] and figure != "11":
        found = paper_figures.points(figure, own, collected)
    rows = judged(figure, found, collected, options.out, not options.skip_measurements)
    options.out.mkdir(parents=True, exist_ok=True)
    drawn = picture(figure, found, options.out / f"figure{figure}.png")
    entries = [asdict(point) for point in found] or [claim_row(row) for row in rows]
    write_csv(options.out / f"figure{figure}.csv", entries)
    content = page(figure, found, rows, drawn)
    if options.figure != NAMES:
        write_whole(options.out / f"figure{figure}.md", content)
    return content, rows


# --- the command -----------------------------------------------------------------------------------------------------


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="paper.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    option, folder = parser.add_argument, lambda text: Path(text).resolve()
    option("--figure", type=names_of(NAMES), default=NAMES, metavar="NAME,...", help=f"of {', '.join(NAMES)} (all)")
    option("--out", type=folder, default=ROOT / "out" / "paper", metavar="DIR")
    option("--skip-measurements", action="store_true", help="take the recorded results of the benchmarks")
    option("--collect", type=folder, metavar="DIR", help="add what a figure's jobs measured (scripts/slurm/sweep.py)")
    option("--warm-up", type=int, default=10, metavar="N", help="with --collect: iterations not counted (10)")
    options = parser.parse_args(words)
    if options.collect and len(options.figure) > 1:
        parser.error("--collect: give the --figure whose jobs are in it")
    return options


def run(options: argparse.Namespace) -> int:
    texts, claims = [], []
    for figure in options.figure:
        text, rows = write_figure(figure, options)
        print(f"{title(figure)}: {sum(row.holds is True for row in rows)} of {len(rows)} claims hold", flush=True)
        texts.append(text)
        claims += rows
    if options.figure == NAMES:
        write_whole(options.out / "report.md", "\n".join([head(claims), *texts]))
    pages = ["report.md"] if options.figure == NAMES else [f"figure{figure}.md" for figure in options.figure]
    print(f"wrote {', '.join(pages)} in {options.out}")
    return 0


def head(claims: list[Claim]) -> str:
    yes, only = sum(row.holds is True for row in claims), sum(bool(row.only) for row in claims)
    no = sum(row.holds is False for row in claims) - only
    items = (f"- {entry['what']}" for entry in PAPER["measured"].values())
    measured = "\n".join(textwrap.fill(item, 118, subsequent_indent="  ") for item in items)
    return f"""# The paper, figure by figure

{len(claims)} claims: {yes} hold, {only} hold with another assumption than the first, {no} do not, the others are open.
Predicted: the planner's cost model for the paper's servers; nothing was run on them. Measured here:

{measured}
"""


def main() -> int:
    options = parse(sys.argv[1:])
    return run_program("paper.py", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
