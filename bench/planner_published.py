"""Checks of the planner against other published measurements: vTrain, zero bubble, Megatron 2021 and 2022."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import defaultdict
from dataclasses import replace

from bench import zero_bubble
from bench.planner_checks import MEASURED, Check, a100_cost, compared, shape_of, table, within
from megatron_2bw.models import cluster
from megatron_2bw.models.plan import Plan
from megatron_2bw.planner.cost.memory import GIB
from megatron_2bw.planner.cost.simulated import Cost
from megatron_2bw.planner.measure import calibrate
from megatron_2bw.planner.measure.runs import read_runs


def vtrain(fits: int = 10) -> list[Check]:
    """Calibrated on 20 random rows, `fits` times; ranked within the groups of one problem."""
    runs = read_runs(MEASURED / "vtrain_single_node.csv")
    groups: dict[tuple, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        groups[run.plan.gpus, run.plan.global_batch, run.model.hidden, run.model.layers].append(index)
    measured, rows = [run.seconds for run in runs], []
    for seed in range(fits):
        chosen = set(random.Random(seed).sample(range(len(runs)), 20))
        fitted = calibrate.calibrate(cluster.PRESETS["dgx-a100-40"], [runs[index] for index in sorted(chosen)])
        predicted = calibrate.predict(fitted, runs)
        ranks, regrets = [], []
        for own in groups.values():
            if len(own) > 2:
                real, guess = [measured[i] for i in own], [predicted[i] for i in own]
                ranks.append(statistics.correlation(real, guess, method="ranked"))
                regrets.append(real[guess.index(min(guess))] / min(real) - 1)
        errors = [abs(p / m - 1) for i, (p, m) in enumerate(zip(predicted, measured)) if i not in chosen]
        row = {"seed": seed, "median Spearman": round(statistics.median(ranks), 3)}
        row |= {"median top-1 regret": round(statistics.median(regrets), 4)}
        row |= {"mean top-1 regret": round(statistics.mean(regrets), 3)}
        rows.append(row | {"mean absolute error": round(statistics.mean(errors), 3)})
    worst = min(row["median Spearman"] for row in rows), max(row["median top-1 regret"] for row in rows)
    mean = statistics.mean(row["mean absolute error"] for row in rows)
    name, source = "1,440 runs of 1F1B on 2 to 8 A100", "vTrain, data/ground_truth_single.csv"
    bar = "median Spearman >= 0.9 and median top-1 regret <= 5 % in every draw of 20 rows"
    result = f"worst draw: Spearman {worst[0]}, regret {worst[1]:.1%}; mean absolute error {mean:.1%}"
    holds = worst[0] >= 0.9 and worst[1] <= 0.05
    return [Check(name, source, bar, holds, result, rows, "constants fitted to 20 of the rows")]


def zero_bubble_table() -> list[Check]:
    """A100-80GB, RoCE: 1F1B and interleaved as Megatron ran them then, ZB by a greedy order (bench/zero_bubble.py)."""
    rows = []
    for row in table("zero_bubble.csv"):
        stages, count, size = int(row["stages"]), int(row["microbatches"]), int(row["microbatch"])
        shape = shape_of(row, row["model"], sequence=int(row["seq_length"]))
        cost = a100_cost(shape, stages)
        each = (shape.layers + 2) // stages  # the first and the last stage have one layer fewer
        virtual = each if row["schedule"] == "1f1b-interleaved" else 1
        plan = Plan(1, stages, 1, size, count, schedule="megatron", first=each - 1, last=each - 1, virtual=virtual)
        memory = cost.memory.heaviest(plan)
        if row["schedule"].startswith("zb"):
            seconds, memory = _zero_bubble(cost, plan, stages * (2 if row["schedule"] == "zb-2p" else 1))
        else:
            seconds = cost.seconds(plan)
        rate = {"measured samples/GPU/s": float(row["samples_per_gpu_s"])}
        rate["predicted"] = round(size * count / stages / seconds, 2)
        memory = {"measured GB": float(row["memory_gb"]), "predicted GB": round(memory / GIB, 1)}
        rows.append({"model": row["model"], "m": count, "schedule": row["schedule"]} | rate | memory)
    base = {(row["model"], row["m"]): row for row in rows if row["schedule"] == "1f1b"}
    for row in rows:
        flush = base[row["model"], row["m"]]
        real = row["measured samples/GPU/s"] / flush["measured samples/GPU/s"]
        row["ratio's error"] = round(row["predicted"] / flush["predicted"] / real - 1, 3)
        row["memory's error"] = round(row["predicted GB"] / row["measured GB"] - 1, 3)
    exchange = "a blocking exchange costs the host 200 us"
    source, memory = "arXiv 2401.10241, tables of section 5", "memory of zero-bubble's runs, GB read as 2^30 bytes"
    return [
        within(5, "zero-bubble's schedules against 1F1B", source, rows, "ratio's error", "ratios ", assumes=exchange),
        within(10, memory, "the same", rows, "memory's error", shown=False, assumes="GB are 2^30 bytes"),
    ]


def _zero_bubble(cost: Cost, plan: Plan, limit: int) -> tuple[float, float]:
    """(seconds, bytes): the weights' part of a backward is its matrix products' second half."""
    times, shape = cost.times(plan), cost.model
    matrices = shape.layer_flops(plan.microbatch)[0] / cost.compute.flops
    weight = [matrices * layers for layers in plan.layers_of(shape)]
    weight[-1] += shape.output_flops(plan.microbatch) / cost.compute.flops
    inputs = [whole - own for whole, own in zip(times.of("backward", plan.depth), weight)]
    split = replace(times, backward=inputs, weight=weight, sending=0.0)
    # Their runtime overlaps exchanges with computation (sending 0), Megatron's waits. A stage holds up to `limit`
    # microbatches until their W has run.
    kept, working = cost.memory.layer(plan)
    layers = plan.layers_of(shape)[1]
    held = cost.memory.stage(plan, 1, layers)
    in_flight = plan.pipeline.max_in_flight(plan.shape, 1)
    memory = held.total + (limit - in_flight) * kept * layers
    return zero_bubble.iteration_time(plan.depth, plan.microbatches, split, limit, 1.0), memory


def megatron_2021() -> list[Check]:
    """A100-80GB; microbatch and chunks are not given, so the planner chooses them."""
    rows = []
    for row in table("megatron_2021.csv"):
        shape = shape_of(row, f"{row['billions']}B", vocab=51200, sequence=2048)
        tensor, depth, gpus, batch = (int(row[name]) for name in ("tensor", "depth", "gpus", "batch"))
        cost = a100_cost(shape, gpus)
        width, found = gpus // tensor // depth, []
        for size, virtual in itertools.product((1, 2, 4, 8, 16), (1, 2, 3, 4, 5)):
            count = batch // (size * width)
            uneven = virtual > 1 and (depth == 1 or shape.layers // depth % virtual or count % depth)
            if batch % (size * width) or uneven:
                continue
            plan = Plan(tensor, depth, width, size, count, "full", "megatron", virtual)
            if cost.fits(plan):
                found.append((cost.seconds(plan), plan))
        seconds, plan = min(found, key=lambda pair: pair[0])
        h, layers = shape.hidden, shape.layers
        flops = 96 * batch * 2048 * layers * h * h * (1 + 2048 / (6 * h) + 51200 / (16 * layers * h))
        predicted, measured = flops / gpus / seconds / 1e12, float(row["tflops"])
        sizes = {"t": tensor, "d": depth, "GPUs": gpus, "b": plan.microbatch, "chunks": plan.virtual}
        values = {"measured TFLOP/s": measured, "predicted": round(predicted, 1)}
        values["error"] = round(predicted / measured - 1, 3)
        rows.append({"billions": row["billions"]} | sizes | values | {"fitted to": not rows})
    name = "3.6 to 1008 billion parameters on 64 to 3072 A100 (1.7 billion is fitted to)"
    return [within(10, name, "arXiv 2104.04473, Table 1", rows, assumes="the fastest b and chunks: not given")]


def korthikanti_2022() -> list[Check]:
    rows = []
    for row in table("korthikanti_2022.csv"):
        shape = shape_of(row, row["model"], vocab=51200, sequence=2048)
        tensor, depth, batch, size = (int(row[name]) for name in ("tensor", "depth", "batch", "microbatch"))
        cost = a100_cost(shape, tensor * depth)
        plan = Plan(tensor, depth, 1, size, batch // size, "full", "megatron", int(row["virtual"]))
        present = replace(plan, recompute="selective", sequence_parallel=True)
        for name, variant in (("full", plan), ("present", present)):
            values = compared(float(row[f"{name}_seconds"]), cost.seconds(variant), "s", 2)
            rows.append({"model": row["model"], "recompute": variant.recompute} | values)
    name = "22 billion to a trillion parameters, full and selective recompute"
    return [within(10, name, "arXiv 2205.05198, Table 5", rows, assumes="efficiency of one layer of the 22B")]
