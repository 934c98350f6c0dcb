"""One action of a pipeline stage, and the text form that logs, traces and tests share.
Pure Python.

Invariant: `parse(str(action)) == action`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

F, B, REDUCE, STEP = "F", "B", "R", "S"


class Action(NamedTuple):
    """What a stage does next.

    kind     F (forward), B (backward), R (start of the data-parallel reduction), S
             (optimizer step)
    number   of the `microbatch` of F and B; of the `batch` of R and S
    version  F, B: the microbatch runs on W(version); R: the version its gradients
             belong to; S: the step writes W(version)
    chunk    the part of the stage's model, where a stage holds several
    """

    kind: str
    number: int
    version: int
    chunk: int = 0

    @property
    def microbatch(self) -> int:
        """Of F and B, counted from the start of training: batch j holds microbatches
        jm ... (j+1)m - 1."""
        assert self.kind not in (REDUCE, STEP), f"{self} is of a batch"
        return self.number

    @property
    def batch(self) -> int:
        """Of R and S."""
        assert self.kind in (REDUCE, STEP), f"{self} is of a microbatch"
        return self.number

    def __str__(self) -> str:
        return f"{self.kind}{self.number}@{self.version}" + (
            f".{self.chunk}" if self.chunk else ""
        )


def parse(text: str) -> list[Action]:
    """The actions written in `text`, such as "F0@0 F1@0 B0@0"; the inverse of joining
    str(action) by spaces.

    Raises ValueError for a word that is not an action.
    """
    actions = []
    for word in text.split():
        match = re.fullmatch(r"([FBRS])(\d+)@(\d+)(?:\.(\d+))?", word)
        if match is None:
            raise ValueError(f"not an action: {word!r} (expected for instance F12@3)")
        actions.append(
            Action(match[1], int(match[2]), int(match[3]), int(match[4] or 0))
        )
    return actions


@dataclass(frozen=True)
class Shape:
    """The pipeline and the range of iterations that a schedule fills.

    stages        d, the pipeline depth
    microbatches  m, microbatches per batch and pipeline
    first         the first iteration of this run (where a resumed run starts)
    end           the iteration after the last planned one
    """

    stages: int
    microbatches: int
    first: int = 0
    end: int = 1 << 40

    def warmup(self, stage: int) -> int:
        """w, the forwards that `stage` is ahead of its backwards: d - 1 - s."""
        return self.stages - 1 - stage

    def batch(self, microbatch: int) -> int:
        """The batch of `microbatch`."""
        return microbatch // self.microbatches
