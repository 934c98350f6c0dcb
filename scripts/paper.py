"""Every figure and table of the PipeDream-2BW paper: predicted, measured here and on a
cluster, and its own values.

    python scripts/paper.py                                    # all: out/paper/report.md
    python scripts/paper.py --figure 6,8 --skip-measurements
    python scripts/paper.py --figure 6 --collect out/figure6   # with sweep.py's results

Each figure gets a page, a picture and a table (CSV) in --out; report.md joins all
pages. The predictions are those of the planner's cost model. What is measured here
comes from benchmarks on this machine, a few minutes in all, or with --skip-measurements
from their recorded results.

Invariant: all settings and all of the paper's values come from scripts/paper.yaml.
"""

import inspect
import json
import sys
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.tables import markdown, table
from megatron_2bw.base.errors import Parser, UserError, list_of, run_program
from megatron_2bw.base.files import write_csv, write_whole
from megatron_2bw.run.start.torchrun import ROOT
from megatron_2bw.schedules import SCHEDULES, Shape
from megatron_2bw.tools.convergence import plot as convergence_plot
from megatron_2bw.tools.timelines.picture import draw_shapes
from scripts import paper_claims, paper_figures
from scripts.paper_data import FIRST, PAPER, READINGS, Panel, Reading, Row, panels
from scripts.paper_figures import Claim, Point
from scripts.paper_picture import draw, draw_placement
from scripts.slurm import sweep

FIGURES: dict[str, Row] = PAPER["figures"]
NAMES = tuple(FIGURES)


def title(figure: str) -> str:
    return FIGURES[figure].get("name", f"Figure {figure}")


# --- a figure
# --------------------------------------------------------------------------------------


def predicted(
    figure: str,
    reading: Reading,
    own: Sequence[Panel] = (),
    collected: Row | None = None,
) -> list[Point]:
    """The points of a figure under a reading; none if it has no numbers."""
    if figure == "11":
        return paper_figures.largest_models(reading)
    if "panel" not in FIGURES[figure]:
        return []
    return paper_figures.points(figure, own or panels(figure), collected or {}, reading)


def judge(spec: Row, row: Claim, found: list[Point], reading: Reading) -> None:
    """Fills the row with what the cost model or the lists say."""
    if "ratio" in spec:
        paper_figures.judge_ratio(spec, row, found)
    elif "fit" in spec:
        paper_figures.judge_fit(spec, row, found)
    elif "held" in spec:
        paper_claims.judge_held(spec, row)
    elif check := getattr(paper_claims, spec["id"].replace("-", "_"), None):
        inputs = {"found": found, "reading": reading}
        arguments = map(inputs.get, inspect.signature(check).parameters)
        row.predicted, row.holds = check(*arguments)


def judged(
    figure: str,
    found: list[Point],
    collected: Row,
    out: Path,
    fresh: bool,
) -> list[Claim]:
    """The claims of a figure as rows; a prediction is judged again under each
    reading."""
    spec = FIGURES[figure]
    decides = spec.get("decides", "prediction")
    others = {}
    if decides == "prediction":
        of_time = spec.get("y", "samples").startswith("samples")
        for reading in READINGS:
            if of_time or reading.of_memory:
                others[reading] = predicted(figure, reading)
    rows = []
    for claim in spec["claims"]:
        row = Claim(claim["says"], claim["source"], str(claim["paper"]), decides)
        judge(claim, row, found, FIRST)
        for reading, points in others.items():
            other = replace(row)
            judge(claim, other, points, reading)
            if other.holds != row.holds:
                row.turns.append(f"{reading.name}: {other.predicted}")
        if figure == "5":
            paper_claims.judge_losses(claim, row, collected)
        elif figure == "table2":
            paper_claims.judge_accuracy(claim, row)
        if "here" in claim:
            rows_here = paper_claims.measured_rows(claim["here"]["rows"], out, fresh)
            row.here = shown_here(
                claim, paper_claims.measured_value(claim["here"], rows_here)
            )
        if "why" in claim and not row.holds:
            row.notes.append(claim["why"])
        if "note" in claim:
            row.notes.append(claim["note"])
        rows.append(row)
    return rows


def shown_here(claim: Row, value: float) -> str:
    """The value, and whether it agrees with the paper's if that is a number."""
    if isinstance(claim["paper"], str):
        return f"{value:.3g}"
    agrees = paper_figures.agrees(claim["paper"], value)
    return f"{value:.3g} ({'yes' if agrees else 'no'})"


def picture(figure: str, found: list[Point], path: Path) -> bool:
    """Draw the figure; False if it has no picture."""
    spec = FIGURES[figure]
    if "timelines" in spec:
        options = dict(spec["timelines"])
        shapes = options.pop("panels").items()
        stacked = [(SCHEDULES[name], Shape(*sizes)) for name, sizes in shapes]
        draw_shapes(stacked, path, **options)
    elif figure == "4":
        draw_placement(path)
    elif figure == "5":
        recorded = ROOT / PAPER["convergence"]["gpt"]
        convergence_plot.draw(json.loads(recorded.read_text()), path)
    elif found:
        draw(found, spec, path)
    else:
        return False
    return True


def claim_row(row: Claim) -> dict[str, str]:
    """A row of the report, and of the figure's CSV if it has no numbers."""
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
    return {
        "panel": point.panel,
        "series": point.series,
        "x": str(point.x),
        "paper": number(point.paper),
        "predicted": number(point.predicted),
        "measured": number(point.measured),
        "plan": point.plan,
    }


def number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def page(figure: str, found: list[Point], rows: list[Claim], drawn: bool) -> str:
    """The Markdown of a figure: its picture, its claims, its numbers."""
    spec = FIGURES[figure]
    heading = f"{title(figure)}: {spec['title']}"
    parts = [f"## {heading}"]
    if drawn:
        parts.append(f"![{heading}](figure{figure}.png)")
    parts.append(markdown(map(claim_row, rows)))
    if "assumed" in spec:
        parts.append(textwrap.fill(f"Assumed: {spec['assumed'].strip()}.", 118))
    if found:
        parts.append(table([point_row(point) for point in found]))
    return "\n\n".join(parts) + "\n"


def write_figure(figure: str, options: Namespace) -> tuple[str, list[Claim]]:
    """Write the figure's picture, table and page to --out. Returns the page and its
    claims."""
    own = panels(figure)
    collected = {}
    if options.collect:
        for row in sweep.rows(options.collect):
            collected[row["run"]] = row
        if not collected:
            raise UserError(f"--collect {options.collect}: nothing was submitted to it")
        stored = sweep.stored(options.collect)
        own = list(dict.fromkeys(run.panel for run, _, _ in stored))
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


def parse(words: Sequence[str]) -> Namespace:
    parser = Parser(
        prog="paper.py", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    option = parser.add_argument
    meaning = f"of {', '.join(NAMES)} (all)"
    option("--figure", type=list_of(NAMES), default=NAMES, help=meaning)
    option("--out", type=Path, default=ROOT / "out" / "paper")
    meaning = "take the recorded results of the benchmarks"
    option("--skip-measurements", action="store_true", help=meaning)
    meaning = "add what a figure's jobs measured (scripts/slurm/sweep.py)"
    option("--collect", type=Path, metavar="DIR", help=meaning)
    options = parser.parse_args(words)
    options.out = options.out.resolve()
    if options.collect and len(options.figure) > 1:
        parser.error("--collect: give the --figure whose jobs are in it")
    return options


def holding(claims: list[Claim]) -> int:
    return [claim.holds for claim in claims].count(True)


def run(options: Namespace) -> None:
    texts = []
    claims = []
    for figure in options.figure:
        text, rows = write_figure(figure, options)
        held = holding(rows)
        print(f"{title(figure)}: {held} of {len(rows)} claims hold", flush=True)
        texts.append(text)
        claims += rows
    pages = ", ".join(f"figure{figure}.md" for figure in options.figure)
    if options.figure == NAMES:
        pages = "report.md"
        write_whole(options.out / pages, "\n".join([head(claims), *texts]))
    print(f"wrote {pages} in {options.out}")


def head(claims: list[Claim]) -> str:
    counts = {}
    for row in claims:
        new = {"decided by": row.decides, "hold": 0, "do not": 0, "open": 0}
        count = counts.setdefault(row.decides, new)
        count[{True: "hold", False: "do not", None: "open"}[row.holds]] += 1
    readings = [{"reading": reading.name, "": reading.says} for reading in READINGS]
    measured = []
    for entry in PAPER["measured"].values():
        item = f"- {entry['what']}"
        measured.append(textwrap.fill(item, 118, subsequent_indent="  "))
    return HEAD.format(
        count=len(claims),
        held=holding(claims),
        tolerance=PAPER["tolerance"],
        listed=markdown(counts.values()),
        turning=sum(bool(row.turns) for row in claims),
        readings=markdown(readings),
        measured="\n".join(measured),
    )


HEAD = """# The paper, figure by figure

{count} claims: {held} hold. A number holds within {tolerance:.0%} of the paper's. A measured gap
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
