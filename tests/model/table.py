"""python -m tests.model.table [WORDS]: how many orders of issue deadlock, with all mends and with some taken out.

WORDS: only the rows whose title has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.model import cases
from tests.model.explore import Programs, World, device_waits, exhaust
from tests.model.test_deadlocks import deadlocks, mapping

MENDS = {
    "with all mends": (),
    "one lane": (cases.one_lane,),
    "no waits": (cases.without_waits,),
    "no holding back": (cases.without_holding_back,),
    "neither": (cases.without_waits, cases.without_holding_back),
}
RUNS = 200


def runs(**device) -> Callable[[Programs], str]:
    return lambda programs: f"{deadlocks(programs, RUNS, **device)} of {RUNS} runs"


def mappings(programs: Programs) -> str:
    bad = [seed for seed in range(16) if deadlocks(programs, 60, queue_of=mapping(8, seed))]
    return f"{len(bad)} of 16 mappings"


def waiting(programs: Programs) -> str:
    places = [
        exhaust(World(changed, queue_of=None), 20_000).dead
        for locked in (True, False)
        for _, changed in device_waits(programs, "2bw step", locked)
    ]
    return f"{sum(map(bool, places))} of {len(places)} places"


def all_orders(programs: Programs) -> str:
    result = exhaust(World(programs), 300_000)
    return f"{result.dead} of {result.states} states{'' if result.complete else ', not all'}"


ROWS: list[tuple[str, str, Callable[[Programs], str]]] = [
    ("a queue for each stream", "tied", runs(queue_of=None)),
    *((f"one queue: {name}", name, runs()) for name in ("tied", "one-stage", "sharded", "more-extra-warmup")),
    ("8 queues", "more-extra-warmup", mappings),
    ("one queue, all orders", "tied", all_orders),
    ("wait for the GPU in the step, one rank", "tied", waiting),
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
