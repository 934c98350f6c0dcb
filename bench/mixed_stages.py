"""Plans for a cluster of two GPUs, against plans that treat all as the slow one: simulated, and run on sleeping stages.

    python bench/schedule_efficiency.py --mixed --json out/bench/mixed_stages.json

For each schedule the planner plans a GPT 1.3B once on the cluster of bench/mixed.yaml, and once as if all of its GPUs
were the slow ones; both plans are then timed on the cluster as it is. "all sizes" is the best plan of each search. In
"run" a plan has 8 stages of one GPU each, and its layers are those of a tiny real GPT, whose forwards and backwards
sleep as long as the planner's, times --scale. A gain is the time of a sample with slow GPUs by that with both.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.emulated import iteration_seconds, train
from megatron_2bw.gpu_check.entry import gpt_flags
from megatron_2bw.local_ranks import run_world
from megatron_2bw.models import model as models
from megatron_2bw.models.cluster_file import from_yaml
from megatron_2bw.models.plan import Plan
from megatron_2bw.planner.cost.simulated import Cost
from megatron_2bw.planner.find.search import best
from megatron_2bw.planner.find.space import Space
from megatron_2bw.timelines.simulator import Times, long_iteration_time

MODEL, BATCH = "gpt-1.3b", 64


def plans(cost: Cost, space: Space) -> list[Plan]:
    """The best plan of the cluster, and the best one if all its GPUs were the slowest."""
    return [best(on, space)[0] for on in (cost, cost.on(replace(cost.cluster, devices=())))]


def sample_ms(cost: Cost, plan: Plan) -> float:
    return 1e3 * cost.seconds(plan) / plan.global_batch


def measured(cost: Cost, plan: Plan, scale: float, iterations: int) -> tuple[float, float]:
    """(simulated, measured) seconds of an iteration in which the stages sleep as long as they compute."""
    works = cost.stages(plan)
    forward, backward = ([scale * getattr(work, name) for work in works] for name in ("forward", "backward"))
    sizes = f"--pipeline-model-parallel-layout {plan.layout}" if plan.stages else ""
    if plan.first or plan.last:
        sizes = f"--decoder-first-pipeline-num-layers {plan.first} --decoder-last-pipeline-num-layers {plan.last}"
    text = f"""--pipeline-schedule {plan.schedule} --pipeline-model-parallel-size {plan.depth} --micro-batch-size 1
        --global-batch-size {plan.microbatches} --train-iters {iterations} --lr 1e-3 --vocab-size 63
        --log-interval 5 {sizes}"""
    words = gpt_flags(cost.model.layers, 16, 2, 8, text)
    simulated = long_iteration_time(plan.pipeline, plan.depth, plan.microbatches, Times(forward, backward))
    limit = 150 + 3 * iterations * simulated
    return simulated, iteration_seconds(run_world(plan.depth, train, words, forward, backward, timeout=limit))


def compare(schedule: str, stages: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """The row of a schedule; with fewer than 8 stages, 4 or 2 GPUs have a stage."""
    cost = Cost(models.preset(MODEL), from_yaml(Path(__file__).with_name("mixed.yaml")), "bf16")
    space = Space(BATCH, (schedule,), recompute=("none", "full"), extrapolate=False)
    free, alike = plans(cost, space)
    found = {"plan": free.title, "layers": free.layers_of(cost.model), "plan of slow GPUs": alike.title}
    found["gain"] = round(sample_ms(cost, alike) / sample_ms(cost, free), 3)
    sizes = {"tensor": (1,), "depth": (stages,), "microbatch": (chosen.microbatch,)}
    fixed = replace(space, batch=cost.cluster.gpus * chosen.microbatch, extra_warmup=False, **sizes)
    rows, times = {}, []
    for name, plan in zip(("plan", "plan of slow GPUs"), plans(cost, fixed)):
        simulated, seconds = measured(cost, plan, chosen.scale, chosen.iterations)
        rows[name] = {"layers": plan.layers_of(cost.model), "ms a sample": round(sample_ms(cost, plan), 2)}
        rows[name] |= {"emulated, simulated ms": round(1e3 * simulated, 1)}
        rows[name] |= {"emulated, measured ms": round(1e3 * seconds, 1)}
        times.append((simulated, seconds))
    (here, run), (slow, slow_run) = times
    gains = {"simulated gain": round(slow / here, 3), "measured gain": round(slow_run / run, 3)}
    print(f"{schedule}: the plan is {found['gain']:.2f} times as fast as the plan of slow GPUs (simulated); {gains}")
    return {"schedule": schedule, "all sizes": found, "run": rows | gains}
