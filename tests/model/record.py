"""Records what the CPU threads of a rank issue to a GPU, while the real project trains
on the stand-in (tests/device).

The stand-in notes each call that it takes: launches, events, waits, NCCL's operations.
Added here are the names of the groups, gloo's collectives and the hand-over of jobs
between threads. Nothing of a schedule is written here: a change of the runtime changes
the log. Each query for the end of an operation answers no, as on the slowest GPU.

Entries are (thread, label, kind, ...); "train" is the training thread with autograd's,
for which it waits:

- K stream: a kernel or a copy.
- R/W stream event: the stream records an event; it waits for one.
- C stream (id, ranks): an NCCL kernel. It is complete when all ranks have started
  theirs.
- S stream: the thread waits for the stream, or with None for the whole GPU.
- E event: the thread waits for an event.
- G/H id ranks: the thread arrives at a collective of gloo; it waits until all ranks
  have.
- P/J/D/T job: a job is submitted, starts in its thread, ends; the thread waits for its
  end. A portion of the gradients that is copied to the host is such a job too.
"""

import ctypes
import json
import os
import threading
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

device = ctypes.CDLL(None)
lock = threading.RLock()
# the last number given to a job, an operation of a group
numbers: Counter[str] = Counter()
# torch's name -> name on all ranks, whether NCCL's, ranks
groups: dict[str, tuple[str, bool, list[int]]] = {}


def number(what: str) -> int:
    with lock:
        numbers[what] += 1
        return numbers[what]


def note(kind: str, value: int, operation: tuple = ()) -> None:
    text = json.dumps(operation).encode()
    device.device_note(kind.encode(), ctypes.c_long(value), text)


def entries(lines: list[str]) -> list[tuple]:
    """The log from the stand-in's lines."""
    lanes = {}  # streams of messages -> their groups' names
    log = [entry(*line.split("\t"), lanes) for line in lines]
    renamed = []
    for thread, label, kind, first, *rest in log:
        renamed.append((thread, label, kind, lanes.get(first, first), *rest))
    return renamed


def entry(thread, label, kind, stream, value, text, lanes) -> tuple:
    name = f"stream {stream}" if int(stream) else "compute"
    value = int(value)
    start = (thread, label)
    if kind in "GH":
        group, ranks = json.loads(text)
        return *start, kind, group, tuple(ranks)
    if kind in "EPJDT":
        return *start, kind, value
    if kind in "KS":
        return *start, kind, name if int(stream) >= 0 else None, ""
    if kind in "RW":
        return *start, kind, name, value
    group, ranks, rank = json.loads(text)
    if kind in ("send", "recv"):
        lanes[name] = group
        ends = (rank, value) if kind == "send" else (value, rank)
        group = f"{group} {ends[0]}>{ends[1]}"
        ranks = [ranks[end] for end in ends]
    operation = (f"{group} #{number(group)}", tuple(ranks))
    if len(set(ranks)) > 1:
        return *start, "C", name, operation, kind
    return *start, "K", name, kind


class Meeting:
    """A collective of gloo under way."""

    def __init__(self, work, operation: tuple):
        self._work, self._operation = work, operation

    def is_completed(self) -> bool:
        return False

    def wait(self, *timeout) -> bool:
        self._work.wait()
        note("H", 0, self._operation)
        return True


COLLECTIVES = """allreduce allreduce_coalesced broadcast reduce gather scatter barrier send recv
    allgather _allgather_base allgather_into_tensor_coalesced all_gather_single all_gather_single_coalesced
    reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced reduce_scatter_single
    reduce_scatter_single_coalesced alltoall alltoall_base all_to_all_single"""


def recorded(method):
    def call(self, *args, **kwargs):
        common, nccl, ranks = groups[self.group_name]
        device.device_group(json.dumps((common, ranks, self.rank())).encode())
        work = method(self, *args, **kwargs)
        if nccl:
            return work
        operation = f"{common} #{number(common)}", ranks
        note("G", 0, operation)
        if work is None:
            return note("H", 0, operation)
        return Meeting(work, operation)

    return call


def name_group(group: ProcessGroup, description: str) -> None:
    ranks = dist.get_process_group_ranks(group)
    name = f"{description} {','.join(map(str, ranks))}"
    nccl = "nccl" in dist.get_backend(group)
    groups[group.group_name] = (f"{name} {number(name)}", nccl, ranks)


def not_yet(self) -> bool:
    return False


def name_groups() -> None:
    for name in COLLECTIVES.split():
        if hasattr(ProcessGroup, name):  # torch 2.11 has some of them
            setattr(ProcessGroup, name, recorded(getattr(ProcessGroup, name)))
    dist.Work.is_completed = not_yet
    torch.cuda.Event.query = not_yet
    torch.cuda.Stream.query = not_yet
    new_group = dist.new_group
    initialise = dist.init_process_group

    def make(*args, **kwargs):
        group = new_group(*args, **kwargs)
        if isinstance(group, ProcessGroup):  # this rank is in it
            name_group(group, kwargs.get("group_desc") or "group")
        return group

    def start(*args, **kwargs):
        initialise(*args, **kwargs)
        name_group(dist.group.WORLD, "world")

    dist.new_group = make
    dist.init_process_group = start


last_label = "start"


def label(text: str) -> None:
    global last_label
    last_label = text
    device.device_label(b"train", text.encode())


def label_actions() -> None:
    from megatron_2bw.engine.pipeline import Pipeline

    run_iteration = Pipeline.run
    execute = Pipeline.execute

    def iteration(self, number, *args):
        label(f"iteration {number}")
        run_iteration(self, number, *args)

    def labelled(self, action):
        label(str(action))
        execute(self, action)

    label("start")
    Pipeline.run = iteration
    Pipeline.execute = labelled


def note_jobs() -> None:
    from megatron_2bw.engine.worker import Worker

    submit = Worker.submit

    def handed_over(self, job):
        this = number("job")
        before = f"after {last_label}"
        note("P", this)

        def run():
            device.device_label(b"2bw step", before.encode())
            note("J", this)
            try:
                return job()
            finally:
                note("D", this)

        future = submit(self, run)
        result = future.result

        def taken(timeout=None):
            try:
                return result(timeout)
            finally:
                note("T", this)

        future.result = taken
        future.done = lambda: False  # the latest that can be
        return future

    Worker.submit = handed_over


def note_portions() -> None:
    from megatron_2bw.mcore.complete_gradients import Portion

    hand_over = Portion.hand_over
    take = Portion.take
    wait = Portion.wait

    def handed_over(self):
        self.job = number("job")
        hand_over(self)

    def taken(self):
        take(self)
        note("D", self.job)

    def awaited(self):
        self._released.wait()
        if hasattr(self, "job"):
            note("T", self.job)
        wait(self)

    Portion.hand_over = handed_over
    Portion.take = taken
    Portion.wait = awaited


def record(rank: int, argv: list[str], *plants) -> list[tuple]:
    """The log of a training run; for `run_world`. The plants, which are functions,
    change the project first."""
    from tests.distributed.training import train

    name_groups()
    label_actions()
    note_jobs()
    note_portions()
    for plant in plants:
        plant()
    device.device_record()
    train(rank, argv)
    path = Path(os.environ["WORLD_FOLDER"], f"records.{rank}")
    device.device_records(str(path).encode())
    return entries(path.read_text().splitlines())
