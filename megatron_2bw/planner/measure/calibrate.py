"""Fits a cluster's constants to a few measured iteration times. NumPy only.

Gauss-Newton on the logarithms of the times, with the preset as a prior: a constant on which no run depends keeps its
value. The errors have Student's t distribution, so that one wrong row has little weight; the weights follow the errors
(iteratively reweighted least squares). Invariant: the constants keep their physical meaning, so one fit serves all
plans and models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_2bw.models.cluster import OF_FEWER, Cluster
from megatron_2bw.planner.cost.memory import GIB
from megatron_2bw.planner.cost.simulated import Cost
from megatron_2bw.planner.measure.runs import Run

DEVICE = ("gemm_efficiency", "memory_efficiency", "layer_launch_us", "collective_launch_us", "exchange_us", "step_us")
LINK = ("gb_s", "latency_us")
# Standard deviations of a time about the model's and a constant about the preset's, in logs. NOISE is chosen on draws
# of 20 of vTrain's 1,440 rows: of 0.03, 0.05, 0.07 and 0.1 it predicts the other rows best.
NOISE, PRIOR = 0.05, 0.5
FREEDOM = 4  # degrees of freedom of Student's t; an error of 50 % has a twentieth of the weight of none
SHARE_LIMIT = 0.95  # of the peak and of the bandwidth


def predict(cluster: Cluster, runs: Sequence[Run]) -> list[float]:
    """Seconds per iteration of each run on `cluster`, with the run's number of servers."""
    costs: dict[tuple, Cost] = {}
    seconds = []
    for run in runs:
        servers = -(-run.plan.gpus // cluster.gpus_per_server)
        key = (run.model, servers, run.precision, run.flash)
        if key not in costs:
            costs[key] = Cost(run.model, replace(cluster, servers=servers), run.precision, run.flash)
        seconds.append(costs[key].seconds(run.plan))
    return seconds


def calibrate(cluster: Cluster, runs: Sequence[Run], iterations: int = 15) -> Cluster:
    """`cluster` with the constants that fit `runs` best. Links between servers are fitted only if runs use them."""
    import numpy as np

    names = [("device", name) for name in DEVICE] + [("inside", name) for name in LINK]
    if cluster.device.attention_efficiency and any(run.flash for run in runs):
        names.append(("device", "attention_efficiency"))
    if any(run.plan.gpus > cluster.gpus_per_server for run in runs):
        names += [("between", name) for name in LINK]
    start = np.array([getattr(getattr(cluster, part), name) for part, name in names])
    logs = np.log([run.seconds for run in runs])

    def build(x) -> Cluster:
        built = cluster
        for (part, name), value in zip(names, start * np.exp(x)):
            old = getattr(built, part)
            changed = {name: float(min(value, SHARE_LIMIT) if name.endswith("efficiency") else value)}
            if name == "gb_s":  # the rates of fewer GPUs of a server change alike
                changed |= {few: getattr(old, few) * changed[name] / old.gb_s for few in OF_FEWER}
            built = replace(built, **{part: replace(old, **changed)})
        return built

    def residuals(x):
        return np.concatenate([(np.log(predict(build(x), runs)) - logs) / NOISE, x / PRIOR])

    def loss(errors) -> float:  # twice the negative logarithm of the probability
        times, constants = errors[: len(runs)], errors[len(runs) :]
        return (FREEDOM + 1) * np.log1p(times**2 / FREEDOM).sum() + constants @ constants

    x, damping, small = np.zeros(len(names)), 1e-2, 1e-3
    errors = residuals(x)
    for _ in range(iterations):
        weights = np.ones(len(errors))
        weights[: len(runs)] = (FREEDOM + 1) / (FREEDOM + errors[: len(runs)] ** 2)
        slope = np.stack([(residuals(x + small * unit) - errors) / small for unit in np.eye(len(x))], axis=1)
        weighted = slope.T * weights
        while damping < 1e6:
            change = np.linalg.solve(weighted @ slope + damping * np.eye(len(x)), -weighted @ errors)
            tried = residuals(x + change)
            if loss(tried) < loss(errors):
                x, errors, damping = x + change, tried, damping / 3
                break
            damping *= 3
        else:
            break
    fitted = build(x)
    return replace(fitted, device=replace(fitted.device, calibration=f"fitted to {len(runs)} measured runs"))


def cross_validated(cluster: Cluster, runs: Sequence[Run], parts: int = 5) -> list[float]:
    """Predicted over measured, less one, of each run by a fit to the runs outside its part. Of `parts` parts each has
    every `parts`-th run; there are at most as many as runs. At least two runs."""
    parts, found = min(parts, len(runs)), [0.0] * len(runs)
    for part in range(parts):
        fitted = calibrate(cluster, [run for index, run in enumerate(runs) if index % parts != part])
        own = runs[part::parts]
        found[part::parts] = [seconds / run.seconds - 1 for seconds, run in zip(predict(fitted, own), own)]
    return found


def bound(errors: Sequence[float]) -> float:
    """The size below which 90 % of the errors are."""
    return sorted(map(abs, errors))[math.ceil(0.9 * len(errors)) - 1]


def memory_errors(cluster: Cluster, runs: Sequence[Run]) -> list[float]:
    """Predicted over measured memory of the heaviest stage, less one, of the runs with a measured one."""
    known = [run for run in runs if run.memory]
    costs = [Cost(run.model, cluster, run.precision, run.flash) for run in known]
    return [cost.memory.heaviest(run.plan) / GIB / run.memory - 1 for cost, run in zip(costs, known)]
