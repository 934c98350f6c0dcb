"""Measured times for the planner: one block, the output layer, the optimizer's step.
Pure Python.

Invariant: every time was measured with Megatron's own classes on one machine
(measure/blocks.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from megatron_2bw.base.errors import UserError
from megatron_2bw.base.files import read_yaml, write_json
from megatron_2bw.tools.planner.descriptions.model import FLAGS, Model
from megatron_2bw.tools.planner.descriptions.reading import (
    Count,
    Described,
    Positive,
    described,
)

KIND = "megatron-2bw profile"
SHAPE = {"gated": "--swiglu", "dropout": "--hidden-dropout"} | FLAGS
MEASURED = "MEASURED"


@dataclass(frozen=True)
class BlockTime(Described):
    """Seconds of one forward and one backward on `microbatch` samples."""

    microbatch: Count
    forward: Positive
    backward: Positive


@dataclass(frozen=True)
class Profile(Described):
    """Measured times, the layer's shape that they hold for (as in model.Model), and the
    machine."""

    device: str  # its name
    precision: str  # fp32, bf16 or fp16
    # of the layer: gpt or bert. The output layer is GPT's for both, without BERT's head
    # before it
    architecture: str
    hidden: int
    heads: int
    ffn: int
    groups: int
    head_size: int
    sequence: int
    gated: bool
    dropout: bool
    vocab: int  # of the output layer
    # of one transformer layer, in ascending order of microbatches
    blocks: tuple[BlockTime, ...]
    # of final norm, output layer and loss, in this order; no embedding
    output: tuple[BlockTime, ...]
    # Of one step of `optimizer` on a layer, with gradient norm and casts to 16 bit.
    # Below about 10⁵ parameters the calls take longer than the arithmetic.
    optimizer_seconds_per_parameter: Positive
    optimizer: str
    threads: int  # of torch, on a CPU
    made_with: str  # versions, and the name of Megatron's layer implementation

    def layer(self, microbatch: float) -> tuple[float, float]:
        """(forward, backward) seconds of one transformer layer."""
        return _at(self.blocks, microbatch)

    def output_layer(self, microbatch: float) -> tuple[float, float]:
        """(forward, backward) seconds of final norm, output layer and loss."""
        return _at(self.output, microbatch)

    def fits(self, model: Model, precision: str) -> str | None:
        """None if layers of this shape were measured in `precision`; else one line that
        names the flag."""
        if model.experts or model.latent:
            return "it is of dense layers with plain attention"
        if precision != self.precision:
            return f"--precision: the profile was measured with {self.precision}, and {precision} is asked for"
        shape = "hidden heads ffn groups head_size sequence gated dropout"
        for name in shape.split():
            here = getattr(self, name)
            there = getattr(model, name)
            if here != there:
                return f"{SHAPE[name]}: the profile was measured with {here}, and {model.name} has {there}"
        return None

    def save(self, path: Path) -> None:
        """Write the profile as JSON, in one step. Raises OSError."""
        write_json(path, {"kind": KIND} | asdict(self))

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read what `save` wrote. UserError names the wrong entry."""
        where = f"--profile {path}"
        entries = read_yaml(path, "--profile")
        if not isinstance(entries, dict) or entries.pop("kind", None) != KIND:
            raise UserError(
                f"{where}: not a profile; `megatron-2bw plan profile --json PATH` writes one"
            )
        return described(cls, entries, where)


def _at(points: tuple[BlockTime, ...], microbatch: float) -> tuple[float, float]:
    """(forward, backward) at a microbatch: linear between its neighbours, and beyond
    the ends through the last two.

    Above the last point the time is never below that point's. Below the first point it
    is at most that point's, and at least in proportion to it: a smaller microbatch is
    not more efficient.
    """
    first = points[0]
    last = points[-1]
    share = microbatch / points[0].microbatch
    if len(points) == 1:
        return first.forward * share, first.backward * share
    before, after = next(
        (pair for pair in pairwise(points) if microbatch <= pair[1].microbatch),
        points[-2:],
    )
    weight = (microbatch - before.microbatch) / (after.microbatch - before.microbatch)

    def value(name: str) -> float:
        low = getattr(before, name)
        high = getattr(after, name)
        seconds = low + weight * (high - low)
        if microbatch > last.microbatch:
            return max(seconds, getattr(last, name))
        least = getattr(first, name)
        return seconds if share >= 1 else min(max(seconds, least * share), least)

    return value("forward"), value("backward")
