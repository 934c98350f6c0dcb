"""megatron-2bw plan calibrate: fits a cluster to measured runs."""

from dataclasses import replace

from megatron_2bw.base.command_line import parser_of
from megatron_2bw.base.errors import Parser
from megatron_2bw.tools.planner.descriptions.cluster_file import named_cluster, to_yaml
from megatron_2bw.tools.planner.measure import calibrate as calibration
from megatron_2bw.tools.planner.measure import runs as measured

MOST = 20  # runs that are fitted to, spread over all; the others are predicted


def run_calibrate(words: list[str], prog: str) -> int:
    options = _calibrate_parser(prog).parse_args(words)
    cluster = named_cluster(options.cluster)
    runs = measured.read(options.runs)
    rows = min(len(runs), MOST)
    chosen = [index * len(runs) // rows for index in range(rows)]
    fitted_to = [runs[index] for index in chosen]
    unseen = []
    if len(fitted_to) > 1:
        unseen = calibration.cross_validated(cluster, fitted_to)
    cluster = calibration.calibrate(cluster, fitted_to)
    if unseen:
        error = min(round(calibration.bound(unseen), 3), 1.0)
        cluster = replace(cluster, device=replace(cluster.device, error=error))
    others = []
    for index, seconds in enumerate(calibration.predict(cluster, runs)):
        if index not in chosen:
            others.append(seconds / runs[index].seconds - 1)
    memory = calibration.memory_errors(cluster, runs)
    count = len(fitted_to)
    print(f"fitted to {count} of {len(runs)} runs: {cluster.device}")
    print(f"{cluster.inside} inside, {cluster.between} between servers")
    _print_errors(f"mean absolute error of the other {len(others)}", others)
    _print_errors("mean absolute error by cross-validation", unseen)
    _print_errors("memory of the heaviest stage, mean absolute error", memory)
    if options.out:
        name = f"{cluster.name}, calibrated"
        to_yaml(replace(cluster, name=name), options.out)
    return 0


def _calibrate_parser(prog: str) -> Parser:
    parser = parser_of(prog, __file__)
    assert parser.description is not None
    parser.description = parser.description.format(
        columns=", ".join(measured.COLUMNS),
        optional=", ".join(measured.OPTIONAL),
        endings=", ".join(name[1:] for name in measured.LOGS),
    )
    return parser


def _print_errors(name: str, errors: list[float]) -> None:
    if errors:
        sizes = [*map(abs, errors)]
        mean = sum(sizes) / len(sizes)
        largest = max(sizes)
        print(f"{name}: {mean:.1%}, at most {largest:.1%}")
