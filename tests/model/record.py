"""Records what the CPU threads of a rank issue to a GPU, while the real project trains
on the stand-in (tests/device).

The stand-in notes each call that it takes: launches, events, waits, NCCL's operations.
Added here are the names of the groups, gloo's collectives and the hand-over of jobs
between threads. Nothing of a schedule is written here: a change of the runtime changes
the log. Each query for the end of an operation answers no, as on the slowest GPU.

Entries are (thread, label, kind, ...); "train" is the training thread with autograd's,
for which it waits:
    K stream                     a kernel or a copy R/W stream event             the
    stream records an event; it waits for one C stream (id, ranks)         an NCCL
    kernel: complete when all ranks have started theirs
    S stream                     the thread waits for the stream, or with None for the
    whole GPU
    E event                      the thread waits for an event G/H id ranks
    the thread arrives at a collective of gloo; it waits until all ranks have
    P/J/D/T job                  a job is submitted, starts in its thread, ends; the
    thread waits for its end. A portion of the gradients that is copied to the host is
    such a job too
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections import Counter
from functools import partial
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
    device.device_note(
        kind.encode(), ctypes.c_long(value), json.dumps(operation).encode()
    )


def entries(lines: list[str]) -> list[tuple]:
    """The log from the stand-in's lines."""
    found, lanes = [], dict[str, str]()  # streams of messages -> their groups' names
    for thread, label, kind, stream, value, text in (
        line.split("\t") for line in lines
    ):
        name = f"stream {stream}" if int(stream) else "compute"
        if kind in "GH":
            name, ranks = json.loads(text)
            rest = [kind, name, tuple(ranks)]
        elif kind in "EPJDT":
            rest = [kind, int(value)]
        elif kind in "KS":
            rest = [kind, name if int(stream) >= 0 else None, ""]
        elif kind in "RW":
            rest = [kind, name, int(value)]
        else:
            common, ranks, own = json.loads(text)
            if kind in ("send", "recv"):
                lanes[name] = common
                ends = (own, int(value)) if kind == "send" else (int(value), own)
                common, ranks = (
                    f"{common} {ends[0]}>{ends[1]}",
                    [ranks[end] for end in ends],
                )
            operation = f"{common} #{number(common)}", tuple(ranks)
            rest = (
                ["C", name, operation, kind]
                if len(set(ranks)) > 1
                else ["K", name, kind]
            )
        found.append((thread, label, *rest))
    return [
        tuple(
            lanes.get(word, word) if isinstance(word, str) else word for word in entry
        )
        for entry in found
    ]


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


def name_groups() -> None:
    def recorded(name):
        method = getattr(ProcessGroup, name)

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

    # torch 2.11 has some of them
    for name in filter(partial(hasattr, ProcessGroup), COLLECTIVES.split()):
        setattr(ProcessGroup, name, recorded(name))
    dist.Work.is_completed = lambda self: False
    torch.cuda.Event.query = torch.cuda.Stream.query = lambda self: False
    new_group, initialise = dist.new_group, dist.init_process_group

    def known(group: ProcessGroup, description: str) -> None:
        ranks = dist.get_process_group_ranks(group)
        name = f"{description} {','.join(map(str, ranks))}"
        groups[group.group_name] = (
            f"{name} {number(name)}",
            "nccl" in dist.get_backend(group),
            ranks,
        )

    def make(*args, **kwargs):
        group = new_group(*args, **kwargs)
        if isinstance(group, ProcessGroup):  # this rank is in it
            known(group, kwargs.get("group_desc") or "group")
        return group

    def start(*args, **kwargs):
        initialise(*args, **kwargs)
        known(dist.group.WORLD, "world")

    dist.new_group, dist.init_process_group = make, start


def label_threads() -> None:
    from megatron_2bw.engine.pipeline import Pipeline
    from megatron_2bw.engine.worker import Worker
    from megatron_2bw.mcore.complete_gradients import Portion

    submit, run_iteration, execute, last = (
        Worker.submit,
        Pipeline.run,
        Pipeline.execute,
        ["start"],
    )

    def label(text: str) -> None:
        last[0] = text
        device.device_label(b"train", text.encode())

    def handed_over(self, job):
        this, before = number("job"), f"after {last[0]}"
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

        future.result, future.done = taken, lambda: False  # the latest that can be
        return future

    def iteration(self, number, *args):
        label(f"iteration {number}")
        run_iteration(self, number, *args)

    def labelled(self, action):
        label(str(action))
        execute(self, action)

    hand_over, take, wait = Portion.hand_over, Portion.take, Portion.wait

    def portion_handed_over(self):
        self.job = number("job")
        hand_over(self)

    def portion_taken(self):
        take(self)
        note("D", self.job)

    def portion_awaited(self):
        self._released.wait()
        if hasattr(self, "job"):
            note("T", self.job)
        wait(self)

    Portion.hand_over, Portion.take, Portion.wait = (
        portion_handed_over,
        portion_taken,
        portion_awaited,
    )
    label("start")
    Worker.submit, Pipeline.run, Pipeline.execute = handed_over, iteration, labelled


def record(rank: int, argv: list[str], *plants) -> list[tuple]:
    """The log of a training run; for `run_world`. The plants, which are functions,
    change the project first."""
    from tests.distributed.training import train

    name_groups()
    label_threads()
    for plant in plants:
        plant()
    device.device_record()
    train(rank, argv)
    path = Path(os.environ["WORLD_FOLDER"], f"records.{rank}")
    device.device_records(str(path).encode())
    return entries(path.read_text().splitlines())
