"""Measured times for the planner: one block, the output layer, the optimizer's step, the links. Pure Python.

Invariant: every time here was taken with Megatron's own classes on one machine (measure.py, measure_links.py); what
was not measured is None.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_2bw.planner.describe.cluster import Link
from megatron_2bw.planner.describe.model import FLAGS, Model

KIND = "megatron-2bw profile"
# Flags by entry, for `fits`.
SHAPE = {"gated": "--swiglu", "head_size": "--kv-channels", "dropout": "--hidden-dropout"} | FLAGS
MEASURED, ESTIMATED = "MEASURED", "ESTIMATED: not measured, the cluster's figure holds"
BERT_OUTPUT = "MEASURED with GPT's output layer: BERT's dense layer and norm before it are not in it"


class ProfileError(ValueError):
    """A profile that cannot be read, or cannot be measured as asked, said in one line."""


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one forward and one backward on `microbatch` samples, on one device without tensor parallelism."""

    microbatch: int
    forward: float
    backward: float


@dataclass(frozen=True)
class Profile:
    """What was measured, and with what.

    device, precision   the device's name; fp32, bf16 or fp16
    architecture        gpt or bert: whose layer. The output layer is GPT's for both, without BERT's head before it
    hidden … dropout    the layer's shape, as in model.Model
    blocks              of one transformer layer, ascending
    output              of final norm, output layer of `vocab` tokens and loss, ascending; no embedding
    optimizer_seconds_per_parameter  of one step on a layer, gradient norm and casts to 16 bit included; `optimizer`
                        says whose. For layers under some 10⁵ parameters the calls count for more than the arithmetic
    inside, between     links inside a server and between servers, None where there was nothing to measure
    threads             torch's, on a CPU
    made_with           versions, and which of Megatron's layer implementations
    """

    device: str
    precision: str
    architecture: str
    hidden: int
    heads: int
    ffn: int
    groups: int
    head_size: int
    sequence: int
    gated: bool
    dropout: bool
    vocab: int
    blocks: tuple[BlockTime, ...]
    output: tuple[BlockTime, ...]
    optimizer_seconds_per_parameter: float
    optimizer: str
    threads: int
    made_with: str
    inside: Link | None = None
    between: Link | None = None

    def layer(self, microbatch: float) -> tuple[float, float]:
        """(forward, backward) seconds of one transformer layer."""
        return _at(self.blocks, microbatch)

    def output_layer(self, microbatch: float) -> tuple[float, float]:
        """(forward, backward) seconds of final norm, output layer and loss."""
        return _at(self.output, microbatch)

    def fits(self, model: Model, precision: str | None = None) -> str | None:
        """None if layers of this shape were measured, and in `precision` if given; else one line, with the flag."""
        if precision not in (None, self.precision):
            return f"--precision: the profile was measured with {self.precision}, and {precision} is asked for"
        for name in ("hidden", "heads", "ffn", "groups", "head_size", "sequence", "gated", "dropout"):
            here, there = getattr(self, name), getattr(model, name)
            if here != there:
                if isinstance(here, bool):
                    here, there = ("on" if value else "off" for value in (here, there))
                return f"{SHAPE[name]}: the profile was measured with {here}, and {model.name} has {there}"
        return None

    @property
    def terms(self) -> dict[str, str]:
        """MEASURED or ESTIMATED, by entry."""
        always = dict.fromkeys(("blocks", "output", "optimizer_seconds_per_parameter"), MEASURED)
        if self.architecture == "bert":
            always["output"] = BERT_OUTPUT
        links = {name: getattr(self, name) for name in ("inside", "between")}
        return always | {name: MEASURED if link and link.measured else ESTIMATED for name, link in links.items()}

    def save(self, path: Path) -> None:
        """Write the profile as JSON; until it is whole, an older file stays. Raises OSError."""
        path = Path(path)
        entries = {"kind": KIND, "terms": self.terms} | asdict(self)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(handle, "w") as file:
                json.dump(entries, file, indent=1)
                file.write("\n")
            os.chmod(temporary, 0o644)  # mkstemp's is for its owner alone
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read what `save` wrote. ProfileError names the entry that is wrong."""
        where = f"--profile {path}"
        try:
            entries = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ProfileError(f"{where}: not a readable JSON file ({' '.join(str(error).split())})") from None
        if not isinstance(entries, dict) or entries.pop("kind", None) != KIND:
            raise ProfileError(f"{where}: not a profile; `megatron-2bw-plan profile --json PATH` writes one")
        entries.pop("terms", None)  # follows from the rest
        profile = _build(cls, entries, where)
        links = {
            name: _build(Link, entries[name], f"{where}: {name}")
            for name in ("inside", "between")
            if entries.get(name) is not None
        }
        return replace(
            profile, **{name: _points(entries[name], f"{where}: {name}") for name in ("blocks", "output")}, **links
        )


def _build(cls: type, entries: Any, where: str) -> Any:
    """The dataclass that a JSON object describes, its plain entries checked.

    An entry with a default may be missing: files outlast the version that wrote them.
    """
    wanted = {entry.name: entry.type for entry in fields(cls)}
    if not isinstance(entries, dict):
        raise ProfileError(f"{where}: expected the entries {', '.join(wanted)}")
    needed = [entry.name for entry in fields(cls) if entry.default is MISSING]
    missing, unknown = [name for name in needed if name not in entries], sorted(set(entries) - set(wanted))
    if missing or unknown:
        what = f"the entry {missing[0]} is missing" if missing else f"unknown entry {unknown[0]}"
        raise ProfileError(f"{where}: {what}")
    for name, value in entries.items():
        kinds = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}.get(wanted[name])
        if kinds is None:
            continue
        if type(value) not in kinds:
            raise ProfileError(f"{where}: {name} must be of type {wanted[name]}, not {json.dumps(value)}")
        if int in kinds and not 0 < value < math.inf:
            raise ProfileError(f"{where}: {name} must be positive, not {value}")
    return cls(**entries)


def _points(entries: Any, where: str) -> tuple[BlockTime, ...]:
    if not isinstance(entries, list) or not entries:
        raise ProfileError(f"{where}: expected a list of times by microbatch")
    points = tuple(_build(BlockTime, entry, where) for entry in entries)
    if any(after.microbatch <= before.microbatch for before, after in pairwise(points)):
        raise ProfileError(f"{where}: the microbatches must ascend")
    return points


def _at(points: tuple[BlockTime, ...], microbatch: float) -> tuple[float, float]:
    """(forward, backward) at a microbatch: on the line through its neighbours, outside through the two nearest.

    Above the last point never less than there. Below the first neither more than there nor less than in proportion,
    for a smaller microbatch is not computed better.
    """
    first, last, share = points[0], points[-1], microbatch / points[0].microbatch
    if len(points) == 1:
        return first.forward * share, first.backward * share
    before, after = next((pair for pair in pairwise(points) if microbatch <= pair[1].microbatch), points[-2:])
    weight = (microbatch - before.microbatch) / (after.microbatch - before.microbatch)

    def value(name: str) -> float:
        low, high = getattr(before, name), getattr(after, name)
        seconds = low + weight * (high - low)
        if microbatch > last.microbatch:
            return max(seconds, getattr(last, name))
        least = getattr(first, name)
        return seconds if share >= 1 else min(max(seconds, least * share), least)

    return value("forward"), value("backward")
