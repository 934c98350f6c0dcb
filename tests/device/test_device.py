"""The CUDA path on the stand-in for CUDA, `make test-device`: order of accesses, NCCL's
calls, waits for the device.

torch's stream sanitizer watches every run: it ends a run at the first access of two
streams that nothing orders.
"""

import ctypes
import gc
import os
import re
import subprocess
import sys
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from megatron_2bw.base.local_ranks import WorldError, run_world
from megatron_2bw.mcore.host_memory import HostMemory
from megatron_2bw.run.start.torchrun import ROOT
from tests.distributed.test_checkpoint import run_loading, run_saving
from tests.distributed.training import train
from tests.model import cases
from tests.session import once_a_session

pytestmark = pytest.mark.device
NAMES = """
    untied tied sharded sharded-overlap experts tensor some-late extra-warmup fp16 evaluation extrapolation host
""".split()
STEADY = 4  # the first iteration whose waits count
OURS = re.compile(r"/megatron(_2bw)?/")
STEP = "2bw step"
TRAINING = "MainThread"
WAITS = {  # how often in an iteration, at most
    # the norm, without Apex and Transformer Engine
    (STEP, "repairs.py: _norm_of_all"): 1,
    (STEP, "process_groups.py: _wait_for_stream"): 8,  # after each collective
    (STEP, "process_groups.py: StepGroup._through_host"): 3,
    (STEP, "recorder.py: Recorder.resolve"): 1,
    (STEP, "clip_grads.py: get_grad_norm_fp32"): 1,
    (STEP, "late_step.py: LateStep.run_job"): 1,
    (STEP, "updates.py: LateUpdate._run"): 1,
    (STEP, "host_memory.py: HostMemory.take"): 1,
    # on the last stage, for its losses alone: in a stream of its own
    (TRAINING, "training.py: training_log"): 3,
    (TRAINING, "training.py: print_datetime"): 1,  # when the training ends
}


class Call(NamedTuple):
    """The messages of NCCL."""

    name: str
    communicator: str
    rank: str
    size: str
    elements: str
    type: str
    peer: str
    stream: str
    thread: str  # 0 is the training thread

    def is_message(self) -> bool:
        return self.name in ("send", "recv")


@dataclass
class Watched:
    # call, thread, place, whether for the stream of the computations
    waits: dict[tuple[str, str, str, bool], int]
    iterations: int  # in which they were counted, with that whose step was pending
    calls: list[Call]
    steady: int  # the first call of the steady state


class Stack(list):
    """Where an access was, for the sanitizer, without the time in which traceback's own
    looks at the sources."""

    @classmethod
    def extract(cls, frames, lookup_lines):
        return cls((frame.f_code, line) for frame, line in frames)

    def format(self) -> list[str]:
        entries = []
        for code, line in self:
            entries.append((code.co_filename, line, code.co_name, None))
        return traceback.format_list(entries)


def watch(rank: int, argv: list[str], plant) -> Watched:
    from megatron.training import get_args
    from torch.cuda import _sanitizer

    from megatron_2bw.tools.gpu_check.rows import sanitized

    if plant:
        plant()
    _sanitizer.traceback = SimpleNamespace(
        StackSummary=Stack, walk_stack=traceback.walk_stack
    )
    # It adds a stream at its first use too; each wait of the host would go through the
    # hundred of torch's pool.
    _sanitizer.gpu_trace.StreamCreationCallbacks.callback_list.clear()
    sanitized()
    waits = Counter()

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long)
    def note(what: bytes, number: int) -> None:
        waits[what.decode(), threading.current_thread().name, place(), number == 0] += 1

    def calls() -> list[Call]:
        log = Path(os.environ["WORLD_FOLDER"], f"nccl.{os.getpid()}").read_text()
        return [Call(*line.split()) for line in log.splitlines()]

    before = []

    def is_steady(*_) -> None:
        if not before and get_args().curr_iteration + 1 >= STEADY:
            before.append(len(calls()))
            ctypes.CDLL(None).device_hook(note)

    def after_setup(model, optimizer) -> None:
        model[0].register_forward_pre_hook(is_steady)

    train(rank, argv, after_setup)
    ctypes.CDLL(None).device_hook(None)
    return Watched(dict(waits), get_args().train_iters - STEADY + 2, calls(), *before)


def place() -> str:
    """The innermost line of Megatron or of this project in the calling thread."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if OURS.search(code.co_filename):
            return f"{Path(code.co_filename).name}: {code.co_qualname}"
        frame = frame.f_back
    return ""


@once_a_session
def watched(name: str) -> list[Watched]:
    size, argv = cases.CASES[name]
    return run_world(size, watch, argv, None, timeout=250)


def messages(calls: list[Call], name: str, peer: str) -> list[tuple[str, str]]:
    """Messages to or from a peer: elements and type."""
    found = []
    for call in calls:
        if call.name == name and call.peer == peer:
            found.append((call.elements, call.type))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_access_is_ordered_and_nccls_calls_match(name):
    """The ranks of a communicator make the same collectives; each message has a
    receiver; one thread uses it."""
    communicators = defaultdict(lambda: defaultdict(list))
    threads = defaultdict(set)  # in the steady state
    for rank in watched(name):
        for number, call in enumerate(rank.calls):
            communicators[call.communicator][call.rank].append(call)
            if number >= rank.steady:
                threads[call.communicator, call.rank].add(call.thread)
    assert sum(len(ranks) > 1 for ranks in communicators.values()) >= 2
    for communicator, ranks in communicators.items():
        collectives = set()
        for calls in ranks.values():
            assert len(ranks) == int(calls[0].size), communicator
            own = []
            for call in calls:
                if not call.is_message():
                    own.append((call.name, call.elements, call.type, call.peer))
            collectives.add(tuple(own))
        assert len(collectives) == 1, communicator
        for sender in ranks:
            for receiver in ranks.keys() - {sender}:
                sent = messages(ranks[sender], "send", receiver)
                assert sent == messages(ranks[receiver], "recv", sender)
    # there the training thread reduces between two steps, which gather
    if name != "sharded-overlap":
        assert max(map(len, threads.values())) == 1


@pytest.mark.parametrize(
    "name", ["untied", "tied", "sharded-overlap", "extrapolation", "host"]
)
def test_where_a_thread_waits_for_the_device(name):
    """In the steady state. The training thread waits for its computations when the
    training ends, and not before."""
    for rank in watched(name):
        counts = Counter()
        for (what, thread, where, computing), count in rank.waits.items():
            if what.endswith("Synchronize"):
                counts[thread, where] += count
            if thread == TRAINING and computing:
                assert where in ("training.py: print_datetime", "")
        assert (STEP, "updates.py: LateUpdate._run") in counts
        for key, count in counts.items():
            assert count <= WAITS.get(key, 0) * rank.iterations, key


KINDS = (torch.Tensor, torch.cuda.Event, torch.cuda.Stream)


def held(rank: int, argv: list[str]) -> tuple[int, list[int]]:
    """What a training without values leaves: bytes at the peak; bytes allocated,
    tensors, CUDA's events and streams."""
    from tests.device import values

    values.kept.clear()
    train(rank, argv).losses.clear()
    gc.collect()
    counts = [torch.cuda.memory_allocated()]
    for kind in KINDS:
        counts.append(sum(isinstance(thing, kind) for thing in gc.get_objects()))
    return torch.cuda.max_memory_allocated(), counts


@pytest.mark.nightly
def test_nothing_grows_in_200_iterations():
    """The peak depends on when the step meets the activations: within a tenth."""
    size, argv = cases.case(2, 2, "--bf16 --two-bw-correction 1")
    short = run_world(size, held, [*argv, "--train-iters", "20"], timeout=280)
    long = run_world(size, held, [*argv, "--train-iters", "200"], timeout=280)
    for (peak, counts), (later_peak, later_counts) in zip(short, long):
        assert later_peak <= 1.1 * peak
        assert later_counts == counts


def host_tensors(optimizers) -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        if isinstance(thing, HostMemory):
            yield from (*thing.flats, *thing.views, *thing._own)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                state = optimizer.state[param]
                yield from (param, state["exp_avg"], state["exp_avg_sq"])


def resident_bytes(tensors) -> int:
    """The pages that were written, if the tensor has a mapping of its own."""
    maps = re.findall(
        r"^(\w+)-\w+ .*\n(?:\w+: .*\n)*?Rss: +(\d+) kB",
        Path("/proc/self/smaps").read_text(),
        re.M,
    )
    resident = {int(start, 16): 1024 * int(size) for start, size in maps}
    written = {}
    for tensor in tensors:
        assert tensor.device.type == "cpu"
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        written[start] = resident.get(start, storage.nbytes())
    return sum(written.values())


def bytes_a_parameter(rank: int, argv: list[str], prepare=None) -> tuple[float, float]:
    """On the device at the peak of setup and loading; in host memory at the end."""
    made = SimpleNamespace()

    def after_setup(model, optimizer) -> None:
        made.parameters = sum(param.numel() for param in model[0].parameters())
        made.optimizers = [part.optimizer for part in optimizer.chained_optimizers]
        made.peak = torch.cuda.max_memory_allocated()

    train(rank, argv, after_setup)
    host = resident_bytes(host_tensors(made.optimizers))
    return made.peak / made.parameters, host / made.parameters


@pytest.mark.parametrize(
    "width, sharded",
    [pytest.param(1, "", marks=pytest.mark.nightly), (2, cases.SHARDED)],
)
def test_the_optimizer_is_on_the_host(width, sharded, tmp_path):
    flags = f"--bf16 --two-bw-memory host {sharded}"
    sizes = dict(width=width, hidden_size=512, train_iters=4)
    size, argv = cases.case(1, 2, flags, **sizes)
    found = run_saving(tmp_path, size, argv, program=bytes_a_parameter)
    found += run_loading(tmp_path, size, argv, program=bytes_a_parameter)
    for device, host in found:
        assert device < 8.3
        assert host < 18.1 / width


PLANTS = [
    (cases.no_wait_for_gradients, "untied"),
    (cases.wrong_store, "untied"),
    (cases.one_gradient_slot, "untied"),
    (cases.no_wait_for_portions, "host"),
]


@pytest.mark.parametrize("plant, name", PLANTS)
def test_a_planted_fault_is_found(plant, name):
    size, argv = cases.CASES[name]
    with pytest.raises(WorldError, match="CUDASanitizerErrors"):
        run_world(size, watch, argv, plant, timeout=250)


GPU_CHECK = """
import sys
from megatron_2bw.base import local_ranks
from megatron_2bw.tools.gpu_check import rows, runner
if {computed}:
    local_ranks.run_world.__kwdefaults__["preload"] = "tests.device.preload"
rows.PLAIN_TORCH = [*rows.PLAIN_TORCH, "--no-check-for-nan-in-loss-and-grad"]
if __name__ == "__main__":
    sys.exit(runner.main(sys.argv[1:], "gpu-check"))
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "rows, computed",
    [(("CPU", "NCCL, one queue"), True), (("memory, 2bw, host",), False)],
)
def test_rows_of_gpu_check(rows, computed, tmp_path):
    """The large model trains without values, which would take hours. So the check of
    its losses is off."""
    script = tmp_path / "check.py"
    script.write_text(GPU_CHECK.format(computed=computed))
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    if not computed:
        variables["DEVICE_MOST"] = "4096"
    argv = [sys.executable, str(script), "--json", str(tmp_path / "results.json")]
    argv += [f"--row={row}" for row in rows]
    run = subprocess.run(
        argv, env=variables, capture_output=True, text=True, timeout=800
    )
    output = run.stdout[-3000:] + run.stderr[-3000:]
    assert f"{len(rows)} ok, 0 FAILED" in run.stdout, output
    assert run.returncode == 0, output
