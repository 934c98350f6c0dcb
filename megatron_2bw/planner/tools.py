"""The commands that do not plan: simulate a schedule, calibrate a cluster."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron_2bw.errors import Parser, UserError
from megatron_2bw.flags.own import extra_warmup, whole
from megatron_2bw.models.cluster import to_yaml
from megatron_2bw.models.inputs import named_cluster
from megatron_2bw.planner.measure import calibrate as calibration
from megatron_2bw.planner.measure import runs as measured
from megatron_2bw.schedules import SCHEDULES, Schedule, Shape, schedule_of
from megatron_2bw.schedules.interleaved import Interleaved
from megatron_2bw.timelines import paper_figures
from megatron_2bw.timelines.simulator import Times, iteration_time, simulate
from megatron_2bw.timelines.text import render

TIMES = {"forward": 1.0, "backward": 2.0, "transfer": 0.0, "reduce": 0.0, "step": 0.0}
SHORTEST, LONGEST = 1e-9, 1e9  # times; a float holds every sum of them
STAGES, FORWARDS = 1_000, 20_000  # of one timeline, which takes seconds


def run_simulate(words: list[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Prints a schedule's timeline, and draws it.", allow_abbrev=False)
    add = parser.add_argument
    add("--figure", choices=("1", "2", "3"), help="of the paper, instead of the flags below")
    add("--schedule", choices=[*SCHEDULES, "megatron-interleaved"], help="the schedule to simulate")
    add("--stages", type=int, help="the pipeline's depth")
    add("--microbatches", type=int, help="of a batch")
    add("--iterations", type=int, default=2)
    add("--virtual", type=int, default=2, help="chunks per stage of megatron-interleaved")
    add("--gradient-slots", type=int, choices=(1, 2), default=2, help="of 2bw")
    extra = "of 2bw: extra warm-up forwards, a number per boundary between stages or one for all"
    add("--extra-warmup", type=extra_warmup, default=(), metavar="K[,K...]", help=extra)
    add("--gpipe-round", type=whole(1), metavar="N", help="of gpipe: microbatches of a round (default: all)")
    for name, default in TIMES.items():
        add(f"--{name}", type=float, default=default, help=f"time (default: {default:g})")
    add("--versions", action="store_true", help="print the weight version of each microbatch")
    add("--columns", type=int, default=140)
    add("--out", type=Path, metavar="FILE.png", help="also as a picture")
    options = parser.parse_args(words)
    typed = [name for name, value in vars(options).items() if value != parser.get_default(name)]
    if options.figure:
        for name in typed:
            if name not in ("figure", "out"):
                parser.error(f"--{name.replace('_', '-')} has no effect with --figure: leave it out")
        paper_figures.print_figure(int(options.figure))
        _draw(options.out, lambda: paper_figures.draw_figure(int(options.figure), options.out))
        return 0
    for name, only in (("virtual", "megatron-interleaved"), ("gradient_slots", "2bw")):
        if name in typed and options.schedule not in (None, only):
            parser.error(f"--{name.replace('_', '-')} has no effect without --schedule {only}: leave it out")
    for name in ("schedule", "stages", "microbatches"):
        if getattr(options, name) is None:
            parser.error(f"--{name} is missing (or give --figure 1, 2 or 3)")
    given = vars(options)
    for name in ("stages", "microbatches", "iterations", "virtual", "columns"):
        most = STAGES if name == "stages" else FORWARDS
        if not 1 <= given[name] <= most:
            parser.error(f"--{name} must be from 1 to {most}, not {given[name]}")
    factors = ["stages", "microbatches", "iterations", *["virtual"] * (options.schedule == "megatron-interleaved")]
    forwards = math.prod(given[name] for name in factors)
    if forwards > FORWARDS:
        flags = " x ".join(f"--{name}" for name in factors)
        parser.error(f"{flags} makes {forwards} forwards: at most {FORWARDS} are simulated")
    for name in TIMES:
        if given[name] != 0 and not SHORTEST <= given[name] <= LONGEST:
            parser.error(f"--{name} must be a time, 0 or from {SHORTEST:g} to {LONGEST:g}, not {given[name]:g}")
    if options.forward + options.backward == 0:
        parser.error("--forward and --backward must not both be 0")
    _simulate(options, _schedule(options, parser))
    return 0


def _schedule(options: argparse.Namespace, parser: Parser) -> Schedule:
    extra, boundaries = options.extra_warmup, options.stages - 1
    if extra and (options.schedule != "2bw" or not boundaries):
        parser.error("--extra-warmup has no effect without --schedule 2bw and several stages: leave it out")
    if len(extra) not in (0, 1, boundaries):
        parser.error(f"--extra-warmup: give one number, or one for each of the {boundaries} boundaries between stages")
    if options.gpipe_round is not None and options.schedule != "gpipe":
        parser.error("--gpipe-round has no effect without --schedule gpipe: leave it out")
    if (options.gpipe_round or 0) > options.microbatches:
        parser.error(f"--gpipe-round {options.gpipe_round} is more than --microbatches {options.microbatches}")
    schedule = schedule_of(
        options.schedule, gradient_slots=options.gradient_slots, extra_warmup=extra, gpipe_round=options.gpipe_round
    )
    if schedule is None:
        schedule = Interleaved(options.virtual)
        if options.microbatches % options.stages:
            parser.error("--microbatches must be a multiple of --stages with megatron-interleaved")
    least = schedule.min_microbatches(options.stages)
    if options.microbatches < least:
        sizes = f"{options.stages} stages" + (" and --extra-warmup" if any(extra) else "")
        parser.error(f"--microbatches {options.microbatches}: {options.schedule} needs {least} with {sizes}")
    return schedule


def _simulate(options: argparse.Namespace, schedule: Schedule) -> None:
    from megatron_2bw.timelines.picture import draw_shapes

    times = Times(**{name: getattr(options, name) for name in TIMES})
    shape = Shape(options.stages, options.microbatches, 0, options.iterations)
    print(f"{options.schedule}, {options.stages} stages, {options.microbatches} microbatches a batch")
    print(render(simulate(schedule, shape, times), options.stages, columns=options.columns, versions=options.versions))
    print(f"an iteration takes {iteration_time(schedule, options.stages, options.microbatches, times):g}")
    _draw(options.out, lambda: draw_shapes([(schedule, shape)], options.out, times, versions=options.versions))


def _draw(path: Path | None, draw: Callable[[], object]) -> None:
    """Draw to `path` if it was given."""
    if path is None:
        return
    try:
        draw()
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not have
        raise UserError(f"--out {path}: {getattr(error, 'strerror', None) or error}") from None
    print(f"wrote {path}")


def run_calibrate(words: list[str], prog: str) -> int:
    columns = f"{', '.join(measured.COLUMNS)}; optional: {', '.join(measured.OPTIONAL)}"
    description = (
        "Fits a cluster's constants to measured runs: rows of a CSV file, or logs of runs (a log's name ends with "
        f"{', '.join(name[1:] for name in measured.LOGS)}; of a folder all logs). Columns of the CSV file: {columns}."
    )
    parser = Parser(prog=prog, description=description, allow_abbrev=False)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUNS.csv|RUN_DIR|LOG", help="measured runs: a row or a log each")
    add("--cluster", required=True, metavar="NAME|FILE.yaml")
    rows = "rows to fit, spread over the file (default: 20; all of logs); the others are predicted. 0 fits none"
    add("--rows", type=int, help=rows)
    add("--out", type=Path, metavar="FILE.yaml", help="the fitted cluster")
    add("--predictions", type=Path, metavar="FILE.csv", help="the runs with their predicted seconds")
    options = parser.parse_args(words)
    cluster = replace(named_cluster(options.cluster), profile=None)  # the fit is of estimates, not of measured times
    runs = measured.read(options.runs)
    logs = any(path.is_dir() or f"*{path.suffix}" in measured.LOGS for path in options.runs)
    rows = options.rows if options.rows is not None else len(runs) if logs else 20
    if not 0 <= rows <= len(runs):
        parser.error(f"--rows {rows}: the file has {len(runs)}")
    chosen = {index * len(runs) // rows for index in range(rows)}
    fitted_to, unseen = [runs[index] for index in sorted(chosen)], []
    if len(fitted_to) > 1:
        unseen = calibration.cross_validated(cluster, fitted_to)
    if chosen:
        cluster = calibration.calibrate(cluster, fitted_to)
    if unseen:
        cluster = replace(cluster, device=replace(cluster.device, error=round(calibration.bound(unseen), 3)))
    predicted = calibration.predict(cluster, runs)
    others = [p / run.seconds - 1 for i, (p, run) in enumerate(zip(predicted, runs)) if i not in chosen]
    print(f"fitted to {len(chosen)} of {len(runs)} runs: {cluster.device}")
    print(f"{cluster.inside} inside, {cluster.between} between servers")
    for what, errors in (
        (f"mean absolute error of the other {len(others)}", others),
        ("mean absolute error by cross-validation", unseen),
        ("memory of the heaviest stage, mean absolute error", calibration.memory_errors(cluster, runs)),
    ):
        if errors:
            print(f"{what}: {sum(map(abs, errors)) / len(errors):.1%}, at most {max(map(abs, errors)):.1%}")
    if options.out:
        to_yaml(replace(cluster, name=f"{cluster.name}, calibrated"), options.out)
    if options.predictions:
        measured.write_predictions(runs, predicted, options.predictions)
    return 0
