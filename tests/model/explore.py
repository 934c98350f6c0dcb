"""Explores the orders in which the threads of all ranks can issue what `record` noted,
and finds deadlocks.

A GPU as CUDA and NCCL document it: a stream runs its operations in order; a hardware
queue hands operations over in the order in which they were issued, so that an operation
that cannot start stops all behind it, of other streams too; an NCCL kernel is complete
when all its ranks have started theirs. The GPU is always run as far as it comes: a
slower one allows fewer orders of the threads. Operations between two NCCL kernels of a
thread are issued at once: if another thread's operation among them can lead to a
deadlock, it can before or after them.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.model.programs import Programs

# kinds of instructions; DRAIN waits for what SNAP has seen
SET, WAIT, ISSUE, SNAP, DRAIN = range(5)
VERBS = "is at", "waits for", "cannot issue", "is at", "waits for the GPU:"


@dataclass
class Instruction:
    """A step of a thread.

    value    SET and WAIT: a mask, or a meeting's name until all have been compiled;
             ISSUE: operations; SNAP: streams, or None for all
    own      only threads of this rank can end the wait
    locked   the other threads of the rank cannot issue meanwhile
    private  it meets no other thread
    """

    kind: int
    value: object
    label: str
    text: str = ""
    own: bool = False
    locked: bool = False
    private: bool = False


@dataclass(slots=True)
class Operation:
    """What has a bit: an operation on a GPU, or what a thread sets.

    kind    K, R, W or C, as in the log
    target  the event's bit, of R and W
    group   of C: name and ranks
    """

    kind: str = ""
    stream: int = -1
    target: int = 0
    group: tuple | None = None
    queue: int = -1
    text: str = ""
    needs: int = 0  # the bits of C on all ranks


class State(NamedTuple):
    """Integers are sets of bits, one bit an operation.

    at      the position of each thread
    queues  operations that have been issued and not started
    snaps   what each thread waits for
    """

    at: tuple[int, ...]
    queues: tuple[tuple[int, ...], ...]
    started: int
    done: int
    snaps: tuple[int, ...]

    @property
    def key(self) -> tuple:
        return self.at, self.queues, self.snaps


def one_queue(rank: int, stream: str) -> int:
    return 0


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
        queue_of: Callable[[int, str], object] | None = one_queue,
        alias: dict[tuple[int, str], str] | None = None,
        limit: int = 0,
        blocking: bool = False,
    ):
        self.limit = limit
        self.blocking = blocking
        self.operations = []
        self.stream_names = []
        self.stream_masks = []  # the operations of each stream
        self.rank_masks = [0] * len(threads)
        # operation of NCCL or gloo -> its ranks' bits
        self.members = defaultdict(int)
        self.queue_ranks = []
        self._queue_of = queue_of
        self._alias = alias or {}
        self._streams = {}
        self._queues = {}
        self._bits = {}
        self.ranks = []
        self.thread_names = []
        self.code = []
        for rank, by_name in enumerate(threads):
            for name, entries in by_name.items():
                self.ranks.append(rank)
                self.thread_names.append(name)
                self.code.append(Compiler(self, rank).compile(entries))
        for operation in self.operations:
            if operation.group:
                operation.needs = self.members[operation.group]
        for code in self.code:
            for step in code:
                if isinstance(step.value, tuple) and step.kind == WAIT:
                    step.value = self.members[step.value]
        self._mark_private()

    # Compiling

    def new_bit(self) -> int:
        self.operations.append(Operation())
        return len(self.operations) - 1

    def bit(self, *name) -> int:
        if name not in self._bits:
            self._bits[name] = self.new_bit()
        return self._bits[name]

    def stream(self, rank: int, name: str) -> int:
        key = rank, self._alias.get((rank, name), name)
        if key not in self._streams:
            self._streams[key] = len(self._streams)
            self.stream_names.append(key[1])
            self.stream_masks.append(0)
        return self._streams[key]

    def queue(self, rank: int, stream: int) -> int:
        name = self.stream_names[stream]
        key = rank, name if self._queue_of is None else self._queue_of(rank, name)
        if key not in self._queues:
            self._queues[key] = len(self._queues)
            self.queue_ranks.append(rank)
        return self._queues[key]

    def _users(self, column: str) -> dict[int, set[int]]:
        """The threads that issue to each queue, or each stream."""
        users = defaultdict(set)
        for thread, code in enumerate(self.code):
            for step in code:
                for op in step.value if step.kind == ISSUE else ():
                    users[getattr(self.operations[op], column)].add(thread)
        return users

    def _mark_private(self) -> None:
        stream_users = self._users("stream")
        queue_users = self._users("queue")
        watched = set()  # ranks with a wait that what another thread issues may change
        for rank, code in zip(self.ranks, self.code):
            for step in code:
                if step.kind == SNAP:
                    users = [stream_users[stream] for stream in step.value or ()]
                    step.private = bool(users) and max(map(len, users)) == 1
                    if not step.private:
                        watched.add(rank)
        for rank, code in zip(self.ranks, self.code):
            for step in code:
                if step.kind == ISSUE and not self.limit and rank not in watched:
                    queues = [self.operations[op].queue for op in step.value]
                    step.private = all(len(queue_users[queue]) == 1 for queue in queues)

    # Running

    def start(self) -> State:
        threads = (0,) * len(self.code)
        return self._advance(threads, ((),) * len(self._queues), 0, 0, threads)

    def _advance(self, at, queues, started, done, snaps) -> State:
        """The GPUs, and the threads up to their next choice: waits that are over, and
        what meets no other thread."""
        at = list(at)
        snaps = list(snaps)
        queues, started, done = self._progress(queues, started, done)
        again = True
        while again:
            again = False
            for thread, code in enumerate(self.code):
                while at[thread] < len(code):
                    step = code[at[thread]]
                    if step.kind == WAIT:
                        if step.value & ~done:
                            break
                    elif step.kind == DRAIN:
                        if snaps[thread] & ~done:
                            break
                        snaps[thread] = 0
                    elif step.kind == SET:
                        done |= step.value
                        again = True
                    elif not step.private:
                        break
                    elif step.kind == SNAP:
                        seen = self._seen(thread, step, queues, started)
                        snaps[thread] = seen & ~done
                    else:
                        queues = self._put(queues, step.value)
                        queues, started, done = self._progress(queues, started, done)
                        again = True
                    at[thread] += 1
        return State(tuple(at), queues, started, done, tuple(snaps))

    def _put(self, queues, ops) -> tuple:
        changed = list(queues)
        for op in ops:
            changed[self.operations[op].queue] += (op,)
        return tuple(changed)

    def _seen(self, thread: int, step: Instruction, queues, started) -> int:
        """What a SNAP sees: all that has been issued to its streams."""
        issued = started
        for queue in queues:
            for op in queue:
                issued |= 1 << op
        if step.value is None:
            return issued & self.rank_masks[self.ranks[thread]]
        mask = 0
        for stream in step.value:
            mask |= self.stream_masks[stream]
        return issued & mask

    def _progress(self, queues, started, done) -> tuple:
        changed = list(queues)
        again = True
        while again:
            again = False
            for number, queue in enumerate(changed):
                count = 0
                for op in queue:
                    operation = self.operations[op]
                    kind = operation.kind
                    busy = started & ~done & self.stream_masks[operation.stream]
                    # an R blocks no queue: it is over with what its stream has started
                    if kind != "R" and busy:
                        break
                    if kind == "W" and not done >> operation.target & 1:
                        break
                    started |= 1 << op
                    count += 1
                    if kind != "C":
                        done |= 0 if busy else 1 << op
                    elif operation.needs & started == operation.needs:
                        for other in bits_of(operation.needs):
                            stream = self.operations[other].stream
                            done |= started & self.stream_masks[stream]
                if count:
                    changed[number] = queue[count:]
                    again = True
        return tuple(changed), started, done

    def _next_steps(self, state: State) -> Iterator[tuple[int, Instruction]]:
        """The threads that are not through."""
        for thread, code in enumerate(self.code):
            if state.at[thread] < len(code):
                yield thread, code[state.at[thread]]

    def choices(self, state: State) -> list[int]:
        """The threads that can issue something."""
        steps = list(self._next_steps(state))
        locked = {self.ranks[thread] for thread, step in steps if step.locked}
        full = set()
        if self.limit:
            for rank, queue in zip(self.queue_ranks, state.queues):
                if len(queue) >= self.limit:
                    full.add(rank)
        threads = []
        for thread, step in steps:
            rank = self.ranks[thread]
            has_room = step.kind == ISSUE and rank not in full
            if (has_room or step.kind == SNAP) and rank not in locked:
                threads.append(thread)
        return threads

    def branches(self, state: State) -> list[int]:
        """Choices that suffice: those of one rank, if nothing that another does can add
        to them before."""
        choices = self.choices(state)
        open_ranks = set()
        for thread, step in self._next_steps(state):
            if thread not in choices and not step.own:
                open_ranks.add(self.ranks[thread])
        for thread in choices:
            rank = self.ranks[thread]
            if rank not in open_ranks:
                return [other for other in choices if self.ranks[other] == rank]
        return choices

    def step(self, state: State, thread: int) -> State:
        at = list(state.at)
        queues = state.queues
        snaps = list(state.snaps)
        step = self.code[thread][at[thread]]
        if step.kind == ISSUE:
            queues = self._put(queues, step.value)
        else:
            seen = self._seen(thread, step, queues, state.started)
            snaps[thread] = seen & ~state.done
        at[thread] += 1
        return self._advance(at, queues, state.started, state.done, snaps)

    def finished(self, state: State) -> bool:
        if any(state.queues) or state.started & ~state.done:
            return False
        return not list(self._next_steps(state))

    # Reporting

    def grid(self, state: State) -> str:
        """Who waits for what: a row a thread, and a row a hardware queue."""
        steps = dict(self._next_steps(state))
        rows = []
        for thread, (rank, name) in enumerate(zip(self.ranks, self.thread_names)):
            what = "is through"
            if thread in steps:
                step = steps[thread]
                what = f"{step.label:12} {VERBS[step.kind]} {step.text}"
            rows.append(f"rank {rank}  {name:9}  {what}")
        for rank, queue in zip(self.queue_ranks, state.queues):
            if queue:
                first = self.operations[queue[0]]
                stream = self.stream_names[first.stream]
                what = f"{first.kind} {first.text}; {len(queue) - 1} behind"
                rows.append(f"rank {rank}  {'a queue':9}  {stream}: {what}")
        running = []
        for bit in bits_of(state.started & ~state.done):
            if self.operations[bit].kind == "C":
                running.append(self.operations[bit].text)
        last = "started, without all ranks: " + ", ".join(running)
        return "\n".join([*sorted(rows), last])


class Compiler:
    """Makes instructions of a thread's entries."""

    def __init__(self, world: World, rank: int):
        self._world = world
        self._rank = rank
        self._code = []
        self._ops = []  # to be issued at once

    def compile(self, entries: list[tuple]) -> list[Instruction]:
        last = "start"
        for label, kind, *values in entries:
            if kind in "KRWC":
                self._operation(kind, values, last)
            else:
                self._flush(last)
                self._wait_or_set(kind, values, label)
            last = label
        self._flush(last)
        return self._code

    def _flush(self, label: str) -> None:
        if not self._ops:
            return
        operations = [self._world.operations[op] for op in self._ops]
        self._add(ISSUE, tuple(self._ops), label, operations[-1].text)
        self._ops.clear()
        streams = {each.stream for each in operations if each.kind in "KC"}
        if self._world.blocking and streams:
            self._wait_for(tuple(streams), label, "launch blocking")

    def _add(self, kind: int, value, label: str, text: str, **marks) -> None:
        self._code.append(Instruction(kind, value, label, text, **marks))

    def _wait_for(self, streams, label: str, text: str, locked: bool = False) -> None:
        self._add(SNAP, streams, label, text)
        self._add(DRAIN, None, label, text, locked=locked)

    def _operation(self, kind: str, values: list, last: str) -> None:
        world = self._world
        stream = world.stream(self._rank, values[0])
        kinds = [world.operations[op].kind for op in self._ops]
        if kind != "R" and "C" in kinds:
            self._flush(last)
        if kind == "K" and self._ops:
            before = world.operations[self._ops[-1]]
            if before.kind == "K" and before.stream == stream:
                return
        target = world.bit(self._rank, "event", values[1]) if kind in "RW" else 0
        op = target if kind == "R" else world.new_bit()
        operation = world.operations[op]
        operation.kind = kind
        operation.stream = stream
        operation.target = target
        operation.queue = world.queue(self._rank, stream)
        if kind == "C":
            operation.group = tuple(values[1])
            operation.text = values[1][0]
            world.members[operation.group] |= 1 << op
        elif kind == "K":
            operation.text = str(values[-1])
        world.stream_masks[stream] |= 1 << op
        world.rank_masks[self._rank] |= 1 << op
        self._ops.append(op)

    def _wait_or_set(self, kind: str, values: list, label: str) -> None:
        world = self._world
        job = f"job {values[0]}"
        match kind:
            case "S":
                name, text, *locked = values
                streams = None if name is None else (world.stream(self._rank, name),)
                self._wait_for(streams, label, str(text), any(locked))
            case "E":
                bit = world.bit(self._rank, "event", values[0])
                self._add(WAIT, 1 << bit, label, "an event")
            case "G":
                bit = world.new_bit()
                world.members[tuple(values)] |= 1 << bit
                self._add(SET, 1 << bit, label, values[0])
            case "H":
                self._add(WAIT, tuple(values), label, values[0])
            case "P" | "D":
                bit = world.bit(self._rank, kind, values[0])
                self._add(SET, 1 << bit, label, job)
            case "J" | "T":
                cause = "P" if kind == "J" else "D"
                bit = world.bit(self._rank, cause, values[0])
                self._add(WAIT, 1 << bit, label, job, own=True)


def bits_of(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@dataclass
class Result:
    """What an exploration found. `complete`: all orders were explored, or proved to
    lead to the same."""

    states: int = 0
    dead: int = 0
    complete: bool = False
    example: str = field(default="", repr=False)

    def note_end(self, world: World, state: State) -> None:
        if not world.finished(state):
            self.dead += 1
            self.example = self.example or world.grid(state)


def exhaust(world: World, limit: int = 10**6) -> Result:
    """All orders of issue, equal states merged; at most `limit` states."""
    first = world.start()
    seen = {first.key}
    stack = [first]
    result = Result(complete=True)
    while stack and result.complete:
        state = stack.pop()
        threads = world.branches(state)
        if not threads:
            result.note_end(world, state)
        for thread in threads:
            new = world.step(state, thread)
            if new.key not in seen:
                seen.add(new.key)
                stack.append(new)
        result.states = len(seen)
        result.complete = len(seen) <= limit
    return result


def sample(world: World, runs: int) -> Result:
    """Random orders. Threads have random priorities, some of which change on the way;
    now and then any is chosen."""
    result = Result()
    first = world.start()
    for run in range(runs):
        rng = random.Random(run)
        priority = [rng.random() for _ in world.code]
        noise = rng.choice((0, 0.02, 0.2, 1))
        change = rng.choice((0, 0.01, 0.1))
        state = first
        while threads := world.choices(state):
            if rng.random() < change:
                priority[rng.randrange(len(priority))] = rng.random()
            if rng.random() < noise:
                thread = rng.choice(threads)
            else:
                thread = max(threads, key=priority.__getitem__)
            state = world.step(state, thread)
            result.states += 1
        result.note_end(world, state)
    return result
