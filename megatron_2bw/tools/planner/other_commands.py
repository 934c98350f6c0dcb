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
from megatron_2bw.tools.timelines.simulator import Times, iteration_time, simulate
from megatron_2bw.tools.timelines.text import render

INTERLEAVED = "megatron-interleaved"
TIMES = {"forward": 1.0, "backward": 2.0, "transfer": 0.0, "reduce": 0.0, "step": 0.0}


def run_simulate(words: list[str], prog: str) -> int:
    parser = Parser(
        prog=prog,
        description="Prints a schedule's timeline, and draws it.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--schedule",
        type=schedule_name,
        required=True,
        choices=[*SCHEDULES, INTERLEAVED],
    )
    add("--stages", required=True, type=whole(1), help="the pipeline's depth")
    add("--microbatches", required=True, type=whole(1), help="of a batch")
    add("--iterations", type=whole(1), default=2)
    add(
        "--virtual", type=whole(1), default=2, help=f"chunks per stage of {INTERLEAVED}"
    )
    add("--gradient-slots", type=int, choices=(1, 2), default=2, help="of 2bw")
    extra = "of 2bw: extra warm-up forwards, a number per boundary between stages or one for all"
    add("--extra-warmup", type=extra_warmup, default=(), metavar="K[,K...]", help=extra)
    add(
        "--gpipe-round",
        type=whole(1),
        metavar="N",
        help="of gpipe: microbatches of a round (default: all)",
    )
    for name, default in TIMES.items():
        add(
            f"--{name}",
            type=float,
            default=default,
            help=f"time (default: {default:g})",
        )
    add(
        "--versions",
        action="store_true",
        help="print the weight version of each microbatch",
    )
    add("--columns", type=whole(1), default=140)
    add("--out", type=Path, metavar="FILE.png", help="also as a picture")
    options = parser.parse_args(words)
    schedule, times = (
        _schedule(options),
        Times(**{name: getattr(options, name) for name in TIMES}),
    )
    stages, microbatches, versions = (
        options.stages,
        options.microbatches,
        options.versions,
    )
    shape = Shape(stages, microbatches, 0, options.iterations)
    print(f"{options.schedule}, {stages} stages, {microbatches} microbatches a batch")
    print(
        render(
            simulate(schedule, shape, times),
            stages,
            columns=options.columns,
            versions=versions,
        )
    )
    print(
        f"an iteration takes {iteration_time(schedule, stages, microbatches, times):g}"
    )
    if options.out is not None:
        with file_errors(f"--out {options.out}"):
            draw_shapes([(schedule, shape)], options.out, times, versions=versions)
        print(f"wrote {options.out}")
    return 0


def _schedule(options: argparse.Namespace) -> Schedule:
    chosen = {
        name: getattr(options, name)
        for name in ("gradient_slots", "extra_warmup", "gpipe_round")
    }
    schedule = schedule_of(options.schedule, **chosen) or Interleaved(options.virtual)
    if len(options.extra_warmup) not in (0, 1, options.stages - 1):
        raise UserError(
            "--extra-warmup: give one number, or one for each of the "
            f"{options.stages - 1} boundaries"
        )
    least = schedule.min_microbatches(options.stages)
    if options.microbatches < least or (
        options.schedule == INTERLEAVED and options.microbatches % options.stages
    ):
        wanted = (
            f"{least} or more"
            if options.schedule != INTERLEAVED
            else f"a multiple of {options.stages}"
        )
        raise UserError(
            f"--microbatches {options.microbatches}: {options.schedule} needs {wanted}"
        )
    return schedule


def run_calibrate(words: list[str], prog: str) -> int:
    columns = f"{', '.join(measured.COLUMNS)}; optional: {', '.join(measured.OPTIONAL)}"
    description = (
        "Fits a cluster's constants to measured runs: rows of a CSV file, or "
        "logs of runs (a log's name ends with "
        f"{', '.join(name[1:] for name in measured.LOGS)}; of a folder all logs). "
        f"Columns of the CSV file: {columns}."
    )
    parser = Parser(prog=prog, description=description, allow_abbrev=False)
    add = parser.add_argument
    add(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUNS.csv|RUN_DIR|LOG",
        help="measured runs: a row or a log each",
    )
    add("--cluster", required=True, metavar="NAME|FILE.yaml")
    rows = (
        "rows to fit, spread over the file (default: 20; all of logs); the others "
        "are predicted. 0 fits none"
    )
    add("--rows", type=int, help=rows)
    add("--out", type=Path, metavar="FILE.yaml", help="the fitted cluster")
    options = parser.parse_args(words)
    # the fit is of estimates, not of measured times
    cluster = replace(named_cluster(options.cluster), profile=None)
    runs = measured.read(options.runs)
    logs = any(
        path.is_dir() or f"*{path.suffix}" in measured.LOGS for path in options.runs
    )
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
        cluster = replace(
            cluster,
            device=replace(cluster.device, error=round(calibration.bound(unseen), 3)),
        )
    predicted = calibration.predict(cluster, runs)
    others = [
        p / run.seconds - 1
        for i, (p, run) in enumerate(zip(predicted, runs))
        if i not in chosen
    ]
    print(f"fitted to {len(chosen)} of {len(runs)} runs: {cluster.device}")
    print(f"{cluster.inside} inside, {cluster.between} between servers")
    for what, errors in (
        (f"mean absolute error of the other {len(others)}", others),
        ("mean absolute error by cross-validation", unseen),
        (
            "memory of the heaviest stage, mean absolute error",
            calibration.memory_errors(cluster, runs),
        ),
    ):
        if errors:
            print(
                f"{what}: {sum(map(abs, errors)) / len(errors):.1%}, at most "
                f"{max(map(abs, errors)):.1%}"
            )
    if options.out:
        to_yaml(replace(cluster, name=f"{cluster.name}, calibrated"), options.out)
    return 0
