"""python -m tests.model.table [WORDS]: how many orders of issue deadlock, with all mends and with some taken out.

WORDS: only the rows whose title has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.model import cases
from tests.model.explore import Programs, World, device_waits, exhaust, streams_of
from tests.model.test_deadlocks import deadlocks, mapping, receives

MENDS = {
    "with all mends": (),
    "one lane": (cases.one_lane,),
    "no waits": (cases.without_waits,),
    "no holding back": (cases.without_holding_back,),
    "neither": (cases.without_waits, cases.without_holding_back),
}
RUNS = 200
SEVERAL = "sharded", "more-extra-warmup"


def runs(**device) -> Callable[[Programs], str]:
    return lambda programs: f"{deadlocks(programs, RUNS, **device)} of {RUNS} runs"


def mappings(queues: int) -> Callable[[Programs], str]:
    def count(programs: Programs) -> str:
        bad = [seed for seed in range(16) if deadlocks(programs, 60, queue_of=mapping(queues, seed))]
        return f"{len(bad)} of 16 mappings"

    return count


def aliased(messages: str) -> Callable[[Programs], str]:
    def count(programs: Programs) -> str:
        step = streams_of(programs, "2bw step")[0]
        return runs(queue_of=None, alias=dict.fromkeys(receives(programs, messages), step))(programs)

    return count


def waiting(thread: str, everywhere: bool) -> Callable[[Programs], str]:
    def count(programs: Programs) -> str:
        places = [
            exhaust(World(changed, queue_of=None), 20_000).dead
            for locked in (True, False)
            for _, changed in device_waits(programs, thread, locked, everywhere)
        ]
        return f"{sum(map(bool, places))} of {len(places)} places"

    return count


def all_orders(programs: Programs) -> str:
    result = exhaust(World(programs), 300_000)
    return f"{result.dead} of {result.states} states{'' if result.complete else ', not all'}"


ROWS: list[tuple[str, str, Callable[[Programs], str]]] = [
    *((f"a queue for each stream: {name}", name, runs(queue_of=None)) for name in ("tied", "sharded", "four-stages")),
    *(
        (f"one queue: {name}", name, runs())
        for name in ("tied", "one-stage", "width", "sharded", "muon", "four-stages", "more-extra-warmup")
    ),
    *((f"one queue, all orders: {name}", name, all_orders) for name in ("tied", "one-stage")),
    *((f"{queues} queues: {name}", name, mappings(queues)) for name in SEVERAL for queues in (2, 4, 8, 32)),
    *((f"step's stream = that of {what}", "tied", aliased(what)) for what in ("activations", "gradients")),
    ("CUDA_LAUNCH_BLOCKING=1", "untied", runs(queue_of=None, blocking=True)),
    ("wait for the GPU in the step, one rank", "tied", waiting("2bw step", False)),
    ("wait for the GPU in training, one rank", "tied", waiting("train", False)),
    ("wait for the GPU in the step, all ranks", "tied", waiting("2bw step", True)),
    ("wait for the GPU in training, all ranks", "tied", waiting("train", True)),
]


def main() -> None:
    print("| situation |", " | ".join(MENDS), "|")
    print("| --- |" + " --- |" * len(MENDS))
    for title, name, count in ROWS:
        if " ".join(sys.argv[1:]) not in title:
            continue
        cells = [count(cases.programs_of(name, *plants)) for plants in MENDS.values()]
        print("|", " | ".join([title, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
