"""Records what the CPU threads of a rank issue to a GPU, while the real project trains on the CPU.

After `cpu.install()` this double replaces torch.cuda's streams and events, the calls of torch's process groups, and the
hand-over of jobs between threads. Each call does what it did, and adds one entry to `log`. Nothing of a schedule is
written here: a change of the runtime changes the log.

Assumed of a GPU, as in ProcessGroupNCCL of torch 2.15: a group is NCCL's unless "gloo" was asked for. A synchronous
collective runs in the current stream. An asynchronous one and a message run in a stream of their group, which waits for
the current one; `wait` lets the current stream wait. gloo copies GPU tensors in a stream of its own and waits for that.
Copies between the host and the GPU wait for their stream unless non_blocking. Whoever asks whether something is over
hears no: the latest that can be.

Entries are (thread, label, kind, ...):
    K stream                     a kernel
    R/W stream event             the stream records an event; it waits for one
    C stream (id, ranks)         an NCCL kernel: complete when all ranks have started theirs
    S stream                     the thread waits for the stream, or with None for the whole GPU
    E event                      the thread waits for an event
    G/H id ranks                 the thread arrives at a collective of gloo; it waits until all ranks have
    P/J/D/T job                  a job is submitted, starts in its thread, ends; the thread waits for its end
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import Counter

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

log: list[tuple] = []
here = threading.local()
lock = threading.RLock()
numbers: Counter[str] = Counter()  # the last number given to an event, a stream, a job, an operation of a group
memories: set[int] = set()  # storages on the GPU
groups: dict[str, tuple[str, bool, list[int]]] = {}  # torch's name -> name on all ranks, whether NCCL's, ranks


def number(what: str) -> int:
    with lock:
        numbers[what] += 1
        return numbers[what]


def note(kind: str, *values) -> None:
    if not hasattr(here, "thread"):
        here.thread = threading.current_thread().name
    log.append((here.thread, getattr(here, "label", "start"), kind, *values))


def place() -> str:
    """The innermost lines of the project and of Megatron."""
    found, frame = [], sys._getframe(2)
    while frame is not None and len(found) < 3:
        _, room, name = frame.f_code.co_filename.rpartition("/megatron")
        if room and not name.startswith("_2bw/cpu"):
            found.append(f"{name.lstrip('/_')}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


class Stream:
    def __init__(self, *args, name: str | None = None, **kwargs):
        self.cuda_stream = self.stream_id = number("stream")
        self.number = name or f"stream {self.stream_id}"
        self.device = torch.device("cpu")

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        if event.number is not None:
            note("W", self.number, event.number)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        note("S", self.number, place())

    def query(self) -> bool:
        return False


class Event:
    def __init__(self, *args, **kwargs):
        self.number = None

    def record(self, stream: Stream | None = None) -> None:
        self.number = number("event")
        note("R", (stream or current()).number, self.number)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current()).wait_event(self)

    def synchronize(self) -> None:
        if self.number is not None:
            note("E", self.number)

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: Event) -> float:
        return 1.0


COMPUTE = Stream(name="compute")


def current(device=None) -> Stream:
    return getattr(here, "stream", COMPUTE)


@contextlib.contextmanager
def in_stream(stream: Stream | None):
    before = current()
    here.stream = stream or before
    yield
    here.stream = before


# Memory: the CPU's tensors that would lie on the GPU.


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage()._cdata in memories


def to_gpu(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    with lock:
        if storage._cdata not in memories:
            memories.add(storage._cdata)
            weakref.finalize(storage, off_gpu, storage._cdata).atexit = False


def off_gpu(key: int) -> None:
    with lock:
        memories.discard(key)


@contextlib.contextmanager
def paused():
    """Operations here are the CPU's own."""
    before, here.paused = getattr(here, "paused", False), True
    yield
    here.paused = before


EMPTY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh"}
WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_consecutive"}


class Operations(TorchDispatchMode):
    """Notes a kernel for each operation with a GPU tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        if getattr(here, "paused", False):
            return func(*args, **kwargs)
        reads, writes = [], []
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(tensors(value))
        gpu = any(map(on_gpu, reads + writes)) if reads or writes else getattr(here, "asked", False)
        result = func(*args, **kwargs)
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if gpu and not view:
            new = [] if name in WAITS else [tensor for tensor in tensors(result) if not on_gpu(tensor)]
            if name == "copy_":  # to a host tensor
                new = []
            for tensor in new:
                to_gpu(tensor)
            if name not in EMPTY:
                note("K", current().number, f"{name} at {place()}")
            copies = name == "copy_" and len({on_gpu(tensor) for tensor in args[:2]}) == 2
            if name in WAITS or (copies and not (kwargs.get("non_blocking") or args[2:3] == (True,))):
                note("S", current().number, place())
        return result


ANSWERS = (torch.Tensor.is_cuda.__get__, True), (torch.Tensor.device.__get__, torch.device("cuda", 0))
MOVES = {torch.Tensor.cuda, torch.Tensor.to, torch.tensor, torch.as_tensor}


def moving(cuda_means_cpu, is_cuda):
    """For the function mode of cpu.py: notes which tensors are asked for on the GPU, and copies to the host."""

    def torch_function(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for getter, answer in ANSWERS:
            if func == getter and on_gpu(args[0]):
                return answer
        device = kwargs.get("device", args[1] if func is torch.Tensor.to and len(args) > 1 else None)
        asked = (
            func is torch.Tensor.cuda or (not isinstance(device, (bool, int)) or "device" in kwargs) and is_cuda(device)
        )
        if func in (torch.Tensor.tolist, torch.Tensor.numpy) and on_gpu(args[0]):
            note("S", current().number, place())
        to_host = func is torch.Tensor.cpu or (func is torch.Tensor.to and str(device).startswith("cpu"))
        if to_host and on_gpu(args[0]):
            copy = args[0].clone()
            if not kwargs.get("non_blocking"):
                note("S", current().number, place())
            off_gpu(copy.untyped_storage()._cdata)
            return cuda_means_cpu(self, func, types, (copy, *args[1:]), kwargs)
        before, here.asked = getattr(here, "asked", False), asked
        result = cuda_means_cpu(self, func, types, args, kwargs)
        here.asked = before
        for tensor in tensors(result) if asked else ():
            if not on_gpu(tensor):
                to_gpu(tensor)
                note("K", current().number, f"to the GPU at {place()}")
                if func in MOVES and not kwargs.get("non_blocking"):
                    note("S", current().number, place())
        return result

    return torch_function


# Collectives and messages.


class Message:
    """An asynchronous operation of a process group. `finish` is what its end means for the waiting thread."""

    def __init__(self, work, finish):
        self._work, self._finish, self._over = work, finish, False

    def is_completed(self) -> bool:
        return False  # the latest that can be

    def wait(self, *timeout) -> bool:
        if not self._over:
            self._over = True
            with paused():
                self._work.wait()
        self._finish()
        return True


def issue(group: ProcessGroup, name: str, args: tuple, work):
    """Note an operation of a process group, whose `work` is under way. Returns what torch's method returns."""
    common, nccl, ranks = groups[group.group_name]
    options = next((a for a in args if hasattr(a, "asyncOp")), None)
    message = name in ("send", "recv")
    synchronous = not message and options is not None and not options.asyncOp
    if message:
        ends = (group.rank(), args[1]) if name == "send" else (args[1], group.rank())
        common, ranks = f"{common} {ends[0]}>{ends[1]}", [ranks[end] for end in ends]
    operation = f"{common} #{number(common)}", tuple(ranks)
    what = f"{name} at {place()}"
    finish = None
    if not nccl:
        from_gpu = any(map(on_gpu, tensors(args[:2])))
        if from_gpu:
            gloo = in_gloo_stream(what)
        note("G", *operation)

        def finish() -> None:
            note("H", *operation)
            if from_gpu:
                current().wait_event(gloo)

    elif synchronous:
        kernel(current(), operation, what)
        if name == "barrier":
            note("S", current().number, place())
    else:
        stream = stream_of(groups[group.group_name][0])
        stream.wait_stream(current())
        kernel(stream, operation, what)
        done = stream.record_event()

        def finish() -> None:
            current().wait_event(done)

    if synchronous:
        with paused():
            work.wait()
        if finish is not None:
            finish()
        return None
    return Message(work, finish)


def kernel(stream: Stream, operation: tuple, what: str) -> None:
    """A kernel of NCCL. One whose only rank is this one is a kernel like others."""
    if len(set(operation[1])) > 1:
        note("C", stream.number, operation, what)
    else:
        note("K", stream.number, what)


_streams: dict[str, Stream] = {}


def stream_of(name: str) -> Stream:
    return _streams.setdefault(name, Stream(name=name))


def in_gloo_stream(what: str) -> Event:
    stream = stream_of("gloo")
    stream.wait_stream(current())
    note("K", stream.number, what)
    note("S", stream.number, place())
    return stream.record_event()


COLLECTIVES = """allreduce allreduce_coalesced broadcast reduce gather scatter barrier send recv
    allgather _allgather_base allgather_into_tensor_coalesced all_gather_single all_gather_single_coalesced
    reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced reduce_scatter_single
    reduce_scatter_single_coalesced alltoall alltoall_base all_to_all_single"""


def replace_groups() -> None:
    def recorded(name):
        method = getattr(ProcessGroup, name)

        def call(self, *args, **kwargs):
            with paused():
                work = method(self, *args, **kwargs)
            return issue(self, name, (*args, *kwargs.values()), work)

        return call

    for name in COLLECTIVES.split():
        setattr(ProcessGroup, name, recorded(name))
    new_group, initialise, backend_of = dist.new_group, dist.init_process_group, dist.get_backend

    def known(group: ProcessGroup, description: str, nccl: bool) -> None:
        ranks = dist.get_process_group_ranks(group)
        name = f"{description} {','.join(map(str, ranks))}"
        groups[group.group_name] = f"{name} {number(name)}", nccl, ranks

    def make(ranks=None, timeout=None, backend=None, *args, **kwargs):
        group = new_group(ranks, timeout, "gloo", *args, **kwargs)
        if isinstance(group, ProcessGroup):  # this rank is in it
            known(group, kwargs.get("group_desc") or "group", "gloo" not in (backend or "nccl"))
        return group

    def start(*args, **kwargs):
        initialise(*args, **kwargs)
        known(dist.group.WORLD, "world", True)

    def backend(group=None):
        name = (group or dist.group.WORLD).group_name
        return ("nccl" if groups[name][1] else "gloo") if name in groups else backend_of(group)

    dist.new_group, dist.init_process_group, dist.get_backend = make, start, backend
    distributed_c10d.has_torch_function = lambda tensors: False  # else the mode of cpu.py is off in collectives


def replace_threads() -> None:
    from megatron_2bw import cpu
    from megatron_2bw.core.pipeline import Pipeline
    from megatron_2bw.core.worker import Worker

    answering, submit, run_iteration, execute = cpu.answering, Worker.submit, Pipeline.run, Pipeline.execute

    @contextlib.contextmanager
    def watched():
        with answering(), Operations():
            yield

    def handed_over(self, job):
        this, label = number("job"), f"after {getattr(here, 'label', 'start')}"
        note("P", this)

        def run():
            here.label = label
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
        here.label = f"iteration {number}"
        run_iteration(self, number, *args)

    def labelled(self, action):
        here.label = str(action)
        execute(self, action)

    cpu.answering, Worker.submit, Pipeline.run, Pipeline.execute = watched, handed_over, iteration, labelled


def install() -> None:
    """In a process that has not yet called `cpu.install()`."""
    from megatron_2bw import cpu
    from megatron_2bw.flags import rehearsal

    cpu._CudaMeansCpu.__torch_function__ = moving(cpu._CudaMeansCpu.__torch_function__, cpu._is_cuda)
    rehearsal.ON_CPU.pop("use_cpu_initialization")  # which leaves the model on the host
    cpu.install()

    def module_to_gpu(self, device=None):
        for tensor in (*self.parameters(), *self.buffers()):
            to_gpu(tensor)
        return self

    torch.nn.Module.cuda = module_to_gpu
    doubles = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": current,
        "default_stream": lambda device=None: COMPUTE,
        "stream": in_stream,
        "set_stream": lambda stream: setattr(here, "stream", stream),
        "synchronize": lambda device=None: note("S", None, place()),
    }
    for name, double in doubles.items():
        setattr(torch.cuda, name, double)
    replace_groups()
    replace_threads()
    here.thread = "train"
    Operations().__enter__()


def record(rank: int, argv: list[str], *plants) -> list[tuple]:
    """The log of a training run; for `run_world`. The plants, which are functions, change the project first."""
    from tests.distributed.training import train

    install()
    for plant in plants:
        plant()
    train(rank, argv)
    return log
