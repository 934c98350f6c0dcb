"""The cost of 2BW on a GPU: time and memory of one stage, and the memory of eight stages that share the GPU.

    python bench/gpu_overheads.py --json out/bench/gpu_overheads.json

1. One stage of an 8-stage GPT 2.2B (4 of 32 layers, hidden 2304, 32 heads, sequence 512) under 2bw and under
   pipedream-flush: iteration time, time of a version flip, time of the training thread in the late step, as shares of
   the iteration; bytes per parameter between iterations against docs/design.md (18, 20, 24).
2. All 8 stages as 8 processes on the one GPU (messages over gloo): peak memory by stage under every schedule, as in
   the paper's Figure 8.

Without a GPU the same code runs on a tiny model on the CPU. It then gives no figures, and the JSON says so.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import gpt_flags, new_parser, write_result
from bench.emulated import iteration_seconds
from bench.stage_probe import Probe, probe
from megatron_2bw.local_ranks import run_world

SCHEDULES = ("2bw", "pipedream-flush", "gpipe", "no-pipelining", "pipedream")
# Bytes per parameter, docs/design.md: bf16 weights, fp32 gradients, main parameters and Adam.
EXPECTED = {"pipedream-flush": 18, "2bw with 1 slot": 20, "2bw": 24}


def command(schedule: str, stages: int, layers: int, chosen: argparse.Namespace, *flags: str) -> list[str]:
    return gpt_flags(
        layers,
        chosen.hidden,
        chosen.heads,
        chosen.sequence,
        "--bf16",
        "--no-gradient-accumulation-fusion",
        "--no-persist-layer-norm",
        *([] if chosen.cpu else ["--distributed-backend", "gloo", "--transformer-impl", "local"]),
        *flags,
        *(["--untie-embeddings-and-output-weights"] if schedule == "pipedream" else []),
        device="cpu" if chosen.cpu else None,
        pipeline_schedule=schedule,
        pipeline_model_parallel_size=stages,
        micro_batch_size=chosen.micro_batch_size,
        global_batch_size=chosen.micro_batch_size * chosen.microbatches,
        train_iters=chosen.iterations,
        vocab_size=1023,
        make_vocab_size_divisible_by=128,
        log_interval=1,
    )


def one_stage(chosen: argparse.Namespace) -> list[dict]:
    rows = []
    variants = {"pipedream-flush": (), "2bw": (), "2bw with 1 slot": ("--two-bw-gradient-slots", "1")}
    for name, flags in variants.items():
        argv = command(name.split()[0], 1, chosen.layers // 8, chosen, *flags)
        (run,) = run_world(1, probe, argv, timeout=1800)
        seconds = iteration_seconds([run])
        rows.append(
            {
                "schedule": name,
                "iteration_ms": 1e3 * seconds,
                "flip_ms": 1e3 * run.flip_seconds,
                "flip_share": run.flip_seconds / seconds,
                "late_step_ms": 1e3 * run.step_seconds,
                "late_step_share": run.step_seconds / seconds,
                "parameters": run.parameters,
                "bytes_per_parameter": run.static_bytes / run.parameters,
                "expected_bytes_per_parameter": EXPECTED[name],
                "peak_gib": run.peak_bytes / 2**30,
            }
        )
        row = rows[-1]
        print(
            f"{name:16s} iteration {row['iteration_ms']:8.1f} ms  flip {row['flip_share']:.4%}  late step "
            f"{row['late_step_share']:.4%}  {row['bytes_per_parameter']:.2f} bytes a parameter "
            f"(design: {row['expected_bytes_per_parameter']})",
            flush=True,
        )
    return rows


def eight_stages(chosen: argparse.Namespace) -> list[dict]:
    rows = []
    for schedule in SCHEDULES:
        runs: list[Probe] = run_world(8, probe, command(schedule, 8, chosen.layers, chosen), timeout=1800)
        rows.append({"schedule": schedule, "peak_gib_by_stage": [round(run.peak_bytes / 2**30, 3) for run in runs]})
        print(f"{schedule:16s} peak memory by stage (GiB): {rows[-1]['peak_gib_by_stage']}", flush=True)
    return rows


def main() -> None:
    import torch

    parser = new_parser(__doc__, "gpu_overheads")
    parser.add_argument("--layers", type=int, default=32, help="of the whole model, a multiple of 8")
    sizes = {"hidden": 2304, "heads": 32, "sequence": 512, "micro-batch-size": 8, "microbatches": 8, "iterations": 10}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    chosen = parser.parse_args()
    chosen.cpu = not torch.cuda.is_available()
    if chosen.cpu:
        print("no GPU here: a tiny model on the CPU, to show that the benchmark runs; its figures mean nothing")
        chosen.layers, chosen.hidden, chosen.heads, chosen.sequence, chosen.micro_batch_size = 8, 32, 4, 16, 1
    os.environ["MEGATRON_2BW_WORLD_DEVICE"] = "cpu" if chosen.cpu else "cuda"
    begun = time.monotonic()
    device = "cpu, tiny model: no figures" if chosen.cpu else torch.cuda.get_device_name()
    result = {"device": device, "one_stage": one_stage(chosen), "eight_stages": eight_stages(chosen)}
    result["seconds"] = round(time.monotonic() - begun)
    write_result(chosen.json, result)
    print(f"wrote {chosen.json}")


if __name__ == "__main__":
    main()
