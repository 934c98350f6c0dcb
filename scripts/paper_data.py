"""The paper's experiments (paper.yaml) as runs, for paper.py, the sweep and the
planner's checks.

Invariant: each run's plan is legal, uses all GPUs of its panel, and has the panel's
global batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from megatron_2bw.base.files import read_yaml
from megatron_2bw.tools.planner.cost.communication import Message
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions.cluster import Cluster
from megatron_2bw.tools.planner.descriptions.cluster_file import named_cluster
from megatron_2bw.tools.planner.descriptions.model import FLAGS, preset
from megatron_2bw.tools.planner.descriptions.plan import Plan

Row = dict[str, Any]
Shape = tuple[tuple[str, int], ...]

PAPER: Row = read_yaml(Path(__file__).with_name("paper.yaml"))
# The systems of section 5.2: the schedule, and the number of stages or of tensor ranks
# in a model-parallel group, which the panel gives.
SYSTEMS = PAPER["systems"]


@dataclass(frozen=True)
class Panel:
    """Runs of one model on one cluster, `parallel` GPUs a copy of it, at several global
    batch sizes.

    microbatches, systems  what the runs differ in; all if empty
    recompute   none, full (every layer) or stage (the paper's: only the inputs of
                stages are kept)
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
    shape: Shape = ()
    precision: str = ""
    cluster: str = "p3.16xlarge"
    rounds: bool = True
    iterations: int = 0
    paper: float | str = ""
    ticked: bool = False
    label: str = ""

    @classmethod
    def of(cls, entries: Row) -> Panel:
        """From YAML or JSON, which have lists; entries of other versions are left
        out."""
        entries = {"gpus_per_server": PAPER["gpus_per_server"], "shape": {}, **entries}
        values = {}
        for field in fields(cls):
            if field.name in entries:
                value = entries[field.name]
                values[field.name] = tuple(value) if isinstance(value, list) else value
        values["shape"] = tuple(dict(values["shape"]).items())
        return cls(**values)

    @property
    def gpus(self) -> int:
        return self.servers * self.gpus_per_server

    @property
    def flags(self) -> list[str]:
        """Megatron's flags of `shape`."""
        words = []
        for name, number in self.shape:
            words += [FLAGS[name], str(number)]
            if name == "sequence":
                words += ["--max-position-embeddings", str(number)]
        return words


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
    """The cost with messages that take no time."""

    def messages(self, plan: Plan) -> list[Message]:
        return [Message(seconds=0.0, occupied=0.0)] * plan.depth


@lru_cache
def cost_of(
    name: str,
    cluster: Cluster | int,
    reading: Reading = FIRST,
    precision: str = "fp16",
    shape: Shape = (),
) -> Cost:
    """The cost of a preset's model on a cluster, or on so many of the paper's servers.
    The paper's code did not sum the gradients of tied embeddings over stages."""
    if isinstance(cluster, int):
        cluster = replace(named_cluster("p3.16xlarge"), servers=cluster)
    sizes = {"sequence": 512, **dict(shape)}
    # groups, head_size and ffn follow from heads and hidden
    sizes |= {"groups": 0, "head_size": 0, "ffn": 0}
    model = replace(preset(name), tied=False, **sizes)
    kind = FreeMessages if reading.free else Cost
    cost = kind(model, cluster, precision, margin=reading.margin)
    cost.channels = reading.channels or cost.channels
    return cost


@dataclass(frozen=True)
class PaperRun:
    """One job."""

    panel: Panel
    system: str
    batch: int
    microbatch: int
    recompute: str = "full"
    reading: Reading = FIRST

    @property
    def name(self) -> str:
        panel = self.panel
        system = self.system.lower().replace(" ", "-")
        sizes = f"batch{self.batch}-micro{self.microbatch}"
        name = f"{panel.figure}-{panel.model}-{system}-{sizes}"
        if self.recompute != "full":
            name += f"-{self.recompute}"
        return f"{name}-{panel.label}" if panel.label else name

    def cost_of(self, reading: Reading) -> Cost:
        """The planner's cost on the panel's GPUs."""
        panel = self.panel
        cluster = replace(
            named_cluster(panel.cluster),
            servers=panel.servers,
            gpus_per_server=panel.gpus_per_server,
        )
        precision = panel.precision or PAPER["training"]["precision"]
        return cost_of(panel.model, cluster, reading, precision, panel.shape)

    @property
    def cost(self) -> Cost:
        return self.cost_of(self.reading)

    def speed(self) -> float:
        """Samples/s, whether it fits or not."""
        plan = self.plan
        cost = self.cost_of(FIRST) if self.reading.of_memory else self.cost
        if self.reading.ahead:
            plan = plan.changed(extra_warmup=self.cost.extra_warmup(plan))
        seconds = cost.seconds(plan)
        if self.reading.both:
            seconds = min(seconds, cost.seconds(plan.changed(pipeline_inside=True)))
        return plan.global_batch / seconds

    @cached_property
    def plan(self) -> Plan | None:
        """The sizes; None if the microbatches do not divide the batch or, with 2BW, do
        not fill the stages."""
        system = SYSTEMS[self.system]
        schedule = system["schedule"]
        parallel = self.panel.parallel
        width = self.panel.gpus // parallel
        if not width or self.batch % (self.microbatch * width):
            return None
        microbatches = self.batch // (self.microbatch * width)
        sizes = (width, self.microbatch, microbatches, self.recompute, schedule)
        if system["split"] == "tensor":
            return Plan(parallel, 1, *sizes)
        plan = Plan(1, parallel, *sizes)
        if schedule == "2bw" and microbatches < parallel:
            return None
        if self.recompute == "stage":
            layers = self.cost.model.layers // parallel
            plan = plan.changed(recompute="full", recompute_layers=layers)
        if schedule == "gpipe" and self.panel.rounds:
            plan = plan.changed(gpipe_round=self.cost.gpipe_round(plan))
        return plan

    def row(self) -> Row:
        row = {"round": self.plan.gpipe_round or ""}
        for owner, names in (
            (self.panel, "figure model servers"),
            (self, "system batch recompute"),
            (self.plan, "schedule gpus tensor depth width microbatch"),
        ):
            for name in names.split():
                row[name] = getattr(owner, name)
        return row


def grid(
    panels: Sequence[Panel],
    systems: Sequence[str] = tuple(SYSTEMS),
    microbatches: Sequence[int] = (),
    reading: Reading = FIRST,
) -> list[PaperRun]:
    """All runs that are legal. microbatches: instead of the panels' own."""
    runs = []
    for panel in panels:
        sizes = microbatches or panel.microbatches or PAPER["microbatches"]
        chosen = [name for name in panel.systems or systems if name in systems]
        for batch, system, size, recompute in itertools.product(
            panel.batches, chosen, sizes, panel.recompute
        ):
            run = PaperRun(panel, system, batch, size, recompute, reading)
            if run.plan is not None:
                runs.append(run)
    return runs


def panels(figure: str) -> list[Panel]:
    """The runs of a figure or table of paper.yaml; none if nothing of it is trained."""
    runs = PAPER["figures"][figure].get("runs", ())
    return list(map(Panel.of, runs))
