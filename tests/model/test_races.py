"""No two streams access the same bytes without an order, one of them to write; each planted bug is found."""

from __future__ import annotations

import pytest

from tests.model import cases
from tests.model.races import Races
from tests.model.test_deadlocks import FAST


def races_of(name: str, *plants) -> list[Races]:
    return [Races(log) for log in cases.logs_of(name, *plants)]


def description(races: list[Races]) -> str:
    return "\n".join(f"{n} times {'; '.join(key)}" for rank in races for key, n in rank.found.most_common(3))


@pytest.mark.proof(*FAST)
@pytest.mark.parametrize("name", cases.CASES)
def test_every_access_is_ordered(name):
    races = races_of(name)
    assert all(rank.accesses > 1000 for rank in races)
    assert not any(rank.found for rank in races), description(races)


@pytest.mark.parametrize("seed", range(6))
def test_and_in_a_run_at_random(seed):
    print("case", seed, *cases.drawn(seed))
    races = races_of(f"drawn {seed}")
    assert not any(rank.found for rank in races), description(races)


@pytest.mark.proof
@pytest.mark.parametrize(
    "plant, found",
    [
        (cases.no_wait_for_gradients, "write, then write"),
        (cases.no_wait_for_step, "write, then read"),
        (cases.wrong_store, "read, then write"),
        (cases.one_gradient_slot, "write, then write"),
        (cases.no_wait_for_message, "write, then read"),
        (cases.sent_tensors_not_kept, "given out again"),
    ],
)
def test_a_planted_bug_is_found(plant, found):
    races = races_of("untied", plant)
    assert any(key[0] == found for rank in races for key in rank.found), description(races)
