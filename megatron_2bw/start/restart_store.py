"""A separate store for each start of a job's ranks.

torchrun keeps one store for all starts of a job (`--max-restarts`), except with `--rdzv-backend c10d`. Restarted ranks
would find the addresses of the old ranks there and wait for them. (torchrun's restart count does not help: each node
has its own.)
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store


def store(timeout: timedelta) -> Store | None:
    """The store for torch's `init_process_group` if torchrun can start this job again; else None, for torch's own."""
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
        return None
    from torch.distributed import rendezvous

    common, rank, world = next(rendezvous("env://", timeout=timeout))
    return PrefixStore(agree(common, rank, world), common)


def agree(common: Store, rank: int, world: int) -> str:
    """A name that all ranks of this start share and no earlier start has used. Every rank must call it.

    Each rank writes a name of its own as the hello of its number, over the hello of an earlier start. The first rank
    answers each name that it sees with its own, until each other rank has confirmed it, which only a living rank does.
    RuntimeError of the store if that takes longer than its timeout.
    """
    own = uuid.uuid4().hex
    if rank:
        common.set(f"hello/{rank}", own)
        name = common.get(f"answer/{own}").decode()
        common.set(f"thanks/{name}/{own}", "")
        return name
    deadline = time.monotonic() + common.timeout.total_seconds()
    answered: dict[int, str] = {}
    missing = set(range(1, world))
    while missing:
        for other in sorted(missing):
            if not common.check([f"hello/{other}"]):
                continue
            hello = common.get(f"hello/{other}").decode()
            if answered.get(other) != hello:
                common.set(f"answer/{hello}", own)
                answered[other] = hello
            if common.check([f"thanks/{own}/{hello}"]):
                missing.discard(other)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(missing)} did not start within {common.timeout}")
        time.sleep(0.01)
    return own
