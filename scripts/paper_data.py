"""The paper's experiments (paper.yaml) as runs, for paper.py, the sweep and the
planner's checks.

Invariant: each run's plan is legal, uses all GPUs of its panel, and has the panel's
global batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import yaml

from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions.cluster import Cluster
from megatron_2bw.tools.planner.descriptions.cluster_file import named_cluster
from megatron_2bw.tools.planner.descriptions.model import FLAGS, preset
from megatron_2bw.tools.planner.descriptions.plan import Plan

PAPER = yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text())
# The systems of section 5.2: the schedule, and whether the model is split into stages
# or by tensor parallelism.
SYSTEMS = {
    name: (system["schedule"], system["split"] == "stages")
    for name, system in PAPER["systems"].items()
}
MICROBATCHES = tuple(PAPER["microbatches"])


@dataclass(frozen=True)
class Panel:
    """Runs of one model on one cluster, `parallel` GPUs a copy of it, at several global
    batch sizes.

    microbatches, systems, recompute  what the runs differ in; of the first two, all if
    empty. recompute is none, full
                (every layer) or stage (the paper's: only the inputs of stages are kept)
    shape       (field, number) pairs that replace fields of the model
    precision   the caller's choice if empty
    cluster     of the planner: a preset, or a YAML file
    rounds      GPipe admits as many microbatches as fit, and flushes several times a
                batch; else it admits all
    iterations  of a whole training; 0: a short run, whose speed counts
    paper       the paper's samples/s, where it prints them
    ticked      the row that Table 1 ticks
    label       in the names of its runs, where two panels of a figure have runs of the
                same sizes
    """

    figure: str
    model: str
    servers: int
    gpus_per_server: int
    parallel: int
    batches: tuple[int, ...]
    microbatches: tuple[int, ...] = ()
    systems: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ("full",)
    shape: tuple[tuple[str, int], ...] = ()
    precision: str = ""
    cluster: str = "p3.16xlarge"
    rounds: bool = True
    iterations: int = 0
    paper: float | None = None
    ticked: bool = False
    label: str = ""

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Panel:
        """From YAML or JSON, which have lists; entries of other versions are left
        out."""
        shape = entries.get("shape", ())
        shape = [*shape.items()] if isinstance(shape, dict) else shape
        entries = {"gpus_per_server": PAPER["gpus_per_server"]} | dict(
            entries, shape=[tuple(pair) for pair in shape]
        )
        known = {
            name: entry
            for name, entry in entries.items()
            if name in cls.__dataclass_fields__
        }
        return cls(
            **{
                name: tuple(entry) if isinstance(entry, list) else entry
                for name, entry in known.items()
            }
        )

    @property
    def gpus(self) -> int:
        return self.servers * self.gpus_per_server

    @property
    def flags(self) -> list[str]:
        """Megatron's flags of `shape`."""
        words = [f"{FLAGS[name]} {number}" for name, number in self.shape]
        words += [
            f"--max-position-embeddings {number}"
            for name, number in self.shape
            if name == "sequence"
        ]
        return " ".join(words).split()


@dataclass(frozen=True)
class Reading:
    """What the paper leaves open, or a constant of the cost model without a source
    (`readings` of paper.yaml).

    both      of both rank orders the faster one counts
    same      all systems have 2BW's microbatch
    free      messages between stages take no time
    ahead     2BW hides its messages behind more forwards
    channels  of NCCL's communicators; 0: those of the links (descriptions/cluster.py)
    margin    as Cost's
    """

    name: str = ""
    says: str = ""
    both: bool = False
    same: bool = False
    free: bool = False
    ahead: bool = False
    channels: int = 0
    margin: float | None = None

    @property
    def of_memory(self) -> bool:
        return bool(self.channels) or self.margin is not None


FIRST = Reading()
READINGS = [Reading(**entry) for entry in PAPER["readings"]]


class FreeMessages(Cost):
    """Of stages whose messages take no time."""

    def _messages(self, plan: Plan) -> list[tuple[float, float]]:
        return [(0.0, 0.0)] * plan.depth


@lru_cache
def cost_of(
    name: str,
    cluster: Cluster | int,
    precision: str = "fp16",
    reading: Reading = FIRST,
    *shape: tuple[str, int],
) -> Cost:
    """Of a preset's model on a cluster, or on so many of the paper's servers. The
    paper's code did not sum the gradients of tied embeddings over stages."""
    if isinstance(cluster, int):
        cluster = replace(named_cluster("p3.16xlarge"), servers=cluster)
    derived = dict(groups=0, head_size=0, ffn=0)  # from heads and hidden
    model = replace(
        preset(name), tied=False, **derived, **{"sequence": 512, **dict(shape)}
    )
    cost = (FreeMessages if reading.free else Cost)(
        model, cluster, precision, margin=reading.margin
    )
    cost.channels = reading.channels or cost.channels
    return cost


@dataclass(frozen=True)
class Run:
    """One job."""

    panel: Panel
    system: str
    batch: int
    microbatch: int
    recompute: str = "full"
    reading: Reading = FIRST

    @property
    def name(self) -> str:
        system = self.system.lower().replace(" ", "-")
        sizes = f"batch{self.batch}-micro{self.microbatch}"
        recompute = self.recompute if self.recompute != "full" else ""
        return "-".join(
            filter(
                None,
                [
                    self.panel.figure,
                    self.panel.model,
                    system,
                    sizes,
                    recompute,
                    self.panel.label,
                ],
            )
        )

    def cost_of(self, reading: Reading) -> Cost:
        """Of the planner, on the panel's GPUs."""
        panel = self.panel
        sizes = {"servers": panel.servers, "gpus_per_server": panel.gpus_per_server}
        cluster = replace(named_cluster(panel.cluster), **sizes, profile=None)
        precision = panel.precision or PAPER["training"]["precision"]
        return cost_of(panel.model, cluster, precision, reading, *panel.shape)

    @property
    def cost(self) -> Cost:
        return self.cost_of(self.reading)

    def speed(self) -> float:
        """Samples/s, whether it fits or not."""
        plan, clock = (
            self.plan,
            self.cost_of(FIRST) if self.reading.of_memory else self.cost,
        )
        if self.reading.ahead:
            plan = plan.changed(extra_warmup=self.cost.extra_warmup(plan))
        orders = [plan, plan.changed(pipeline_inside=True)][: 1 + self.reading.both]
        return plan.global_batch / min(map(clock.seconds, orders))

    @cached_property
    def plan(self) -> Plan | None:
        """The sizes; None if the microbatches do not divide the batch or, with 2BW, do
        not fill the stages."""
        schedule, staged = SYSTEMS[self.system]
        tensor, depth = (1, self.panel.parallel) if staged else (self.panel.parallel, 1)
        width = self.panel.gpus // self.panel.parallel
        microbatches, rest = (
            divmod(self.batch, self.microbatch * width) if width else (0, 0)
        )
        if rest or not microbatches or schedule == "2bw" and microbatches < depth:
            return None
        stage = self.recompute == "stage"
        plan = Plan(
            *(tensor, depth, width, self.microbatch, microbatches),
            recompute="full" if stage else self.recompute,
            schedule=schedule,
            recompute_layers=self.cost.model.layers // depth if stage else 1,
        )
        size = (
            self.cost.gpipe_round(plan)
            if schedule == "gpipe" and self.panel.rounds
            else None
        )
        return plan.changed(gpipe_round=size) if size else plan

    def row(self) -> dict[str, Any]:
        plan, panel = self.plan, self.panel
        row = {
            "figure": panel.figure,
            "model": panel.model,
            "system": self.system,
            "schedule": plan.schedule,
        }
        row |= {"servers": panel.servers, "gpus": plan.gpus}
        row |= {
            name: getattr(plan, name)
            for name in ("tensor", "depth", "width", "microbatch")
        }
        row["recompute"] = self.recompute
        row["round"] = plan.gpipe_round or ""
        return row | {"batch": self.batch}


def grid(
    panels: Sequence[Panel],
    systems: Sequence[str] = tuple(SYSTEMS),
    microbatches: Sequence[int] = (),
    reading: Reading = FIRST,
) -> list[Run]:
    """All runs that are legal. microbatches: instead of the panels' own."""
    runs = [
        Run(panel, system, batch, microbatch, recompute, reading)
        for panel in panels
        for batch in panel.batches
        for system in panel.systems or systems
        if system in systems
        for microbatch in microbatches or panel.microbatches or MICROBATCHES
        for recompute in panel.recompute
    ]
    return [run for run in runs if run.plan is not None]


def panels(figure: str) -> list[Panel]:
    """Of a figure or table of paper.yaml; none if nothing of it is trained."""
    return [Panel.of(entries) for entries in PAPER["figures"][figure].get("runs", ())]
