"""The commands that do not plan: simulate a schedule, calibrate a cluster."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megatron_2bw.base.errors import Parser, UserError, file_errors, whole
from megatron_2bw.run.flags.project_flags import extra_warmup, schedule_name
from megatron_2bw.schedules import SCHEDULES, Schedule, Shape, schedule_of
from megatron_2bw.schedules.interleaved import Interleaved
from megatron_2bw.tools.planner.descriptions.cluster_file import named_cluster, to_yaml
from megatron_2bw.tools.planner.measure import calibrate as calibration
from megatron_2bw.tools.planner.measure import runs as measured
from megatron_2bw.tools.timelines.picture import draw_shapes
from megatron_2bw.tools.timelines.simulator import (
    Times,
    busy,
    iteration_time,
    simulate,
)
from megatron_2bw.tools.timelines.text import render

INTERLEAVED = "megatron-interleaved"
TIMES = {"forward": 1.0, "backward": 2.0, "transfer": 0.0, "reduce": 0.0, "step": 0.0}


def run_simulate(words: list[str], prog: str) -> int:
    options = _simulate_parser(prog).parse_args(words)
    schedule = _schedule(options)
    times = Times(**{name: getattr(options, name) for name in TIMES})
    stages = options.stages
    microbatches = options.microbatches
    shape = Shape(stages, microbatches, 0, options.iterations)
    print(f"{options.schedule}, {stages} stages, {microbatches} microbatches a batch")
    events = simulate(schedule, shape, times)
    print(render(events, stages))
    seconds = iteration_time(schedule, stages, microbatches, times)
    share = busy(schedule, stages, microbatches, times)
    print(f"stages busy {share:.1%} in the steady state")
    print(f"an iteration takes {seconds:g}")
    if options.out is not None:
        with file_errors(f"--out {options.out}"):
            draw_shapes(
                [(schedule, shape)], options.out, times, versions=options.versions
            )
        print(f"wrote {options.out}")
    return 0


def _simulate_parser(prog: str) -> Parser:
    description = "Prints a schedule's timeline, and draws it."
    parser = Parser(prog=prog, description=description, allow_abbrev=False)
    add = parser.add_argument
    schedules = [*SCHEDULES, INTERLEAVED]
    add("--schedule", type=schedule_name, required=True, choices=schedules)
    count = whole(1)
    add("--stages", required=True, type=count, help="the pipeline's depth")
    add("--microbatches", required=True, type=count, help="of a batch")
    add("--iterations", type=count, default=2)
    chunks = f"chunks per stage of {INTERLEAVED}"
    add("--virtual", type=count, default=2, help=chunks)
    add("--gradient-slots", type=int, choices=(1, 2), default=2, help="of 2bw")
    extra = "of 2bw: extra warm-up forwards, a number per boundary between stages or one for all"
    add("--extra-warmup", type=extra_warmup, default=(), metavar="K[,K...]", help=extra)
    size = "of gpipe: microbatches of a round (default: all)"
    add("--gpipe-round", type=count, metavar="N", help=size)
    for name, default in TIMES.items():
        text = f"time (default: {default:g})"
        add(f"--{name}", type=float, default=default, help=text)
    versions = "write the weight version of each microbatch into the picture"
    add("--versions", action="store_true", help=versions)
    add("--out", type=Path, metavar="FILE.png", help="also as a picture")
    return parser


def _schedule(options: argparse.Namespace) -> Schedule:
    stages = options.stages
    interleaved = options.schedule == INTERLEAVED
    schedule = schedule_of(
        options.schedule,
        gradient_slots=options.gradient_slots,
        extra_warmup=options.extra_warmup,
        gpipe_round=options.gpipe_round,
    )
    schedule = schedule or Interleaved(options.virtual)
    if len(options.extra_warmup) not in (0, 1, stages - 1):
        raise UserError(
            f"--extra-warmup: give one number, or one for each of the {stages - 1} boundaries"
        )
    least = schedule.min_microbatches(stages)
    rest = options.microbatches % stages if interleaved else 0
    if options.microbatches < least or rest:
        wanted = f"a multiple of {stages}" if interleaved else f"{least} or more"
        raise UserError(
            f"--microbatches {options.microbatches}: {options.schedule} needs {wanted}"
        )
    return schedule


def run_calibrate(words: list[str], prog: str) -> int:
    options = _calibrate_parser(prog).parse_args(words)
    # the fit is of estimates, not of measured times
    cluster = replace(named_cluster(options.cluster), profile=None)
    runs = measured.read(options.runs)
    chosen = _chosen_rows(options, len(runs))
    fitted_to = [runs[index] for index in chosen]
    unseen = []
    if len(fitted_to) > 1:
        unseen = calibration.cross_validated(cluster, fitted_to)
    if fitted_to:
        cluster = calibration.calibrate(cluster, fitted_to)
    if unseen:
        error = round(calibration.bound(unseen), 3)
        cluster = replace(cluster, device=replace(cluster.device, error=error))
    others = []
    for index, seconds in enumerate(calibration.predict(cluster, runs)):
        if index not in chosen:
            others.append(seconds / runs[index].seconds - 1)
    memory = calibration.memory_errors(cluster, runs)
    print(f"fitted to {len(fitted_to)} of {len(runs)} runs: {cluster.device}")
    print(f"{cluster.inside} inside, {cluster.between} between servers")
    _print_errors(f"mean absolute error of the other {len(others)}", others)
    _print_errors("mean absolute error by cross-validation", unseen)
    _print_errors("memory of the heaviest stage, mean absolute error", memory)
    if options.out:
        to_yaml(replace(cluster, name=f"{cluster.name}, calibrated"), options.out)
    return 0


def _calibrate_parser(prog: str) -> Parser:
    columns = f"{', '.join(measured.COLUMNS)}; optional: {', '.join(measured.OPTIONAL)}"
    endings = ", ".join(name[1:] for name in measured.LOGS)
    description = (
        "Fits a cluster's constants to measured runs: rows of a CSV file, or logs of runs "
        f"(a log's name ends with {endings}; of a folder all logs). Columns of the CSV file: {columns}."
    )
    parser = Parser(prog=prog, description=description, allow_abbrev=False)
    add = parser.add_argument
    runs = "measured runs: a row or a log each"
    add("runs", type=Path, nargs="+", metavar="RUNS.csv|RUN_DIR|LOG", help=runs)
    add("--cluster", required=True, metavar="NAME|FILE.yaml")
    rows = "rows to fit, spread over the file (default: 20; all of logs); the others are predicted. 0 fits none"
    add("--rows", type=int, help=rows)
    add("--out", type=Path, metavar="FILE.yaml", help="the fitted cluster")
    return parser


def _chosen_rows(options: argparse.Namespace, count: int) -> list[int]:
    """The rows of `count` that are fitted to, spread over all."""
    rows = options.rows
    if rows is None:
        rows = count if any(map(measured.is_log, options.runs)) else 20
    if not 0 <= rows <= count:
        raise UserError(f"--rows {rows}: the file has {count}")
    return [index * count // rows for index in range(rows)]


def _print_errors(name: str, errors: list[float]) -> None:
    if errors:
        sizes = [*map(abs, errors)]
        print(f"{name}: {sum(sizes) / len(sizes):.1%}, at most {max(sizes):.1%}")
