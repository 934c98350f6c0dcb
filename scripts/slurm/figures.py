"""The runs of the paper's Figures 6 and 7, their speed, and the picture.

Invariant: a bar is the fastest completed microbatch size; where no run completed, a word stands in place of the bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_2bw import run_log
from megatron_2bw.files import write_figure
from megatron_2bw.planner.describe.plan import Plan

# The systems of the figures: the schedule, and whether the model is split into stages or by tensor parallelism.
SYSTEMS = {
    "inter-layer MP": ("no-pipelining", True),
    "tensor MP": ("megatron", False),
    "GPipe": ("gpipe", True),
    "PipeDream-Flush": ("pipedream-flush", True),
    "PipeDream-2BW": ("2bw", True),
}


@dataclass(frozen=True)
class Panel:
    """A group of bars: a model on a cluster, `parallel` GPUs a copy of it, at several global batch sizes."""

    figure: str
    model: str
    servers: int
    gpus_per_server: int
    parallel: int
    batches: tuple[int, ...]
    flags: tuple[str, ...] = ()


# Section 5.2: V100 servers of 8 GPUs, a sequence of 512. Each model at a small and a large batch.
PANELS = [
    Panel("6a", "gpt-2.2b", 1, 8, 8, (64, 256)),
    Panel("6b", "gpt-2.2b", 8, 8, 8, (512, 2048)),
    Panel("6c", "gpt-3.8b", 8, 8, 16, (512, 2048)),
    Panel("7a", "bert-2.2b", 1, 8, 8, (64, 256)),
    Panel("7b", "bert-2.2b", 8, 8, 8, (512, 2048)),
    # 16 tensor ranks must divide the heads, as they do those of the GPT.
    Panel("7c", "bert-3.8b", 8, 8, 16, (512, 2048), ("--num-attention-heads", "32")),
]


@dataclass(frozen=True)
class Run:
    """One job."""

    panel: Panel
    system: str
    batch: int
    microbatch: int

    @property
    def name(self) -> str:
        system = self.system.lower().replace(" ", "-")
        return f"{self.panel.figure}-{self.panel.model}-{system}-batch{self.batch}-micro{self.microbatch}"

    @property
    def plan(self) -> Plan | None:
        """The sizes; None if the microbatches do not divide the batch or, with 2BW, do not fill the stages."""
        schedule, staged = SYSTEMS[self.system]
        tensor, depth = (1, self.panel.parallel) if staged else (self.panel.parallel, 1)
        width = self.panel.servers * self.panel.gpus_per_server // self.panel.parallel
        microbatches, rest = divmod(self.batch, self.microbatch * width)
        if rest or not microbatches or schedule == "2bw" and microbatches < depth:
            return None
        return Plan(tensor, depth, width, self.microbatch, microbatches, recompute="full", schedule=schedule)

    def row(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "figure": self.panel.figure,
            "model": self.panel.model,
            "system": self.system,
            "schedule": plan.schedule,
            "servers": self.panel.servers,
            "gpus": plan.gpus,
            "tensor": plan.tensor,
            "depth": plan.depth,
            "width": plan.width,
            "microbatch": self.microbatch,
            "batch": self.batch,
        }


def grid(panels: Sequence[Panel], systems: Sequence[str], microbatches: Sequence[int]) -> list[Run]:
    """All runs that are legal."""
    runs = [
        Run(panel, system, batch, microbatch)
        for panel in panels
        for batch in panel.batches
        for system in systems
        for microbatch in microbatches
    ]
    return [run for run in runs if run.plan is not None]


def measured(text: str, warm_up: int) -> dict[str, Any]:
    """Speed from Megatron's log lines after `warm_up` iterations; empty if there is none."""
    times, batch, memory, before = [], 0, 0.0, 0
    for line in run_log.training(text):
        size = line.fields.get("global batch size")
        if line.milliseconds is None or size is None:  # cut off
            continue
        if before >= warm_up:
            times += [line.milliseconds] * (line.iteration - before)
        before, batch = line.iteration, int(size)
        memory = max([memory, *line.stage_memory])
    if not times:
        return {}
    mean = sum(times) / len(times)
    speed = {"samples_per_second": round(1000 * batch / mean, 3), "ms_per_iteration": round(mean, 3)}
    return speed | {"iterations": len(times), "peak_memory_gib": memory or ""}


def bars(entries: list[dict[str, Any]]) -> dict[tuple[str, str, int], dict[tuple[str, int], float | str]]:
    """Panel (figure, model, GPUs) -> (system, batch) -> samples a second of the fastest microbatch, or the word."""
    panels: dict[tuple[str, str, int], dict[tuple[str, int], float | str]] = {}
    for entry in entries:
        panel = panels.setdefault((entry["figure"], entry["model"], entry["gpus"]), {})
        key, speed = (entry["system"], entry["batch"]), entry["samples_per_second"] or entry["status"]
        best = panel.get(key)
        if best is None or isinstance(speed, float) and (isinstance(best, str) or speed > best):
            panel[key] = speed
    return panels


def draw(entries: list[dict[str, Any]], path: Path) -> None:
    """The bars of each panel, grouped by batch size; a word where nothing was measured."""
    from matplotlib.figure import Figure

    panels = bars(entries)
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)
    for axes, ((name, model, gpus), values) in zip(all_axes[0], panels.items()):
        systems = [system for system in SYSTEMS if any(key[0] == system for key in values)]
        batches = sorted({batch for _, batch in values})
        for place, system in enumerate(systems):
            for group, batch in enumerate(batches):
                value, x = values.get((system, batch), ""), group + 0.8 * (place + 0.5) / len(systems) - 0.4
                height = value if isinstance(value, float) else 0
                axes.bar(x, height, 0.75 / len(systems), color=f"C{place}", label=system if not group else None)
                text = f"{value:.3g}" if height else {"out of memory": "OOM"}.get(str(value), value)
                axes.text(x, height, f" {text}", ha="center", va="bottom", fontsize=7, rotation=90)
        axes.set_xticks(range(len(batches)), batches)
        axes.set(xlabel="global batch size", title=f"{name}  {model}, {gpus} GPUs".strip())
        axes.margins(y=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0][0].set_ylabel("samples / s")
    all_axes[0][0].legend(fontsize=7)
    write_figure(path, figure)
