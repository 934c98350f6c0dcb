"""Ranks that are started again agree on a name of their own, whatever earlier ones have left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from megatron_2bw.start import restart_store


def start(store, world: int) -> set[str]:
    with ThreadPoolExecutor(world) as ranks:
        return set(ranks.map(lambda rank: restart_store.agree(store, rank, world), range(world)))


@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_start_has_one_new_name(world):
    store, names = HashStore(), set()
    for number in range(1, 4):
        (name,) = start(store, world)
        names.add(name)
        assert len(names) == number


def test_leftovers_of_a_start_that_was_cut_short():
    """Some had said hello, some had an answer, none had gone on."""
    store = HashStore()
    store.set("hello/1", "dead")
    store.set("answer/dead", "gone")
    store.set("thanks/gone/dead", "")
    store.set("hello/2", "dead too")
    (name,) = start(store, 4)
    assert name != "gone"


def test_a_rank_that_never_comes():
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] did not start"):
        restart_store.agree(store, 0, 3)


def test_only_jobs_that_can_be_started_again_need_it(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    assert restart_store.store(timedelta(minutes=1)) is None
