"""A plan: the configuration that the planner chooses, and Megatron's flags for it. Pure
Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from operator import attrgetter
from typing import Any

from megatron_2bw.schedules import Schedule, Shape, schedule_of
from megatron_2bw.schedules.interleaved import Interleaved
from megatron_2bw.schedules.two_bw import LEAD
from megatron_2bw.tools.planner.descriptions.model import Model, command_line

RECOMPUTE = ("none", "selective", "mlp", "full")
# Megatron's flags for `memory` of its own schedule.
LEVERS = {
    "remainders": "--use-precision-aware-optimizer",
    "host": "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d "
    "--use-precision-aware-optimizer",
}
ARGUMENTS = {  # Megatron's, by field
    "tensor": "tensor_model_parallel_size",
    "depth": "pipeline_model_parallel_size",
    "width": "data_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "microbatch": "micro_batch_size",
    "global_batch": "global_batch_size",
    "recompute": "recompute_granularity",
    "schedule": "pipeline_schedule",
    "virtual": "virtual_pipeline_model_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "distributed_optimizer": "use_distributed_optimizer",
    "pipeline_inside": "use_tp_pp_dp_mapping",
    "first": "decoder_first_pipeline_num_layers",
    "last": "decoder_last_pipeline_num_layers",
    "memory": "two_bw_memory",
    "extra_warmup": "two_bw_extra_warmup",
    "late": "two_bw_late",
    "gpipe_round": "gpipe_round",
}


@dataclass(frozen=True)
class Plan:
    """A configuration on all GPUs. Their number is tensor × context × depth × width."""

    tensor: int  # tensor-parallel size
    depth: int  # pipeline stages
    width: int  # data-parallel size
    microbatch: int  # samples
    # of a batch and pipeline; the global batch is microbatch × microbatches × width
    microbatches: int
    # selective (core attention), mlp (with the experts), full (all layers)
    recompute: str = "none"
    # of --pipeline-schedule; "megatron" with `virtual` > 1 is Megatron's interleaved
    # schedule
    schedule: str = "2bw"
    virtual: int = 1  # model chunks per stage
    # of 2bw: --two-bw-memory; of Megatron's schedule one of LEVERS
    memory: str = "two-slots"
    distributed_optimizer: bool = False
    first: int = 0  # layers of the first stage if they differ from the others', else 0
    last: int = 0  # of the last stage
    # Rank order tp-pp-dp: the stages of a pipeline are neighbours. By default the
    # replicas of a stage are.
    pipeline_inside: bool = False
    # divides along the sequence what tensor parallelism does not divide
    sequence_parallel: bool = False
    # of 2bw: additional warm-up forwards, a number per boundary, or one for all
    extra_warmup: tuple[int, ...] = ()
    late: int | None = None  # of 2bw: the late microbatches; None: all
    corrected: bool = False  # of 2bw: --two-bw-correction auto
    # of gpipe: microbatches that it admits at a time; None: the whole batch
    gpipe_round: int | None = None
    # Of full, --recompute-num-layers: the layers of which only the first one's input is
    # kept; with all of a stage that is the stage's input, as in the paper (section
    # 4.1).
    recompute_layers: int = 1
    context: int = 1  # ranks that share a sequence
    # layers of each stage where `first` and `last` cannot express them
    stages: tuple[int, ...] = ()
    grad_reduce_in_bf16: bool = False  # gradients are reduced and kept in 16 bits
    expert: int = 1  # ranks that share the experts of a layer, among the replicas

    def changed(self, **fields: Any) -> Plan:
        """The plan with other fields. Five times as fast as dataclasses.replace: a
        search builds tens of thousands of plans."""
        plan = object.__new__(Plan)
        plan.__dict__.update(self.__dict__)
        for cached in ("pipeline", "shape"):
            plan.__dict__.pop(cached, None)
        plan.__dict__.update(fields)
        return plan

    @property
    def gpus(self) -> int:
        return self.tensor * self.context * self.depth * self.width

    @property
    def replicas(self) -> int:
        """GPUs with the same weights, which reduce their gradients together."""
        return self.context * self.width

    @property
    def exact(self) -> bool:
        """Whether no gradient is late."""
        return self.pipeline.flushes or self.late == 0

    @property
    def correction(self) -> str:
        """--two-bw-correction: none, or what auto is: predict or auto (run/flags/
        resolve.py)."""
        if not self.corrected:
            return "none"
        ahead = self.pipeline.ahead(self.shape, 0)
        if self.replicas > 1:
            ahead += LEAD
        known = self.microbatches > ahead
        if self.late is None and known and self.memory != "host":
            return "predict"
        return "auto"

    @property
    def samples(self) -> float:
        """Samples of a microbatch on one rank: context parallelism gives it a part of
        each sequence, and its work and activations are those of so many samples."""
        return self.microbatch / self.context

    @property
    def global_batch(self) -> int:
        return self.microbatch * self.microbatches * self.width

    @property
    def sequence_ranks(self) -> int:
        """Ranks over which sequence parallelism divides the hidden states."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def rounds(self) -> int:
        """Times that a schedule with a flush drains the pipeline in a batch."""
        return -(-self.microbatches // self.gpipe_round) if self.gpipe_round else 1

    @property
    def name(self) -> str:
        """Schedule and sizes, such as `2bw t1 d8 w8 b4`, or `2bw t1 c2 e4 d4 w8 b4`."""
        context = f" c{self.context}" if self.context > 1 else ""
        expert = f" e{self.expert}" if self.expert > 1 else ""
        ranks = f"t{self.tensor}{context}{expert} d{self.depth} w{self.width}"
        return f"{self.schedule_name} {ranks} b{self.microbatch}"

    @property
    def schedule_name(self) -> str:
        """The schedule with its model chunks, late microbatches, memory, stage 0's
        additional warm-up forwards, or round: `megatron x3`, `2bw K2`, `2bw one-slot`,
        `2bw host`, `2bw +2`, `gpipe round 4`."""
        name = self.schedule
        if self.virtual > 1:
            name += f" x{self.virtual}"
        if self.schedule == "2bw" and self.late is not None:
            name += f" K{self.late}"
        if self.memory != "two-slots":
            name += f" {self.memory}"
        if self.gpipe_round:
            name += f" round {self.gpipe_round}"
        extra = sum(self.extra)
        return f"{name} +{extra}" if extra else name

    @property
    def extra(self) -> tuple[int, ...]:
        """`extra_warmup` with a number per boundary."""
        numbers = self.extra_warmup or (0,)
        return numbers * (self.depth - 1) if len(numbers) == 1 else numbers

    @property
    def title(self) -> str:
        """The name, with the recompute if there is any."""
        if self.recompute == "none":
            return self.name
        return f"{self.name}, {self.recompute_name} recompute"

    @property
    def recompute_name(self) -> str:
        """none, selective, full; stage: full with more than one layer a recompute."""
        return "stage" if self.recompute_layers > 1 else self.recompute

    @cached_property
    def pipeline(self) -> Schedule:
        """The schedule as data. Megatron's own is 1F1B with a flush, or interleaved."""
        if self.virtual > 1:
            return Interleaved(self.virtual)
        name = "pipedream-flush" if self.schedule == "megatron" else self.schedule
        return schedule_of(
            name,
            late="all" if self.late is None else self.late,
            memory=self.memory,
            extra_warmup=self.extra_warmup,
            gpipe_round=self.gpipe_round,
        )

    @cached_property
    def shape(self) -> Shape:
        return Shape(self.depth, self.microbatches)

    def layers_of(self, model: Model) -> list[int]:
        """Layers of each stage, in all its chunks together."""
        if self.stages or self.depth == 1:
            return [*self.stages] or [model.layers]
        middle = self.depth - bool(self.first) - bool(self.last)
        each = 0
        if middle:
            each = (model.layers - self.first - self.last) // middle
        between = [each] * (self.depth - 2)
        return [self.first or each, *between, self.last or each]

    @property
    def layout(self) -> str | None:
        """`stages` in Megatron's notation: Et*3|t*2|t*2L."""
        if not self.stages:
            return None
        chunks = "|".join(f"t*{layers}" if layers else "" for layers in self.stages)
        return f"E{chunks}L"

    def flags(self, precision: str = "bf16") -> list[str]:
        """Megatron's and this project's flags of the configuration."""
        # 2bw's late step needs no flag for that
        overlaps = self.schedule == "megatron" and self.replicas > 1
        extra = self.extra
        if len(set(extra)) == 1:
            extra = extra[:1]
        extra = ",".join(map(str, extra))
        full = self.recompute == "full"
        of_mlp = self.recompute == "mlp"
        granularity = "selective" if of_mlp else self.recompute
        layers = self.recompute_layers
        is_2bw = self.schedule == "2bw"
        leaner = self.memory != "two-slots"
        return command_line(
            (
                True,
                f"--pipeline-schedule {self.schedule} "
                f"--tensor-model-parallel-size {self.tensor} "
                f"--pipeline-model-parallel-size {self.depth} "
                f"--micro-batch-size {self.microbatch} "
                f"--global-batch-size {self.global_batch}",
            ),
            (self.context > 1, f"--context-parallel-size {self.context}"),
            (self.expert > 1, f"--expert-model-parallel-size {self.expert}"),
            (self.first, f"--decoder-first-pipeline-num-layers {self.first}"),
            (self.last, f"--decoder-last-pipeline-num-layers {self.last}"),
            (self.stages, f"--pipeline-model-parallel-layout {self.layout}"),
            (
                self.virtual > 1,
                f"--num-virtual-stages-per-pipeline-rank {self.virtual}",
            ),
            (self.sequence_parallel, "--sequence-parallel"),
            (self.recompute != "none", f"--recompute-granularity {granularity}"),
            (of_mlp, "--recompute-modules mlp moe"),
            (full, f"--recompute-method uniform --recompute-num-layers {layers}"),
            (is_2bw, f"--two-bw-late {self.pipeline.late}"),
            (is_2bw and not self.corrected, "--two-bw-correction none"),
            (leaner and is_2bw, f"--two-bw-memory {self.memory}"),
            (leaner and not is_2bw, LEVERS.get(self.memory)),
            (any(self.extra), f"--two-bw-extra-warmup {extra}"),
            (self.gpipe_round, f"--gpipe-round {self.gpipe_round}"),
            (self.distributed_optimizer, "--use-distributed-optimizer"),
            (overlaps, "--overlap-grad-reduce"),
            (overlaps and self.distributed_optimizer, "--overlap-param-gather"),
            (self.pipeline_inside, "--use-tp-pp-dp-mapping"),
            (precision != "fp32", f"--{precision}"),
            (self.grad_reduce_in_bf16, "--grad-reduce-in-bf16"),
        )


def by_fields(names: str) -> Callable:
    """A decorator for a method of a plan: its result is computed once for plans that
    share the named fields."""
    key = attrgetter(*names.split())

    def decorate(method: Callable) -> Callable:
        store = f"_by_fields_{method.__name__}"

        @wraps(method)
        def cached(self: Any, plan: Plan) -> Any:
            results = self.__dict__.setdefault(store, {})
            values = key(plan)
            if values not in results:
                results[values] = method(self, plan)
            return results[values]

        return cached

    return decorate
