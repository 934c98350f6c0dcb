"""Mutated command lines, with a fresh seed (mutations.py)."""

from __future__ import annotations

import os
import random

from megatron_2bw.local_ranks import run_world
from tests.distributed import mutations


def lines(_rank: int, seed: int) -> dict:
    for found in mutations.try_lines(seed, list(range(60))):
        pass
    return {"verdicts": dict(found["verdicts"]), "cases": found["cases"]}


def test_mutated_lines():
    """A failure prints its line; `python -m tests.distributed.mutations --seed S --only N` runs it again.

    DRAWS_SEED: the seed, which .ci/run sets to one that has passed; else a fresh one.
    """
    seed = int(os.environ.get("DRAWS_SEED", random.SystemRandom().randrange(10**6)))
    (found,) = run_world(1, lines, seed, timeout=280)
    print(f"seed {seed}: {found['verdicts']}")
    assert sum(found["verdicts"].values()) == 60
    assert not [case for case in found["cases"] if case["verdict"] in mutations.BAD]
