"""Explores the orders in which the threads of all ranks can issue what `record` noted,
and finds deadlocks.

A GPU as CUDA and NCCL document it: a stream runs its operations in order; a hardware
queue hands operations over in the order in which they were issued, so that an operation
that cannot start stops all behind it, of other streams too; an NCCL kernel is complete
when all its ranks have started theirs. The GPU is always run as far as it comes: a
slower one allows fewer orders of the threads. Operations between two NCCL kernels of a
thread are issued at once: if another thread's operation among them can lead to a
deadlock, it can before or after them.

A state is (position of each thread, queues, started, done, snapshots): integers are
sets of bits, one bit an operation.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

# kinds of instructions; DRAIN waits for what SNAP has seen
SET, WAIT, ISSUE, SNAP, DRAIN = range(5)
VERBS = "is at", "waits for", "cannot issue", "is at", "waits for the GPU:"
K, R, W, C = range(4)  # kinds of operations on a GPU
KINDS = {"K": K, "R": R, "W": W, "C": C}


@dataclass
class Instruction:
    """kind and value: SET a bit, WAIT for a mask, ISSUE operations, SNAP and DRAIN
    (streams, or None for all).

    own  only threads of this rank can end the wait
    """

    kind: int
    value: object
    label: str
    text: str = ""
    own: bool = False
    locked: bool = False  # the other threads of the rank cannot issue meanwhile


Programs = list[dict[str, list[tuple]]]  # by rank and thread: entries of the log


def programs(logs: list[list[tuple]]) -> Programs:
    """The logs by thread, from the first iteration on, without what has no part in
    waiting."""
    result = []
    for log in logs:
        awaited = {entry[4] for entry in log if entry[2] == "W"} | {
            entry[3] for entry in log if entry[2] == "E"
        }
        threads: dict[str, list[tuple]] = defaultdict(list)
        known: set[int] = set()
        for thread, label, kind, *values in log:
            if label == "start" or (kind == "R" and values[1] not in awaited):
                continue
            if kind == "R":
                known.add(values[1])
            if (kind == "W" and values[1] not in known) or (
                kind == "E" and values[0] not in known
            ):
                continue
            entries = threads[thread]
            if kind == "K" and entries and entries[-1][:3] == (label, kind, values[0]):
                continue  # consecutive kernels of a stream
            entries.append((label, kind, *values))
        result.append(dict(threads))
    return result


def streams_of(threads: Programs, thread: str | None = None) -> list[str]:
    """The streams of a thread's operations, or of all threads', the most used first."""
    used = Counter(
        entry[2]
        for by_name in threads
        for name, entries in by_name.items()
        for entry in entries
        if thread in (None, name) and entry[1] in "KRWC"
    )
    return [stream for stream, _ in used.most_common()]


def device_waits(
    threads: Programs, thread: str, locked: bool, everywhere: bool = False
) -> Iterator[tuple]:
    """Each place in a thread's programs, and the programs with a wait for the whole GPU
    there.

    locked: the waiting thread holds the driver's lock meanwhile, so that the other one
    cannot issue everywhere: at one place (action of the schedule, number of the entry
    in it) on all ranks at once
    """
    places: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
    for rank, by_name in enumerate(threads):
        counts: Counter[str] = Counter()
        for index, entry in enumerate(entries := by_name.get(thread, ())):
            key = entry[0], counts[entry[0]]
            counts[entry[0]] += 1
            # it waits for what it would before them
            if index and entry[1] in "KRW" and entries[index - 1][1] in "KRW":
                continue
            places[key if everywhere else (rank, *key)].append((rank, index))
    for place, found in places.items():
        changed = [dict(by_name) for by_name in threads]
        for rank, index in found:
            entries = changed[rank][thread]
            wait = (entries[index][0], "S", None, "device-wide wait", locked)
            changed[rank][thread] = [*entries[:index], wait, *entries[index:]]
        yield place, changed


class World:
    """The ranks' programs on GPUs.

    queue_of   (rank, stream) -> hardware queue; None: each stream has its own
    alias      (rank, stream) -> the stream that it is the same as
    limit      operations that a hardware queue has room for
    blocking   CUDA_LAUNCH_BLOCKING=1
    """

    def __init__(
        self,
        threads: Programs,
        queue_of: Callable[[int, str], object] | None = lambda rank, stream: 0,
        alias: dict[tuple[int, str], str] | None = None,
        limit: int = 0,
        blocking: bool = False,
    ):
        self.limit = limit
        self.kind, self.stream, self.target, self.comms, self.queue, self.text = (
            [],
            [],
            [],
            [],
            [],
            [],
        )
        self.names: list[str] = []  # of the streams, with their ranks
        self.masks: list[int] = []  # of the operations of each stream
        self.rank_mask = [0] * len(threads)
        # operation of NCCL or gloo -> its ranks' bits
        self.members: dict[tuple, int] = defaultdict(int)
        self.ranks = [rank for rank, by_name in enumerate(threads) for _ in by_name]
        self.thread_names = [name for by_name in threads for name in by_name]
        self._queue_of, self._alias, self._blocking = queue_of, alias or {}, blocking
        self._streams: dict[tuple, int] = {}
        self._queues: dict[object, int] = {}
        self._bits: dict[tuple, int] = {}
        self.code = [
            self._compile(rank, entries)
            for rank, by_name in enumerate(threads)
            for entries in by_name.values()
        ]
        self.users = self._users(self.queue)
        for code in self.code:
            for step in code:
                # of a meeting on gloo
                if step.kind == WAIT and isinstance(step.value, tuple):
                    step.value = self.members[step.value]
                elif step.kind == WAIT and callable(step.value):
                    step.value = step.value()
        # an NCCL kernel's, on all its ranks
        self.needs = [self.members[comm] if comm else 0 for comm in self.comms]
        self.partners = [list(bits_of(need)) for need in self.needs]
        alone = {
            stream
            for stream, users in self._users(self.stream).items()
            if len(users) == 1
        }
        waits = {  # what another thread issues may change these
            (self.ranks[i], number)
            for i, code in enumerate(self.code)
            for number, step in enumerate(code)
            if step.kind == SNAP
            and (step.value is None or not alone.issuperset(step.value))
        }
        watched = {rank for rank, _ in waits}
        self.private = [
            [
                (step.kind == SNAP and (rank, number) not in waits)
                or step.kind == ISSUE
                and not limit
                and rank not in watched
                and all(len(self.users[self.queue[op]]) == 1 for op in step.value)
                for number, step in enumerate(code)
            ]
            for rank, code in zip(self.ranks, self.code)
        ]
        self.siblings = [
            [i for i, r in enumerate(self.ranks) if r == rank]
            for rank in range(len(threads))
        ]

    # Compiling

    def _users(self, column: list[int]) -> dict[int, set[int]]:
        """The threads that issue to each queue, or each stream."""
        users: dict[int, set[int]] = defaultdict(set)
        for thread, code in enumerate(self.code):
            for step in code:
                for op in step.value if step.kind == ISSUE else ():
                    users[column[op]].add(thread)
        return users

    def _bit(self, *name) -> int:
        if name not in self._bits:
            self._bits[name] = self._new()
        return self._bits[name]

    def _new(self) -> int:
        columns = self.kind, self.stream, self.target, self.comms, self.queue, self.text
        for column, value in zip(columns, (None, -1, 0, None, -1, "")):
            column.append(value)
        return len(self.kind) - 1

    def _stream(self, rank: int, name: str) -> int:
        key = rank, self._alias.get((rank, name), name)
        if key not in self._streams:
            self._streams[key] = len(self._streams)
            self.names.append(key[1])
            self.masks.append(0)
        return self._streams[key]

    def _compile(self, rank: int, entries: list[tuple]) -> list[Instruction]:
        code: list[Instruction] = []
        ops: list[int] = []

        def flush(label: str) -> None:
            if ops:
                code.append(Instruction(ISSUE, tuple(ops), label, self.text[ops[-1]]))
                streams = {self.stream[op] for op in ops if self.kind[op] in (K, C)}
                ops.clear()
                if self._blocking and streams:
                    wait_for(tuple(streams), label, "launch blocking")

        def wait_for(streams, label: str, text: str, locked: bool = False) -> None:
            code.append(Instruction(SNAP, streams, label, text))
            code.append(Instruction(DRAIN, None, label, text, locked=locked))

        last = "start"
        for label, kind, *values in entries:
            if kind in "KRWC":
                stream = self._stream(rank, values[0])
                if kind != "R" and any(self.kind[op] == C for op in ops):
                    flush(last)
                if not (
                    ops
                    and kind == "K"
                    and self.kind[ops[-1]] == K
                    and self.stream[ops[-1]] == stream
                ):
                    ops.append(self._operation(rank, kind, stream, values))
            else:
                flush(last)
            last = label
            if kind == "S":
                streams = (
                    None if values[0] is None else (self._stream(rank, values[0]),)
                )
                wait_for(streams, label, str(values[1]), len(values) > 2 and values[2])
            elif kind == "E":
                code.append(
                    Instruction(
                        WAIT,
                        1 << self._bit(rank, "event", values[0]),
                        label,
                        "an event",
                    )
                )
            elif kind in "GH":
                operation = tuple(values)
                if kind == "G":
                    bit = self._new()
                    self.members[operation] |= 1 << bit
                    code.append(Instruction(SET, 1 << bit, label, operation[0]))
                else:
                    code.append(Instruction(WAIT, operation, label, operation[0]))
            elif kind in "PD":
                bit = self._bit(rank, kind, values[0])
                code.append(Instruction(SET, 1 << bit, label, f"job {values[0]}"))
            elif kind in "JT":
                bit = self._bit(rank, {"J": "P", "T": "D"}[kind], values[0])
                code.append(
                    Instruction(WAIT, 1 << bit, label, f"job {values[0]}", own=True)
                )
        flush(last)
        return code

    def _operation(self, rank: int, kind: str, stream: int, values: list) -> int:
        name = self.names[stream]
        queue = (rank, name if self._queue_of is None else self._queue_of(rank, name))
        text = values[1][0] if kind == "C" else "" if kind in "RW" else str(values[-1])
        target = self._bit(rank, "event", values[1]) if kind in "RW" else 0
        op = target if kind == "R" else self._new()
        self.kind[op], self.stream[op], self.target[op] = KINDS[kind], stream, target
        self.queue[op], self.text[op] = (
            self._queues.setdefault(queue, len(self._queues)),
            text,
        )
        if kind == "C":
            self.comms[op] = tuple(values[1])
            self.members[self.comms[op]] |= 1 << op
        self.masks[stream] |= 1 << op
        self.rank_mask[rank] |= 1 << op
        return op

    # Running

    def start(self) -> tuple:
        return self._advance(
            (0,) * len(self.code),
            ((),) * len(self._queues),
            0,
            0,
            (0,) * len(self.code),
        )

    def _advance(self, at, queues, started, done, snaps) -> tuple:
        """The GPUs, and the threads up to their next choice: waits that are over, and
        what meets no other thread."""
        at, snaps = list(at), list(snaps)
        queues, started, done = self._progress(queues, started, done)
        again = True
        while again:
            again = False
            for thread, code in enumerate(self.code):
                while at[thread] < len(code):
                    step = code[at[thread]]
                    if step.kind == SET:
                        done |= step.value
                        again = True
                    elif step.kind == WAIT:
                        if step.value & ~done:
                            break
                    elif step.kind == DRAIN:
                        if snaps[thread] & ~done:
                            break
                        snaps[thread] = 0
                    elif not self.private[thread][at[thread]]:
                        break
                    elif step.kind == SNAP:
                        snaps[thread] = (
                            self._seen(thread, step, queues, started) & ~done
                        )
                    else:
                        queues, started, done = self._progress(
                            self._put(queues, step.value), started, done
                        )
                        again = True
                    at[thread] += 1
        return tuple(at), queues, started, done, tuple(snaps)

    def _put(self, queues, ops) -> tuple:
        changed = list(queues)
        for op in ops:
            changed[self.queue[op]] += (op,)
        return tuple(changed)

    def _seen(self, thread: int, step: Instruction, queues, started) -> int:
        """What a SNAP sees: all that has been issued to its streams."""
        of = (
            self.rank_mask[self.ranks[thread]]
            if step.value is None
            else _union(self.masks[s] for s in step.value)
        )
        return (started | _union(1 << op for queue in queues for op in queue)) & of

    def _progress(self, queues, started, done) -> tuple:
        kinds, streams, masks = self.kind, self.stream, self.masks
        changed, again = list(queues), True
        while again:
            again = False
            for number, queue in enumerate(changed):
                count = 0
                for op in queue:
                    kind, mask = kinds[op], masks[streams[op]]
                    busy = started & ~done & mask
                    # it blocks no queue: it is over with what its stream has started
                    if kind == R:
                        started |= 1 << op
                        if not busy:
                            done |= 1 << op
                    elif busy or (kind == W and not done >> self.target[op] & 1):
                        break
                    elif kind == C:
                        started |= 1 << op
                        if self.needs[op] & started == self.needs[op]:
                            for other in self.partners[op]:
                                done |= started & masks[streams[other]]
                    else:
                        started |= 1 << op
                        done |= 1 << op
                    count += 1
                if count:
                    changed[number] = queue[count:]
                    again = True
        return tuple(changed), started, done

    def choices(self, state) -> list[int]:
        """The threads that can issue something."""
        at, queues, _, _, _ = state
        found = []
        locked = {
            self.ranks[i]
            for i, code in enumerate(self.code)
            if at[i] < len(code) and code[at[i]].locked
        }
        full = {
            self.ranks[next(iter(self.users[q]))]
            for q, queue in enumerate(queues)
            if self.limit and len(queue) >= self.limit
        }
        for thread, code in enumerate(self.code):
            rank = self.ranks[thread]
            if (
                at[thread] < len(code)
                and code[at[thread]].kind in (ISSUE, SNAP)
                and rank not in locked
            ):
                if rank not in full or code[at[thread]].kind == SNAP:
                    found.append(thread)
        return found

    def step(self, state, thread: int) -> tuple:
        at, queues, started, done, snaps = state
        step = self.code[thread][at[thread]]
        if step.kind == ISSUE:
            queues = self._put(queues, step.value)
        else:
            snaps = (
                *snaps[:thread],
                self._seen(thread, step, queues, started) & ~done,
                *snaps[thread + 1 :],
            )
        return self._advance(
            (*at[:thread], at[thread] + 1, *at[thread + 1 :]),
            queues,
            started,
            done,
            snaps,
        )

    def finished(self, state) -> bool:
        at, queues, started, done, _ = state
        return (
            not any(queues)
            and not started & ~done
            and all(a == len(code) for a, code in zip(at, self.code))
        )

    def branches(self, state) -> list[int]:
        """Choices that suffice: those of one rank, if nothing that another does can add
        to them before."""
        found = self.choices(state)
        at = state[0]
        for rank in dict.fromkeys(self.ranks[thread] for thread in found):
            others = [
                i
                for i in self.siblings[rank]
                if i not in found and at[i] < len(self.code[i])
            ]
            if all(self.code[i][at[i]].own for i in others):
                return [thread for thread in found if self.ranks[thread] == rank]
        return found

    # Reporting

    def grid(self, state) -> str:
        """Who waits for what: a row a thread, and a row a hardware queue."""
        at, queues, started, done, _ = state
        rows = []
        for thread, code in enumerate(self.code):
            step = code[at[thread]] if at[thread] < len(code) else None
            what = (
                f"{step.label:12} {VERBS[step.kind]} {step.text}"
                if step
                else "is through"
            )
            rows.append(
                f"rank {self.ranks[thread]}  {self.thread_names[thread]:9}  {what}"
            )
        for number, queue in enumerate(queues):
            if queue:
                rank, stream = (
                    self.ranks[next(iter(self.users[number]))],
                    self.names[self.stream[queue[0]]],
                )
                what = (
                    f"{'KRWC'[self.kind[queue[0]]]} {self.text[queue[0]]}; "
                    f"{len(queue) - 1} behind"
                )
                rows.append(f"rank {rank}  {'a queue':9}  {stream}: {what}")
        running = [
            self.text[bit] for bit in bits_of(started & ~done) if self.kind[bit] == C
        ]
        return "\n".join(
            [*sorted(rows), "started, without all ranks: " + ", ".join(running)]
        )


def bits_of(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _union(masks: Iterable[int]) -> int:
    result = 0
    for mask in masks:
        result |= mask
    return result


@dataclass
class Result:
    """What an exploration found. `complete`: all orders were explored, or proved to
    lead to the same."""

    states: int
    dead: int
    complete: bool
    example: str = field(default="", repr=False)


def exhaust(world: World, limit: int = 10**6) -> Result:
    """All orders of issue, equal states merged; at most `limit` states."""
    first = world.start()
    seen, stack, dead, example = {(first[0], first[1], first[4])}, [first], 0, ""
    while stack:
        state = stack.pop()
        threads = world.branches(state)
        if not threads and not world.finished(state):
            dead += 1
            example = example or world.grid(state)
        for thread in threads:
            new = world.step(state, thread)
            key = new[0], new[1], new[4]
            if key not in seen:
                seen.add(key)
                stack.append(new)
        if len(seen) > limit:
            return Result(len(seen), dead, False, example)
    return Result(len(seen), dead, True, example)


def sample(world: World, runs: int, seed: int = 0) -> Result:
    """Random orders. Threads have random priorities, some of which change on the way;
    now and then any is chosen."""
    dead, states, example, first = 0, 0, "", world.start()
    for run in range(runs):
        rng = random.Random(seed * 1_000_003 + run)
        priority = [rng.random() for _ in world.code]
        noise, change = rng.choice((0, 0.02, 0.2, 1)), rng.choice((0, 0.01, 0.1))
        state = first
        while threads := world.choices(state):
            if rng.random() < change:
                priority[rng.randrange(len(priority))] = rng.random()
            thread = (
                rng.choice(threads)
                if rng.random() < noise
                else max(threads, key=priority.__getitem__)
            )
            state = world.step(state, thread)
            states += 1
        if not world.finished(state):
            dead += 1
            example = example or world.grid(state)
    return Result(states, dead, False, example)
