"""What the threads of all ranks issue, from the logs of `record`."""

from collections import Counter, defaultdict
from collections.abc import Iterator

# By rank and thread: entries of the log, (label, kind, *values).
Programs = list[dict[str, list[tuple]]]


def programs(logs: list[list[tuple]]) -> Programs:
    """The logs by thread, from the first iteration on, without what has no part in
    waiting."""
    return [program(log) for log in logs]


def program(log: list[tuple]) -> dict[str, list[tuple]]:
    awaited = set()
    for _, _, kind, *values in log:
        if kind in "WE":
            awaited.add(values[-1])
    threads = defaultdict(list)
    recorded = set()
    for thread, label, kind, *values in log:
        event = values[-1]
        if label == "start" or (kind == "R" and event not in awaited):
            continue
        if kind == "R":
            recorded.add(event)
        if kind in "WE" and event not in recorded:
            continue
        entries = threads[thread]
        if kind == "K" and entries and entries[-1][:3] == (label, kind, values[0]):
            continue  # consecutive kernels of a stream
        entries.append((label, kind, *values))
    return dict(threads)


def streams_of(threads: Programs, thread: str | None = None) -> list[str]:
    """The streams of a thread's operations, or of all threads', the most used first."""
    used = Counter()
    for by_name in threads:
        for name, entries in by_name.items():
            if thread in (None, name):
                used.update(entry[2] for entry in entries if entry[1] in "KRWC")
    return [stream for stream, _ in used.most_common()]


def device_waits(
    threads: Programs, thread: str, locked: bool, everywhere: bool = False
) -> Iterator[tuple]:
    """Each place in a thread's programs, and the programs with a wait for the whole GPU
    there.

    locked      the waiting thread holds the driver's lock meanwhile, so that the other
                one cannot issue
    everywhere  at one place (action of the schedule, number of the entry in it) on all
                ranks at once
    """
    places = defaultdict(list)
    for rank, by_name in enumerate(threads):
        counts = Counter()
        before = ""
        for index, (label, kind, *_) in enumerate(by_name.get(thread, ())):
            place = (label, counts[label])
            counts[label] += 1
            # before a later operation of a row it waits for what it would at the first
            if not (before and kind in "KRW" and before in "KRW"):
                key = place if everywhere else (rank, *place)
                places[key].append((rank, index))
            before = kind
    for place, positions in places.items():
        changed = [dict(by_name) for by_name in threads]
        for rank, index in positions:
            entries = list(changed[rank][thread])
            wait = (entries[index][0], "S", None, "device-wide wait", locked)
            entries.insert(index, wait)
            changed[rank][thread] = entries
        yield place, changed
