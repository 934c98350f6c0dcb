"""Checks of the planner against published measurements of other systems, and of its
constants of GPUs and links."""

import itertools
import random
import statistics
from collections import defaultdict
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from bench import zero_bubble
from bench.planner_checks import (
    CLAIMS,
    MEASURED,
    Check,
    a100_cost,
    check,
    compared,
    fields_of,
    relative_error,
    table,
    within,
)
from megatron_2bw.tools.planner.cost.communication import Group, all_reduce
from megatron_2bw.tools.planner.cost.compute import Compute
from megatron_2bw.tools.planner.cost.memory import GIB
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import cluster
from megatron_2bw.tools.planner.descriptions.cluster import Cluster
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.measure.calibrate import calibrate, predict
from megatron_2bw.tools.planner.measure.runs import MeasuredRun, read_runs

# Flash attention with dropout in Megatron's deterministic mode, in times of the same
# without both.
DETERMINISTIC = 2.2

Row = dict[str, Any]


def vtrain() -> list[Check]:
    """Calibrated on 20 random rows, ten times; ranked within the groups of one
    problem."""
    runs = read_runs(MEASURED / "vtrain_single_node.csv")
    rows = [_vtrain_row(runs, seed) for seed in range(10)]
    rank = min(map(itemgetter("median Spearman"), rows))
    regret = max(map(itemgetter("median top-1 regret"), rows))
    error = statistics.mean(map(itemgetter("mean absolute error"), rows))
    result = (
        f"worst draw: Spearman {rank}, regret {regret:.1%}; "
        f"mean absolute error {error:.1%}"
    )
    return [check("vtrain", rank >= 0.9 and regret <= 0.05, result, rows)]


def _vtrain_row(runs: list[MeasuredRun], seed: int) -> Row:
    chosen = sorted(random.Random(seed).sample(range(len(runs)), 20))
    preset = cluster.PRESETS["dgx-a100-40"]
    fitted = calibrate(preset, [runs[index] for index in chosen])
    predicted = np.array(predict(fitted, runs))
    measured = _seconds(runs)
    ranks = []
    for members in _problems(runs):
        guess = predicted[members]
        real = measured[members]
        ranks.append(statistics.correlation(real, guess, method="ranked"))
    errors = np.delete(np.abs(predicted / measured - 1), chosen)
    return {
        "seed": seed,
        "median Spearman": round(statistics.median(ranks), 3),
        "median top-1 regret": round(np.median(_regrets(runs, predicted)), 4),
        "mean absolute error": round(errors.mean(), 3),
    }


def _regrets(runs: list[MeasuredRun], predicted: np.ndarray) -> list[float]:
    """How much longer than the fastest run of a problem takes that which is predicted to
    be the fastest, as a share."""
    measured = _seconds(runs)
    regrets = []
    for members in _problems(runs):
        real = measured[members]
        chosen = predicted[members].argmin()
        regrets.append(real[chosen] / real.min() - 1)
    return regrets


def _seconds(runs: list[MeasuredRun]) -> np.ndarray:
    return np.array(list(map(attrgetter("seconds"), runs)))


def _problems(runs: list[MeasuredRun]) -> list[list[int]]:
    """The places of the runs of each problem that has more than two."""
    problems: dict[tuple, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        plan = run.plan
        key = (plan.gpus, plan.global_batch, run.model.hidden, run.model.layers)
        problems[key].append(index)
    return [members for members in problems.values() if len(members) > 2]


def zero_bubble_table() -> list[Check]:
    """A100-80GB, RoCE: 1F1B and interleaved as Megatron ran them then, ZB by a greedy
    order (bench/zero_bubble.py)."""
    rows = list(map(_zero_bubble_row, table("zero_bubble.csv")))
    flush = {}
    for row in rows:
        if row["schedule"] == "1f1b":
            flush[row["model"], row["m"]] = row
    for row in rows:
        base = flush[row["model"], row["m"]]
        real = row["measured samples/GPU/s"] / base["measured samples/GPU/s"]
        row["ratio's error"] = relative_error(
            row["predicted"] / base["predicted"], real
        )
        row["memory's error"] = relative_error(row["predicted GB"], row["measured GB"])
    return [within("zero_bubble", rows), within("zero_bubble_memory", rows)]


def _zero_bubble_row(row: Any) -> Row:
    plan: Plan = row.plan
    cost = a100_cost(row.model, plan.gpus)
    if row.order.startswith("zb"):
        limit = plan.depth * (2 if row.order == "zb-2p" else 1)
        seconds, memory = _zero_bubble(cost, plan, limit)
    else:
        seconds = cost.seconds(plan)
        memory = cost.memory.heaviest(plan)
    return {
        "model": row.name,
        "m": plan.microbatches,
        "schedule": row.order,
        "measured samples/GPU/s": row.samples_per_gpu_s,
        "predicted": round(plan.global_batch / plan.depth / seconds, 2),
        "measured GB": row.memory_gb,
        "predicted GB": round(memory / GIB, 1),
    }


def _zero_bubble(cost: Cost, plan: Plan, limit: int) -> tuple[float, float]:
    """(seconds, bytes): the weights' part of a backward is its matrix products' second
    half. A stage holds up to `limit` microbatches until their W has run."""
    times = cost.times(plan)
    model = cost.model
    layers = plan.layers_of(model)
    matrices = model.layer_flops(plan.microbatch)[0] / cost.compute.flops
    weight = matrices * np.array(layers)
    weight[-1] += model.output_flops(plan.microbatch) / cost.compute.flops
    inputs = times.of("backward", plan.depth) - weight
    # Their runtime overlaps exchanges with computation, Megatron's waits.
    inputs_only = replace(times, backward=inputs.tolist(), sending=0.0)
    split = zero_bubble.SplitTimes(**vars(inputs_only), weight=weight.tolist())
    seconds = zero_bubble.iteration_time(
        plan.depth, plan.microbatches, split, limit, 1.0
    )
    activations, _ = cost.memory.layer(plan)
    held = cost.memory.stage(plan, 1, layers[1])
    in_flight = plan.pipeline.max_in_flight(plan.shape, 1)
    return seconds, held.total + (limit - in_flight) * activations * layers[1]


def megatron_2021() -> list[Check]:
    """A100-80GB; microbatch and chunks are not given, so the planner chooses them."""
    rows = []
    for row in table("megatron_2021.csv"):
        seconds, plan = _fastest(row)
        predicted = _published_flops(row.model, row.batch) / row.gpus / seconds / 1e12
        rows.append(
            {
                "billions": row.name.removesuffix("B"),
                "t": row.tensor,
                "d": row.depth,
                "GPUs": row.gpus,
                "b": plan.microbatch,
                "chunks": plan.virtual,
                **compared(row.tflops, predicted, "TFLOP/s", 1),
                "fitted to": not rows,
            }
        )
    return [within("megatron_2021", rows)]


def _fastest(row: Any) -> tuple[float, Plan]:
    cost = a100_cost(row.model, row.gpus)
    width = row.gpus // row.tensor // row.depth
    fitting = []
    for size, virtual in itertools.product((1, 2, 4, 8, 16), (1, 2, 3, 4, 5)):
        count, rest = divmod(row.batch, size * width)
        layers = row.model.layers // row.depth
        uneven = row.depth == 1 or layers % virtual or count % row.depth
        if rest or (virtual > 1 and uneven):
            continue
        plan = Plan(
            row.tensor, row.depth, width, size, count, "full", "megatron", virtual
        )
        if cost.fits(plan):
            fitting.append((cost.seconds(plan), plan))
    return min(fitting, key=itemgetter(0))


def _published_flops(model: Model, batch: int) -> float:
    """Equation 3 of the paper, of an iteration with recompute."""
    h = model.hidden
    shares = 1 + 2048 / (6 * h) + 51200 / (16 * model.layers * h)
    return 96 * batch * 2048 * model.layers * h * h * shares


def korthikanti_2022() -> list[Check]:
    rows = []
    for row in table("korthikanti_2022.csv"):
        seconds = a100_cost(row.model, row.plan.gpus).seconds(row.plan)
        shape = {"model": row.name, "recompute": row.recompute}
        rows.append(shape | compared(row.seconds, seconds, "s", 2))
    return [within("korthikanti_2022", rows)]


def kernels() -> list[Check]:
    """Products by shape, against one share for all shapes."""
    rows = [_product_row("A100-PCIe", "dgx-a100-80"), _product_row("B200", "dgx-b200")]
    shares = []
    holds = True
    for row in rows:
        large = row["share of large products"]
        ours = row["planner's"]
        shares.append(f"{row['GPU']} {large} ({ours})")
        holds &= abs(large - ours) <= 0.03
    result = ", ".join(shares)
    return [check("kernels", holds, result, rows)]


def _product_row(gpu: str, preset: str) -> Row:
    compute = Compute(Model("any", 1, 128, 1), cluster.preset(preset, 1), "bf16", True)
    products = 0
    measured = 0.0
    predicted = 0.0
    for row in table("simumax_kernels.csv"):
        if row.gpu == gpu and row.kind == "product":
            products += 1
            ideal = 2 * row.m * row.k * row.n / compute.peak
            measured += ideal / row.share
            predicted += compute.product(row.m, row.k, row.n)
    share = compute.flops / compute.peak
    return {
        "GPU": gpu,
        "products": products,
        "share of large products": round(share * predicted / measured, 2),
        "planner's": round(share, 2),
    }


def links() -> list[Check]:
    """All-reduces on 2 to 8 GPUs of a server. The presets' rates are chosen on 2, 4 and
    8."""
    rows = []
    for gpu, preset in (("V100", "p3.16xlarge"), ("A100", "dgx-a100-80")):
        server = cluster.preset(preset, 1)
        for ranks in (2, 4, 8):
            rows.append(
                {
                    "GPU": gpu,
                    "GPUs": ranks,
                    "error": _all_reduce_error(server, gpu, ranks),
                }
            )
    return [within("links", rows)]


def _all_reduce_error(server: Cluster, gpu: str, ranks: int) -> float:
    """Mean absolute error over the sizes."""
    errors = []
    for row in table("all_reduce.csv"):
        if (row.gpu, row.ranks) == (gpu, ranks):
            seconds = all_reduce(server, Group(ranks, 1, 1), row.bytes)
            errors.append(abs(seconds / (row.us * 1e-6) - 1))
    return round(statistics.mean(errors), 3)


def golden() -> list[Check]:
    """Megatron-LM's own tests of a 7B on 8 GPUs, one batch of 8."""
    rows = list(map(_golden_row, table("megatron_golden_7b.csv")))
    hopper = []
    blackwell = []
    memory = []
    for row in rows:
        (blackwell if row["GPU"] == "GB200" else hopper).append(row)
        # The memory of the A100's runs is fitted to nothing.
        memory.append(row | {"fitted to": False})
    return [
        within("golden_h100", hopper),
        within("golden_gb200", blackwell),
        within("golden_memory", memory),
    ]


def _golden_row(row: Any) -> Row:
    presets = {"A100": "dgx-a100-80", "H100": "dgx-h100", "GB200": "gb200-nvl72"}
    server = cluster.preset(presets[row.gpu], 1)
    share = server.device.attention_efficiency / DETERMINISTIC
    device = replace(server.device, attention_efficiency=share)
    cost = Cost(row.model, replace(server, gpus_per_server=8, device=device))
    cost.memory.engine = False  # --no-gradient-accumulation-fusion
    gib = cost.memory.stages(row.plan)[-1].total / GIB
    times = compared(row.seconds, cost.seconds(row.plan), "s", 3)
    return {
        "GPU": row.gpu,
        "t": row.tensor,
        "d": row.depth,
        **times,
        "measured GiB": row.gib,
        "predicted GiB": round(gib, 1),
        "memory's error": relative_error(gib, row.gib),
        "fitted to": row.gpu == "A100",
    }


def others() -> list[Check]:
    """Runs of other systems, calibrated on every third row: DeepSpeed's kernels have
    other shares of the peak."""
    gh200 = replace(cluster.GPUS["H100-80GB"], memory_gib=94.5, memory_gb_s=4000)
    hopper = replace(
        cluster.PRESETS["dgx-h100"],
        device=gh200,
        between=cluster.Link(80, 15, 4),
        gpus_per_server=4,
    )
    turing = replace(
        cluster.PRESETS["8xt4"], between=cluster.Link(5, 50), gpus_per_server=4
    )
    return [
        _by_thirds("sailor_gh200", hopper),
        _by_thirds("amp_t4", turing),
        _by_thirds("simumax_b200_70b", cluster.PRESETS["dgx-b200"]),
    ]


def _by_thirds(claim: str, server: Cluster) -> Check:
    runs = read_runs(MEASURED / f"{claim}.csv")
    rows = []
    for first in range(3):
        fitted = calibrate(server, runs[first::3])
        others = list(runs)
        del others[first::3]
        row = _set_row(others, fitted)
        rows.append({"first row": first, **row})
    error = max(map(itemgetter("error"), rows))
    rank = min(map(itemgetter("Spearman"), rows))
    result = f"worst third: mean absolute error {error:.1%}, Spearman {rank}"
    return check(claim, error <= 0.15 and rank >= 0.9, result, rows)


def sets() -> list[Check]:
    """Runs of others, and the share within which nine of ten lie, by cluster and on
    rows that chose no constant."""
    rows = []
    errors = defaultdict(list)
    holds = True
    for spec in CLAIMS["sets"]["sets"]:
        server = cluster.PRESETS[spec["cluster"]]
        runs = read_runs(MEASURED / spec["file"])
        if runs[0].model.latent:
            runs = list(map(_compressed, runs))
        row = _set_row(runs, server)
        holds &= row["error"] <= spec["bar"]
        rows.append(spec | row)
        if not spec["chose"]:
            errors[spec["cluster"]] += _errors(runs, server).tolist()
    shares = []
    for name, own in errors.items():
        share = np.quantile(np.abs(own), 0.9)
        stated = cluster.PRESETS[name].device.error
        holds &= share <= stated
        shares.append(f"{name} {share:.1%} ({stated:.0%})")
    return [check("sets", holds, ", ".join(shares), rows)]


class _Compressed(Model):
    """DeepSeek-V2 and V3 compress a query's states to 1,536 elements."""

    def matrix_sides(self, tensor: int = 1) -> list[tuple[float, float]]:
        (hidden, queries), *rest = super().matrix_sides(tensor)
        return [(hidden, 1536), (1536, queries), *rest]


def _compressed(run: MeasuredRun) -> MeasuredRun:
    model = fields_of(_Compressed, run.model)
    return replace(run, model=model)


def _errors(runs: list[MeasuredRun], server: Cluster) -> np.ndarray:
    return np.array(predict(server, runs)) / _seconds(runs) - 1


def _set_row(runs: list[MeasuredRun], server: Cluster) -> Row:
    measured = _seconds(runs)
    predicted = np.array(predict(server, runs))
    errors = predicted / measured - 1
    regrets = _regrets(runs, predicted)
    samples = np.array(list(map(attrgetter("plan.global_batch"), runs)))
    rank = statistics.correlation(
        measured / samples, predicted / samples, method="ranked"
    )
    memory = []
    for run in runs:
        if run.memory:
            cost = Cost(run.model, server, run.precision, run.flash)
            heaviest = cost.memory.heaviest(run.plan) / GIB
            memory.append(abs(heaviest / run.memory - 1))
    return {
        "rows": len(runs),
        "error": round(np.abs(errors).mean(), 3),
        "bias": round(errors.mean(), 3),
        "Spearman": round(rank, 3),
        "largest regret": round(max(regrets), 3) if regrets else "",
        "memory's error": round(statistics.mean(memory), 3) if memory else "",
    }
