"""The result of a search as plain JSON: all printed figures, and the bytes of every
stage. Pure Python."""

import json
from dataclasses import asdict
from typing import Any

from megatron_2bw.tools.planner.cost.simulated import Cost, Estimate
from megatron_2bw.tools.planner.tell import jobs, training
from megatron_2bw.tools.planner.tell.explain import Result


def as_json(result: Result) -> dict[str, Any]:
    """The result in plain types: seconds, bytes, samples."""
    cost = result.cost
    content = {
        "model": asdict(cost.model),
        "cluster": asdict(cost.cluster),
        "space": asdict(result.search.space),
        "precision": cost.precision,
        "flash": cost.flash,
        "margin": cost.share_left_free,
        "error": cost.cluster.device.error,
        "ties": result.ties,
        "run": {
            "model": cost.model.flags(),
            "data": jobs.mock_data(cost.model),
        },
        "plans": [_estimate(cost, estimate) for estimate in result.estimates],
    }
    return json.loads(json.dumps(content))  # lists for tuples


def _estimate(cost: Cost, estimate: Estimate) -> dict[str, Any]:
    plan = estimate.plan
    return asdict(plan) | {
        "name": plan.title,
        "flags": plan.flags(cost.precision),
        "training": training.flags(estimate.seconds),
        "save_interval": training.save_interval(estimate.seconds),
        "layers": plan.layers_of(cost.model),
        "global_batch": plan.global_batch,
        "seconds": estimate.seconds,
        "samples_per_second": estimate.throughput,
        "split": asdict(estimate.split),
        "memory_by_stage": [asdict(stage) for stage in estimate.memory],
        "capacity": estimate.capacity,
    }
