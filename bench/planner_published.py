"""Checks of the planner against published measurements of other systems, and of its
constants of GPUs and links."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import defaultdict
from dataclasses import replace

from bench import zero_bubble
from bench.planner_checks import (
    MEASURED,
    Check,
    a100_cost,
    compared,
    integers,
    shape_of,
    table,
    within,
)
from megatron_2bw.tools.planner.cost.communication import Group, all_reduce
from megatron_2bw.tools.planner.cost.compute import Compute
from megatron_2bw.tools.planner.cost.memory import GIB
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import cluster
from megatron_2bw.tools.planner.descriptions.model import LLAMA_LAYER, Model
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.measure import calibrate
from megatron_2bw.tools.planner.measure.runs import Run, read_runs

# Flash attention with dropout in Megatron's deterministic mode, in times of the same
# without both.
DETERMINISTIC = 2.2


def vtrain(fits: int = 10) -> list[Check]:
    """Calibrated on 20 random rows, `fits` times; ranked within the groups of one
    problem."""
    runs = read_runs(MEASURED / "vtrain_single_node.csv")
    groups: dict[tuple, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        groups[
            run.plan.gpus, run.plan.global_batch, run.model.hidden, run.model.layers
        ].append(index)
    measured, rows = [run.seconds for run in runs], []
    for seed in range(fits):
        chosen = set(random.Random(seed).sample(range(len(runs)), 20))
        fitted = calibrate.calibrate(
            cluster.PRESETS["dgx-a100-40"], [runs[index] for index in sorted(chosen)]
        )
        predicted = calibrate.predict(fitted, runs)
        ranks, regrets = [], []
        for own in groups.values():
            if len(own) > 2:
                real, guess = [measured[i] for i in own], [predicted[i] for i in own]
                ranks.append(statistics.correlation(real, guess, method="ranked"))
                regrets.append(real[guess.index(min(guess))] / min(real) - 1)
        errors = [
            abs(p / m - 1)
            for i, (p, m) in enumerate(zip(predicted, measured))
            if i not in chosen
        ]
        row = {"seed": seed, "median Spearman": round(statistics.median(ranks), 3)}
        row |= {"median top-1 regret": round(statistics.median(regrets), 4)}
        row |= {"mean top-1 regret": round(statistics.mean(regrets), 3)}
        rows.append(row | {"mean absolute error": round(statistics.mean(errors), 3)})
    worst = (
        min(row["median Spearman"] for row in rows),
        max(row["median top-1 regret"] for row in rows),
    )
    mean = statistics.mean(row["mean absolute error"] for row in rows)
    name, source = (
        "1,440 runs of 1F1B on 2 to 8 A100",
        "vTrain, data/ground_truth_single.csv",
    )
    bar = (
        "median Spearman >= 0.9 and median top-1 regret <= 5 % in every draw of 20 rows"
    )
    result = (
        f"worst draw: Spearman {worst[0]}, regret {worst[1]:.1%}; mean absolute error "
        f"{mean:.1%}"
    )
    holds = worst[0] >= 0.9 and worst[1] <= 0.05
    return [
        Check(
            name, source, bar, holds, result, rows, "constants fitted to 20 of the rows"
        )
    ]


def zero_bubble_table() -> list[Check]:
    """A100-80GB, RoCE: 1F1B and interleaved as Megatron ran them then, ZB by a greedy
    order (bench/zero_bubble.py)."""
    rows = []
    for row in table("zero_bubble.csv"):
        stages, count, size = (
            int(row["stages"]),
            int(row["microbatches"]),
            int(row["microbatch"]),
        )
        shape = shape_of(row, row["model"], sequence=int(row["seq_length"]))
        cost = a100_cost(shape, stages)
        # the first and the last stage have one layer fewer
        each = (shape.layers + 2) // stages
        virtual = each if row["schedule"] == "1f1b-interleaved" else 1
        plan = Plan(
            1,
            stages,
            1,
            size,
            count,
            schedule="megatron",
            first=each - 1,
            last=each - 1,
            virtual=virtual,
        )
        memory = cost.memory.heaviest(plan)
        if row["schedule"].startswith("zb"):
            seconds, memory = _zero_bubble(
                cost, plan, stages * (2 if row["schedule"] == "zb-2p" else 1)
            )
        else:
            seconds = cost.seconds(plan)
        rate = {"measured samples/GPU/s": float(row["samples_per_gpu_s"])}
        rate["predicted"] = round(size * count / stages / seconds, 2)
        memory = {
            "measured GB": float(row["memory_gb"]),
            "predicted GB": round(memory / GIB, 1),
        }
        rows.append(
            {"model": row["model"], "m": count, "schedule": row["schedule"]}
            | rate
            | memory
        )
    base = {(row["model"], row["m"]): row for row in rows if row["schedule"] == "1f1b"}
    for row in rows:
        flush = base[row["model"], row["m"]]
        real = row["measured samples/GPU/s"] / flush["measured samples/GPU/s"]
        row["ratio's error"] = round(
            row["predicted"] / flush["predicted"] / real - 1, 3
        )
        row["memory's error"] = round(row["predicted GB"] / row["measured GB"] - 1, 3)
    exchange = "a blocking exchange costs the host 200 us"
    source, memory = (
        "arXiv 2401.10241, tables of section 5",
        "memory of zero-bubble's runs, GB read as 2^30 bytes",
    )
    return [
        within(
            5,
            "zero-bubble's schedules against 1F1B",
            source,
            rows,
            "ratio's error",
            "ratios ",
            assumes=exchange,
        ),
        within(
            10,
            memory,
            "the same",
            rows,
            "memory's error",
            shown=False,
            assumes="GB are 2^30 bytes",
        ),
    ]


def _zero_bubble(cost: Cost, plan: Plan, limit: int) -> tuple[float, float]:
    """(seconds, bytes): the weights' part of a backward is its matrix products' second
    half."""
    times, shape = cost.times(plan), cost.model
    matrices = shape.layer_flops(plan.microbatch)[0] / cost.compute.flops
    weight = [matrices * layers for layers in plan.layers_of(shape)]
    weight[-1] += shape.output_flops(plan.microbatch) / cost.compute.flops
    inputs = [
        whole - own for whole, own in zip(times.of("backward", plan.depth), weight)
    ]
    inputs_only = replace(times, backward=inputs, sending=0.0)
    split = zero_bubble.SplitTimes(**vars(inputs_only), weight=weight)
    # Their runtime overlaps exchanges with computation (sending 0), Megatron's waits. A
    # stage holds up to `limit` microbatches until their W has run.
    kept, working = cost.memory.layer(plan)
    layers = plan.layers_of(shape)[1]
    held = cost.memory.stage(plan, 1, layers)
    in_flight = plan.pipeline.max_in_flight(plan.shape, 1)
    memory = held.total + (limit - in_flight) * kept * layers
    return zero_bubble.iteration_time(
        plan.depth, plan.microbatches, split, limit, 1.0
    ), memory


def megatron_2021() -> list[Check]:
    """A100-80GB; microbatch and chunks are not given, so the planner chooses them."""
    rows = []
    for row in table("megatron_2021.csv"):
        shape = shape_of(row, f"{row['billions']}B", vocab=51200, sequence=2048)
        tensor, depth, gpus, batch = integers(row, "tensor", "depth", "gpus", "batch")
        cost = a100_cost(shape, gpus)
        width, found = gpus // tensor // depth, []
        for size, virtual in itertools.product((1, 2, 4, 8, 16), (1, 2, 3, 4, 5)):
            count = batch // (size * width)
            uneven = virtual > 1 and (
                depth == 1 or shape.layers // depth % virtual or count % depth
            )
            if batch % (size * width) or uneven:
                continue
            plan = Plan(tensor, depth, width, size, count, "full", "megatron", virtual)
            if cost.fits(plan):
                found.append((cost.seconds(plan), plan))
        seconds, plan = min(found, key=lambda pair: pair[0])
        h, layers = shape.hidden, shape.layers
        flops = (
            96
            * batch
            * 2048
            * layers
            * h
            * h
            * (1 + 2048 / (6 * h) + 51200 / (16 * layers * h))
        )
        predicted, measured = flops / gpus / seconds / 1e12, float(row["tflops"])
        sizes = {
            "t": tensor,
            "d": depth,
            "GPUs": gpus,
            "b": plan.microbatch,
            "chunks": plan.virtual,
        }
        values = {"measured TFLOP/s": measured, "predicted": round(predicted, 1)}
        values["error"] = round(predicted / measured - 1, 3)
        rows.append(
            {"billions": row["billions"]} | sizes | values | {"fitted to": not rows}
        )
    name = (
        "3.6 to 1008 billion parameters on 64 to 3072 A100 (1.7 billion is fitted to)"
    )
    return [
        within(
            10,
            name,
            "arXiv 2104.04473, Table 1",
            rows,
            assumes="the fastest b and chunks: not given",
        )
    ]


def korthikanti_2022() -> list[Check]:
    rows = []
    for row in table("korthikanti_2022.csv"):
        shape = shape_of(row, row["model"], vocab=51200, sequence=2048)
        tensor, depth, batch, size = integers(
            row, "tensor", "depth", "batch", "microbatch"
        )
        cost = a100_cost(shape, tensor * depth)
        plan = Plan(
            tensor,
            depth,
            1,
            size,
            batch // size,
            "full",
            "megatron",
            int(row["virtual"]),
        )
        present = replace(plan, recompute="selective", sequence_parallel=True)
        for name, variant in (("full", plan), ("present", present)):
            values = compared(
                float(row[f"{name}_seconds"]), cost.seconds(variant), "s", 2
            )
            rows.append(
                {"model": row["model"], "recompute": variant.recompute} | values
            )
    name = "22 billion to a trillion parameters, full and selective recompute"
    return [
        within(
            10,
            name,
            "arXiv 2205.05198, Table 5",
            rows,
            assumes="efficiency of one layer of the 22B",
        )
    ]


def kernels() -> list[Check]:
    """Products by shape, against one share for all shapes."""
    rows = []
    for name, preset in (("A100-PCIe", "dgx-a100-80"), ("B200", "dgx-b200")):
        shapes = [
            ([int(row[key]) for key in "mkn"], float(row["share"]))
            for row in table("simumax_kernels.csv")
            if (row["gpu"], row["kind"]) == (name, "product")
        ]
        compute = Compute(
            Model("any", 1, 128, 1), cluster.preset(preset, 1), "bf16", True
        )
        work = [2 * math.prod(sizes) / compute.peak for sizes, _ in shapes]
        ratios = [
            compute.product(*sizes) * share / ideal
            for (sizes, share), ideal in zip(shapes, work)
        ]
        took = [ideal / share for (_, share), ideal in zip(shapes, work)]
        best = sum(map(math.prod, zip(ratios, took))) / sum(took)
        row = {"GPU": name, "products": len(shapes)}
        row |= {
            "share of large products": round(compute.flops / compute.peak * best, 2)
        }
        row |= {"planner's": round(compute.flops / compute.peak, 2)}
        row |= {"scatter": round(statistics.pstdev(map(math.log, ratios)), 3)}
        one = statistics.pstdev(math.log(share) for _, share in shapes)
        rows.append(row | {"scatter with one share": round(one, 3)})
    found = ", ".join(
        f"{row['GPU']} {row['share of large products']} ({row["planner's"]})"
        for row in rows
    )
    holds = all(
        abs(row["share of large products"] - row["planner's"]) <= 0.03 for row in rows
    )
    name, source = (
        "matrix products by shape: the share that large ones reach",
        "SimuMax, configs/system (Apache-2.0)",
    )
    result = (
        f"{found}; a term by shape lowers the A100's scatter, not the B200's, whose "
        "power limits long products"
    )
    chosen = (
        "TILE and FILL are chosen on the A100's rows; the B200's share on its own "
        "and 405B's; the A100's on none"
    )
    return [
        Check(
            name, source, "the planner's share within 0.03", holds, result, rows, chosen
        )
    ]


def links() -> list[Check]:
    """All-reduces on 2 to 8 GPUs of a server. The presets' rates are chosen on 2, 4 and
    8."""
    rows = []
    for name, preset in (("V100", "p3.16xlarge"), ("A100", "dgx-a100-80")):
        server = cluster.preset(preset, 1)
        one = replace(server, inside=replace(server.inside, pair_gb_s=0, four_gb_s=0))
        for ranks in (2, 4, 8):
            runs = [
                row
                for row in table("all_reduce.csv")
                if (row["gpu"], row["ranks"]) == (name, str(ranks))
            ]
            group, row = Group(ranks, 1, 1), {"GPU": name, "GPUs": ranks}
            for key, on in (("error", server), ("error with one rate", one)):
                errors = [
                    all_reduce(on, group, float(r["bytes"])) / (float(r["us"]) * 1e-6)
                    - 1
                    for r in runs
                ]
                row |= {key: round(statistics.mean(map(abs, errors)), 3)}
            rows.append(row)
    name, source = (
        "NCCL's all-reduces of 1 MB to 1 GB on 2, 4 and 8 GPUs of a server",
        "vTrain, trace/ (MIT)",
    )
    return [
        within(
            20,
            name,
            source,
            rows,
            what="mean by group ",
            assumes="rates and latencies chosen on these rows",
        )
    ]


def golden() -> list[Check]:
    """Megatron-LM's own tests of a 7B on 8 GPUs, one batch of 8."""
    model, rows, memory = (
        Model("7B", 32, 4096, 32, 131072, 8192, groups=8, tied=False),
        [],
        [],
    )
    presets = {"A100": "dgx-a100-80", "H100": "dgx-h100", "GB200": "gb200-nvl72"}
    for row in table("megatron_golden_7b.csv"):
        server = replace(cluster.preset(presets[row["gpu"]], 1), gpus_per_server=8)
        share = server.device.attention_efficiency / DETERMINISTIC
        cost = Cost(
            model,
            replace(server, device=replace(server.device, attention_efficiency=share)),
        )
        cost.memory.engine = False  # --no-gradient-accumulation-fusion
        tensor, depth, virtual, size = integers(
            row, "tensor", "depth", "virtual", "microbatch"
        )
        width = 8 // (tensor * depth)
        plan = Plan(
            tensor, depth, width, size, 8 // (width * size), "none", "megatron", virtual
        )
        plan = replace(plan, distributed_optimizer=True)
        seconds, held = cost.seconds(plan), cost.memory.stages(plan)[-1].total / GIB
        sizes, gib = {"GPU": row["gpu"], "t": tensor, "d": depth}, float(row["gib"])
        bytes_ = {
            "measured GiB": gib,
            "predicted GiB": round(held, 1),
            "memory's error": round(held / gib - 1, 3),
        }
        memory.append(sizes | compared(float(row["seconds"]), seconds, "s", 3) | bytes_)
        rows.append(memory[-1] | {"fitted to": row["gpu"] == "A100"})
    source = "Megatron-LM, tests/functional_tests (golden values)"
    mode = (
        f"deterministic mode: attention takes {DETERMINISTIC} times as long, chosen "
        "on the two A100 rows"
    )
    hopper, blackwell = (
        [row for row in rows if (row["GPU"] == "GB200") == new] for new in (False, True)
    )
    return [
        within(8, "7B on 8 H100 (A100 is fitted to)", source, hopper, assumes=mode),
        within(
            8, "7B on 8 GPUs of a GB200 NVL72", source, blackwell, assumes="the same"
        ),
        within(
            2,
            "memory of 7B's last stage",
            source,
            memory,
            "memory's error",
            shown=False,
            assumes="nothing fused",
        ),
    ]


def b200() -> list[Check]:
    """12 layers of a 70B on 8 B200. Its runs overlapped no reduction, so the plans are
    those of a plain 1F1B."""
    preset, chosen, source = (
        cluster.PRESETS["dgx-b200"],
        [0, 1, 2, 3],
        "SimuMax, docs/b200 (Apache-2.0)",
    )
    rows, runs = _b200_rows(
        Model(
            "70B",
            12,
            8192,
            64,
            128256,
            4096,
            groups=8,
            ffn=28672,
            tied=False,
            **LLAMA_LAYER,
        )
    )
    fitted = calibrate.predict(
        calibrate.calibrate(preset, [runs[index] for index in chosen]), runs
    )
    after = [
        row | compared(run.seconds, seconds, "s", 3) | {"fitted to": index in chosen}
        for index, (row, run, seconds) in enumerate(zip(rows, runs, fitted))
    ]
    large, _ = _b200_rows(
        Model(
            "405B",
            4,
            16384,
            128,
            128256,
            4096,
            groups=8,
            ffn=53248,
            tied=False,
            **LLAMA_LAYER,
        )
    )
    alone = (
        "products, memory-bound kernels and collectives measured one by one; 0.02 of "
        "the products' share on 405B"
    )
    memory = dict(
        key="memory's error", shown=False, assumes="one layer's gradients are dummies"
    )
    return [
        within(8, "12 layers of 70B on 8 B200", source, rows, assumes=alone),
        within(
            5,
            "the same after four rows",
            source,
            after,
            assumes="the four of 4 microbatches",
        ),
        within(
            8,
            "4 layers of 405B on 8 B200",
            source,
            large,
            assumes="chose 0.02 of the products' share",
        ),
        within(2, "memory of 70B and 405B on 8 B200", source, rows + large, **memory),
    ]


def _b200_rows(model: Model) -> tuple[list[dict], list[Run]]:
    cost, rows, runs = Cost(model, cluster.PRESETS["dgx-b200"]), [], []
    for row in table(f"simumax_b200_{model.name.lower()}.csv"):
        tensor, depth, width, batch = integers(
            row, "tensor", "depth", "width", "global_batch"
        )
        plan = Plan(tensor, depth, width, 1, batch // width, "none", "pipedream-flush")
        plan = replace(
            plan, sequence_parallel=tensor > 1, distributed_optimizer=width > 1
        )
        run, gib = (
            Run(model, plan, float(row["seconds"]), flash=True),
            float(row["gib"]),
        )
        sizes = {"t": tensor, "d": depth, "m": plan.microbatches}
        error = round(cost.memory.heaviest(plan) / GIB / gib - 1, 3)
        values = compared(run.seconds, cost.seconds(plan), "s", 3)
        rows.append(sizes | values | {"measured GiB": gib, "memory's error": error})
        runs.append(run)
    return rows, runs


def others() -> list[Check]:
    """Runs of other systems, calibrated on every third row: DeepSpeed's kernels have
    other shares of the peak."""
    gh200 = replace(cluster.GPUS["H100-80GB"], memory_gib=94.5, memory_gb_s=4000)
    clusters = {
        "sailor_gh200.csv": replace(
            cluster.PRESETS["dgx-h100"], device=gh200, between=cluster.Link(80, 15, 4)
        ),
        "amp_t4.csv": replace(cluster.PRESETS["8xt4"], between=cluster.Link(5, 50)),
    }
    checks = []
    for file, name, source in (
        (
            "sailor_gh200.csv",
            "26 runs of OPT-350M and GPT-Neo-2.7B on 4 to 256 GH200",
            "Sailor (MIT), its validation",
        ),
        ("amp_t4.csv", "47 runs of a GPT of 355M on 16 T4", "AMP, src/results"),
    ):
        runs, server, rows = (
            read_runs(MEASURED / file),
            replace(clusters[file], gpus_per_server=4),
            [],
        )
        for first in range(3):
            rest = [run for index, run in enumerate(runs) if index % 3 != first]
            predicted = calibrate.predict(
                calibrate.calibrate(server, runs[first::3]), rest
            )
            pairs = [
                (run.seconds / run.plan.global_batch, s / run.plan.global_batch)
                for run, s in zip(rest, predicted)
            ]
            error = statistics.mean(abs(p / m - 1) for m, p in pairs)
            rank = statistics.correlation(*zip(*pairs), method="ranked")
            rows.append(
                {
                    "first row": first,
                    "error": round(error, 3),
                    "Spearman": round(rank, 3),
                }
            )
        worst = max(row["error"] for row in rows), min(row["Spearman"] for row in rows)
        result = f"worst third: mean absolute error {worst[0]:.1%}, Spearman {worst[1]}"
        bar = "mean absolute error of the others within 15 %, Spearman >= 0.9"
        holds = worst[0] <= 0.15 and worst[1] >= 0.9
        checks.append(
            Check(
                name,
                source,
                bar,
                holds,
                result,
                rows,
                "constants fitted to a third of the rows",
            )
        )
    return checks


def multi_node() -> list[Check]:
    """Runs on 64 to 512 A100 that chose no constant."""
    runs = read_runs(MEASURED / "vtrain_multi_node.csv")
    seconds = calibrate.predict(cluster.PRESETS["dgx-a100-80"], runs)
    rows = []
    for hidden in sorted({run.model.hidden for run in runs}):
        errors = [
            s / run.seconds - 1
            for s, run in zip(seconds, runs)
            if run.model.hidden == hidden
        ]
        means = {
            "mean error": statistics.mean(errors),
            "mean absolute error": statistics.mean(map(abs, errors)),
        }
        rows.append(
            {"hidden": hidden, "runs": len(errors)}
            | {name: round(mean, 3) for name, mean in means.items()}
        )
    mean = statistics.mean(abs(s / run.seconds - 1) for s, run in zip(seconds, runs))
    name, bar = (
        "109 runs of 1F1B on 64 to 512 A100",
        "mean absolute error below 14.7 %, vTrain's own",
    )
    uncalibrated = "nothing: no constant is chosen on these rows"
    source = "vTrain, data/ground_truth_multi.csv"
    return [
        Check(
            name,
            source,
            bar,
            mean < 0.147,
            f"mean absolute error {mean:.1%}",
            rows,
            uncalibrated,
        )
    ]
