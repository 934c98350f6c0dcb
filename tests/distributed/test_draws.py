"""Random legal configurations, with a fresh seed, and those that have failed once
(draws.py)."""

import json
import operator
import os
import random
from pathlib import Path

import pytest

from tests.distributed import draws

pytestmark = pytest.mark.cpu

FAILED_ONCE = json.loads(Path(__file__).with_name("draws.json").read_text())


@pytest.mark.proof
def test_what_holds_for_every_configuration():
    """One draw. A failure prints a command for `python -m tests.distributed.draws
    --case`.

    DRAWS_SEED: the seed, which .ci/run sets to draws that have passed; else a fresh
    one.
    """
    seed = int(os.environ.get("DRAWS_SEED", random.SystemRandom().randrange(10**6)))
    assert draws.try_draws(seed, 1) == 0


@pytest.mark.parametrize("case", FAILED_ONCE, ids=operator.itemgetter("why"))
def test_failed_once(case):
    draws.check(draws.Draw(**case["draw"]))
