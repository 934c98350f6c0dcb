"""Checks of the constants of GPUs and links: products, all-reduces, and runs that chose none of them."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from bench.planner_checks import MEASURED, Check, compared, table, within
from megatron_2bw.models import cluster
from megatron_2bw.models.model import LLAMA_LAYER, Model
from megatron_2bw.models.plan import Plan
from megatron_2bw.planner.cost.compute import Compute
from megatron_2bw.planner.cost.links import Group, all_reduce
from megatron_2bw.planner.cost.memory import GIB
from megatron_2bw.planner.cost.simulated import Cost
from megatron_2bw.planner.measure import calibrate
from megatron_2bw.planner.measure.runs import Run, read_runs

# Flash attention with dropout in Megatron's deterministic mode, in times of the same without both.
DETERMINISTIC = 2.2


def kernels() -> list[Check]:
    """Products by shape, against one share for all shapes."""
    rows = []
    for name, preset in (("A100-PCIe", "dgx-a100-80"), ("B200", "dgx-b200")):
        shapes = [
            ([int(row[key]) for key in "mkn"], float(row["share"]))
            for row in table("simumax_kernels.csv")
            if (row["gpu"], row["kind"]) == (name, "product")
        ]
        compute = Compute(Model("any", 1, 128, 1), cluster.preset(preset, 1), "bf16", True)
        work = [2 * math.prod(sizes) / compute.peak for sizes, _ in shapes]
        ratios = [compute.product(*sizes) * share / ideal for (sizes, share), ideal in zip(shapes, work)]
        took = [ideal / share for (_, share), ideal in zip(shapes, work)]
        best = sum(map(math.prod, zip(ratios, took))) / sum(took)
        row = {"GPU": name, "products": len(shapes)}
        row |= {"share of large products": round(compute.flops / compute.peak * best, 2)}
        row |= {"planner's": round(compute.flops / compute.peak, 2)}
        row |= {"scatter": round(statistics.pstdev(map(math.log, ratios)), 3)}
        one = statistics.pstdev(math.log(share) for _, share in shapes)
        rows.append(row | {"scatter with one share": round(one, 3)})
    found = ", ".join(f"{row['GPU']} {row['share of large products']} ({row["planner's"]})" for row in rows)
    holds = all(abs(row["share of large products"] - row["planner's"]) <= 0.03 for row in rows)
    name, source = "matrix products by shape: the share that large ones reach", "SimuMax, configs/system (Apache-2.0)"
    result = f"{found}; a term by shape lowers the A100's scatter, not the B200's, whose power limits long products"
    chosen = "TILE and FILL are chosen on the A100's rows; the B200's share on its own and 405B's; the A100's on none"
    return [Check(name, source, "the planner's share within 0.03", holds, result, rows, chosen)]


def links() -> list[Check]:
    """All-reduces on 2 to 8 GPUs of a server. The presets' rates are chosen on 2, 4 and 8."""
    rows = []
    for name, preset in (("V100", "p3.16xlarge"), ("A100", "dgx-a100-80")):
        server = cluster.preset(preset, 1)
        one = replace(server, inside=replace(server.inside, pair_gb_s=0, four_gb_s=0))
        for ranks in (2, 4, 8):
            runs = [row for row in table("all_reduce.csv") if (row["gpu"], row["ranks"]) == (name, str(ranks))]
            group, row = Group(ranks, 1, 1), {"GPU": name, "GPUs": ranks}
            for key, on in (("error", server), ("error with one rate", one)):
                errors = [all_reduce(on, group, float(r["bytes"])) / (float(r["us"]) * 1e-6) - 1 for r in runs]
                row |= {key: round(statistics.mean(map(abs, errors)), 3)}
            rows.append(row)
    name, source = "NCCL's all-reduces of 1 MB to 1 GB on 2, 4 and 8 GPUs of a server", "vTrain, trace/ (MIT)"
    return [within(20, name, source, rows, what="mean by group ", assumes="rates and latencies chosen on these rows")]


def golden() -> list[Check]:
    """Megatron-LM's own tests of a 7B on 8 GPUs, one batch of 8."""
    model, rows, memory = Model("7B", 32, 4096, 32, 131072, 8192, groups=8, tied=False), [], []
    presets = {"A100": "dgx-a100-80", "H100": "dgx-h100", "GB200": "gb200-nvl72"}
    for row in table("megatron_golden_7b.csv"):
        server = replace(cluster.preset(presets[row["gpu"]], 1), gpus_per_server=8)
        share = server.device.attention_efficiency / DETERMINISTIC
        cost = Cost(model, replace(server, device=replace(server.device, attention_efficiency=share)))
        cost.memory.engine = False  # --no-gradient-accumulation-fusion
        tensor, depth, virtual, size = (int(row[name]) for name in ("tensor", "depth", "virtual", "microbatch"))
        width = 8 // (tensor * depth)
        plan = Plan(tensor, depth, width, size, 8 // (width * size), "none", "megatron", virtual)
        plan = replace(plan, distributed_optimizer=True)
        seconds, held = cost.seconds(plan), cost.memory.stages(plan)[-1].total / GIB
        sizes, gib = {"GPU": row["gpu"], "t": tensor, "d": depth}, float(row["gib"])
        bytes_ = {"measured GiB": gib, "predicted GiB": round(held, 1), "memory's error": round(held / gib - 1, 3)}
        memory.append(sizes | compared(float(row["seconds"]), seconds, "s", 3) | bytes_)
        rows.append(memory[-1] | {"fitted to": row["gpu"] == "A100"})
    source = "Megatron-LM, tests/functional_tests (golden values)"
    mode = f"deterministic mode: attention takes {DETERMINISTIC} times as long, chosen on the two A100 rows"
    hopper, blackwell = ([row for row in rows if (row["GPU"] == "GB200") == new] for new in (False, True))
    return [
        within(8, "7B on 8 H100 (A100 is fitted to)", source, hopper, assumes=mode),
        within(8, "7B on 8 GPUs of a GB200 NVL72", source, blackwell, assumes="the same"),
        within(2, "memory of 7B's last stage", source, memory, "memory's error", shown=False, assumes="nothing fused"),
    ]


def b200() -> list[Check]:
    """12 layers of a 70B on 8 B200. Its runs overlapped no reduction, so the plans are those of a plain 1F1B."""
    preset, chosen, source = cluster.PRESETS["dgx-b200"], [0, 1, 2, 3], "SimuMax, docs/b200 (Apache-2.0)"
    rows, runs = _b200_rows(Model("70B", 12, 8192, 64, 128256, 4096, groups=8, ffn=28672, tied=False, **LLAMA_LAYER))
    fitted = calibrate.predict(calibrate.calibrate(preset, [runs[index] for index in chosen]), runs)
    after = [
        row | compared(run.seconds, seconds, "s", 3) | {"fitted to": index in chosen}
        for index, (row, run, seconds) in enumerate(zip(rows, runs, fitted))
    ]
    large, _ = _b200_rows(Model("405B", 4, 16384, 128, 128256, 4096, groups=8, ffn=53248, tied=False, **LLAMA_LAYER))
    alone = "products, memory-bound kernels and collectives measured one by one; 0.02 of the products' share on 405B"
    memory = dict(key="memory's error", shown=False, assumes="one layer's gradients are dummies")
    return [
        within(8, "12 layers of 70B on 8 B200", source, rows, assumes=alone),
        within(5, "the same after four rows", source, after, assumes="the four of 4 microbatches"),
        within(8, "4 layers of 405B on 8 B200", source, large, assumes="chose 0.02 of the products' share"),
        within(2, "memory of 70B and 405B on 8 B200", source, rows + large, **memory),
    ]


def _b200_rows(model: Model) -> tuple[list[dict], list[Run]]:
    cost, rows, runs = Cost(model, cluster.PRESETS["dgx-b200"]), [], []
    for row in table(f"simumax_b200_{model.name.lower()}.csv"):
        tensor, depth, width, batch = (int(row[name]) for name in ("tensor", "depth", "width", "global_batch"))
        plan = Plan(tensor, depth, width, 1, batch // width, "none", "pipedream-flush")
        plan = replace(plan, sequence_parallel=tensor > 1, distributed_optimizer=width > 1)
        run, gib = Run(model, plan, float(row["seconds"]), flash=True), float(row["gib"])
        sizes = {"t": tensor, "d": depth, "m": plan.microbatches}
        error = round(cost.memory.heaviest(plan) / GIB / gib - 1, 3)
        values = compared(run.seconds, cost.seconds(plan), "s", 3)
        rows.append(sizes | values | {"measured GiB": gib, "memory's error": error})
        runs.append(run)
    return rows, runs


def multi_node() -> list[Check]:
    """Runs on 64 to 512 A100 that chose no constant."""
    runs = read_runs(MEASURED / "vtrain_multi_node.csv")
    seconds = calibrate.predict(cluster.PRESETS["dgx-a100-80"], runs)
    rows = []
    for hidden in sorted({run.model.hidden for run in runs}):
        errors = [s / run.seconds - 1 for s, run in zip(seconds, runs) if run.model.hidden == hidden]
        means = {"mean error": statistics.mean(errors), "mean absolute error": statistics.mean(map(abs, errors))}
        rows.append({"hidden": hidden, "runs": len(errors)} | {name: round(mean, 3) for name, mean in means.items()})
    mean = statistics.mean(abs(s / run.seconds - 1) for s, run in zip(seconds, runs))
    name, bar = "109 runs of 1F1B on 64 to 512 A100", "mean absolute error below 14.7 %, vTrain's own"
    uncalibrated = "nothing: no constant is chosen on these rows"
    source = "vTrain, data/ground_truth_multi.csv"
    return [Check(name, source, bar, mean < 0.147, f"mean absolute error {mean:.1%}", rows, uncalibrated)]
