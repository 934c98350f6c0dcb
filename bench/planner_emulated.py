"""Simulated against measured iteration times of the emulated pipelines of schedule_efficiency.py.

A stage's computation in addition to its sleep is measured once, on one stage alone. The simulator gets this time and
no measurement of the pipelines that it predicts.
"""

from __future__ import annotations

import argparse

from bench.planner_checks import Check, compared, within
from bench.schedule_efficiency import OURS, measure
from megatron_2bw.schedules import SCHEDULES, TwoBW
from megatron_2bw.schedules.interleaved import Interleaved
from megatron_2bw.timelines.simulator import Times, iteration_time

FORWARD, BACKWARD = 100.0, 200.0  # milliseconds
PIPELINES = SCHEDULES | {"megatron-interleaved": Interleaved(2), "2bw, one slot": TwoBW(1)}


def emulated(depths: list[int]) -> list[Check]:
    """Every schedule at each depth, with as many microbatches as stages."""
    chosen = argparse.Namespace(forward_ms=FORWARD, backward_ms=BACKWARD, iterations=9, width=1, real=False)
    alone = measure("2bw", 1, 8, chosen, "")["iteration_ms"] / 8 - FORWARD - BACKWARD
    print(f"one stage alone computes {alone:.1f} ms per microbatch in addition to its sleep", flush=True)
    rows = []
    for depth in depths:
        for name in (*OURS, "megatron-interleaved", "pipedream", "2bw, one slot"):
            flags = "--two-bw-gradient-slots 1" if name == "2bw, one slot" else ""
            measured = measure(name.split(",")[0], depth, depth, chosen, flags)["iteration_ms"]
            computed = alone if name == "megatron-interleaved" else alone / 2  # each of its two chunks computes
            times = Times(FORWARD + computed, BACKWARD + computed, joint_step=name == "pipedream")
            pipeline = PIPELINES.get(name, SCHEDULES["pipedream-flush"])
            predicted = iteration_time(pipeline, depth, depth, times)
            rows.append({"schedule": name, "d": depth, "m": depth} | compared(measured, predicted, "ms", 1))
            print(f"  {name:22s} d {depth}  measured {measured:8.1f} ms  predicted {predicted:8.1f} ms", flush=True)
    name = f"emulated pipelines run here, d = {', '.join(map(str, depths))}"
    return [within(5, name, "bench/schedule_efficiency.py", rows, assumes="computing of one stage alone")]
