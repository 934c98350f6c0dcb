"""Fits a cluster's constants to a few measured iteration times. SciPy only.

Least squares of the logarithms of the times, with the preset as a prior: a constant on
which no run depends keeps its value. The loss is Cauchy's, so that one wrong row has
little weight. Invariant: the constants keep their physical meaning, so one fit serves
all plans and models.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_2bw.base.errors import UserError
from megatron_2bw.tools.planner.cost.memory import GIB
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions.cluster import OF_FEWER, Cluster
from megatron_2bw.tools.planner.measure.runs import MeasuredRun

DEVICE = (
    "gemm_efficiency",
    "memory_efficiency",
    "layer_launch_us",
    "collective_launch_us",
    "exchange_us",
    "step_us",
)
LINK = ("gb_s", "latency_us")
# Standard deviations of a time about the model's and a constant about the preset's, in
# logs. NOISE and LARGE are chosen on draws of 20 of vTrain's 1,440 rows and on
# SimuMax's 12 of a 70B.
NOISE = 0.045
PRIOR = 0.5
# errors of so many standard deviations have half of the weight of small ones
LARGE = 2.5
SHARE_LIMIT = 0.95  # of the peak and of the bandwidth


def predict(cluster: Cluster, runs: Sequence[MeasuredRun]) -> list[float]:
    """Seconds per iteration of each run on `cluster`, with the run's number of
    servers."""
    pairs = zip(_costs(cluster, runs), runs)
    return [cost.seconds(run.plan) for cost, run in pairs]


def _costs(cluster: Cluster, runs: Sequence[MeasuredRun]) -> list[Cost]:
    """The cost of each run's model; equal ones are one object."""
    known = {}
    costs = []
    for run in runs:
        servers = -(-run.plan.gpus // cluster.gpus_per_server)
        key = (run.model, servers, run.precision, run.flash)
        if key not in known:
            known[key] = Cost(
                model=run.model,
                cluster=replace(cluster, servers=servers),
                precision=run.precision,
                flash=run.flash,
            )
        costs.append(known[key])
    return costs


def calibrate(cluster: Cluster, runs: Sequence[MeasuredRun]) -> Cluster:
    """`cluster` with the constants that fit `runs` best. Links between servers are
    fitted only if runs use them.

    UserError if SciPy is missing.
    """
    import numpy as np

    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise UserError(
            "calibrate needs SciPy: pip install 'scipy>=1.16', or megatron_2bw[calibrate]"
        ) from None
    names = [("device", name) for name in DEVICE]
    names += [("inside", name) for name in LINK]
    if cluster.device.attention_efficiency and any(run.flash for run in runs):
        names.append(("device", "attention_efficiency"))
    if any(run.plan.gpus > cluster.gpus_per_server for run in runs):
        names += [("between", name) for name in LINK]
    logs = np.log([run.seconds for run in runs])

    def build(x) -> Cluster:
        built = cluster
        for (part, name), factor in zip(names, np.exp(x)):
            old = getattr(built, part)
            values = {}
            for each in (name, *OF_FEWER) if name == "gb_s" else (name,):
                values[each] = float(getattr(old, each) * factor)
            if name.endswith("efficiency"):
                values[name] = min(values[name], SHARE_LIMIT)
            built = replace(built, **{part: replace(old, **values)})
        return built

    def errors(x):
        predicted = np.log(predict(build(x), runs))
        of_times = (predicted - logs) / NOISE
        return np.concatenate([of_times, x / PRIOR])

    start = np.zeros(len(names))
    fit = least_squares(errors, start, loss="cauchy", f_scale=LARGE, x_scale="jac")
    fitted = build(fit.x)
    source = f"fitted to {len(runs)} measured runs"
    return replace(fitted, device=replace(fitted.device, calibration=source))


def cross_validated(
    cluster: Cluster, runs: Sequence[MeasuredRun], parts: int = 5
) -> list[float]:
    """Predicted over measured, less one, of each run by a fit to the runs outside its
    part. Of `parts` parts each has every `parts`-th run; there are at most as many as
    runs. At least two runs."""
    parts = min(parts, len(runs))
    errors = [0.0] * len(runs)
    for part in range(parts):
        others = [run for index, run in enumerate(runs) if index % parts != part]
        left_out = runs[part::parts]
        predicted = predict(calibrate(cluster, others), left_out)
        for place, seconds in enumerate(predicted):
            error = seconds / left_out[place].seconds - 1
            errors[part + place * parts] = error
    return errors


def bound(errors: Sequence[float]) -> float:
    """The size below which 90 % of the errors are."""
    sizes = sorted(map(abs, errors))
    most = math.ceil(0.9 * len(errors))
    return sizes[most - 1]


def memory_errors(cluster: Cluster, runs: Sequence[MeasuredRun]) -> list[float]:
    """Predicted over measured memory of the heaviest stage, less one, of the runs with
    a measured one."""
    errors = []
    for cost, run in zip(_costs(cluster, runs), runs):
        if run.memory:
            predicted = cost.memory.heaviest(run.plan) / GIB
            errors.append(predicted / run.memory - 1)
    return errors
