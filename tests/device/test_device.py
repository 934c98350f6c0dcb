"""The CUDA path on the stand-in for CUDA, `make test-device`: order of accesses, NCCL's
calls, waits for the device.

torch's stream sanitizer watches every run: it ends a run at the first access of two
streams that nothing orders.
"""

from __future__ import annotations

import collections
import ctypes
import gc
import os
import re
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_2bw.base.local_ranks import WorldError, run_world
from megatron_2bw.mcore.host_memory import HostMemory
from megatron_2bw.run.start.torchrun import ROOT
from tests.distributed.training import train
from tests.model import cases
from tests.session import once_a_session

pytestmark = pytest.mark.device
NAMES = "untied tied sharded sharded-overlap experts tensor some-late extra-warmup fp16".split()
NAMES += ["evaluation", "extrapolation", "host"]
STEADY = 4  # the first iteration whose waits count
OURS = "/megatron/", "/megatron_2bw/"
STEP, TRAINING = "2bw step", "MainThread"
WAITS = {  # how often in an iteration, at most
    # the norm, without Apex and Transformer Engine
    (STEP, "repairs.py: _norm_of_all"): 1,
    (STEP, "groups.py: _wait_for_stream"): 8,  # after each collective of the step
    (STEP, "groups.py: StepGroup._through_host"): 3,
    (STEP, "recorder.py: Recorder.resolve"): 1,
    (STEP, "clip_grads.py: get_grad_norm_fp32"): 1,
    (STEP, "late_step.py: LateStep.run_job"): 1,
    (STEP, "updates.py: LateUpdate._run"): 1,
    (STEP, "host_memory.py: HostMemory.take"): 1,
    # on the last stage, for its losses alone: in a stream of its own
    (TRAINING, "training.py: training_log"): 3,
    (TRAINING, "training.py: print_datetime"): 1,  # when the training ends
}


@dataclass
class Watched:
    # call, thread, place, whether for the stream of the computations
    waits: dict[tuple[str, str, str, bool], int]
    iterations: int  # in which they were counted, with that whose step was pending
    # of NCCL: name, communicator, rank, size, elements, type, peer, stream, thread
    calls: list[list[str]]
    steady: int  # the first call of the steady state; thread 0 is the training thread


class Stack(list):
    """Where an access was, for the sanitizer, without the time in which traceback's own
    looks at the sources."""

    def format(self) -> list[str]:
        return traceback.format_list(
            [(code.co_filename, line, code.co_name, None) for code, line in self]
        )


def watch(rank: int, argv: list[str], plant) -> Watched:
    from megatron.training import get_args
    from torch.cuda import _sanitizer

    from megatron_2bw.tools.gpu_check.rows import sanitized

    if plant:
        plant()
    short = SimpleNamespace(
        extract=lambda frames, lookup_lines: Stack(
            (each.f_code, line) for each, line in frames
        )
    )
    _sanitizer.traceback = SimpleNamespace(
        StackSummary=short, walk_stack=traceback.walk_stack
    )
    # It adds a stream at its first use too; each wait of the host would go through the
    # hundred of torch's pool.
    _sanitizer.gpu_trace.StreamCreationCallbacks.callback_list.clear()
    sanitized()
    waits: collections.Counter[tuple[str, str, str, bool]] = collections.Counter()

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long)
    def note(what: bytes, number: int) -> None:
        waits[what.decode(), threading.current_thread().name, place(), number == 0] += 1

    def calls() -> list[list[str]]:
        log = Path(os.environ["WORLD_FOLDER"], f"nccl.{os.getpid()}").read_text()
        return [line.split() for line in log.splitlines()]

    before: list[int] = []

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
    while frame is not None and not any(
        part in frame.f_code.co_filename for part in OURS
    ):
        frame = frame.f_back
    return (
        ""
        if frame is None
        else f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_qualname}"
    )


@once_a_session
def watched(name: str) -> list[Watched]:
    size, argv = cases.CASES[name]
    return run_world(size, watch, argv, None, timeout=250)


@pytest.mark.parametrize("name", NAMES)
def test_every_access_is_ordered_and_nccls_calls_match(name):
    """The ranks of a communicator make the same collectives; each message has a
    receiver; one thread uses it."""
    of: dict[str, dict[str, list[list[str]]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for rank in watched(name):
        for number, call in enumerate(rank.calls):
            of[call[1]][call[2]].append([*call, number >= rank.steady])
    assert sum(len(ranks) > 1 for ranks in of.values()) >= 2
    for communicator, ranks in of.items():
        assert len(ranks) == int(next(iter(ranks.values()))[0][3]), communicator
        collectives = [
            [[c[0], *c[4:7]] for c in calls if c[0] not in ("send", "recv")]
            for calls in ranks.values()
        ]
        assert all(each == collectives[0] for each in collectives), communicator
        for sender, receiver in [(a, b) for a in ranks for b in ranks if a != b]:
            sent = [
                call[4:6]
                for call in ranks[sender]
                if call[0] == "send" and call[6] == receiver
            ]
            assert sent == [
                call[4:6]
                for call in ranks[receiver]
                if call[0] == "recv" and call[6] == sender
            ]
        # there the training thread reduces between two steps, which gather
        if name != "sharded-overlap":
            for calls in ranks.values():
                assert len({call[8] for call in calls if call[9]}) <= 1, communicator


def counts(rank: Watched) -> dict[tuple[str, str], float]:
    """Waits in an iteration, by thread and place."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for (what, thread, where, _), number in rank.waits.items():
        if what.endswith("Synchronize"):
            found[thread, where] += number
    return {key: number / rank.iterations for key, number in found.items()}


@pytest.mark.parametrize(
    "name", ["untied", "tied", "sharded-overlap", "extrapolation", "host"]
)
def test_where_a_thread_waits_for_the_device(name):
    """In the steady state. The training thread waits for its computations when the
    training ends, and not before."""
    for number, rank in enumerate(watched(name)):
        found = counts(rank)
        assert (STEP, "updates.py: LateUpdate._run") in found
        assert {
            key: often for key, often in found.items() if often > WAITS.get(key, 0)
        } == {}, number
        slow = {
            where
            for _, thread, where, computing in rank.waits
            if thread == TRAINING and computing
        }
        assert slow <= {"training.py: print_datetime", ""}, number


def held(rank: int, argv: list[str]) -> tuple[int, ...]:
    """What a training without values leaves: bytes allocated, bytes at the peak,
    tensors, CUDA's events and streams."""
    from tests.device import values

    values.kept.clear()
    train(rank, argv).losses.clear()
    gc.collect()
    kinds = torch.Tensor, torch.cuda.Event, torch.cuda.Stream
    return (
        torch.cuda.memory_allocated(),
        torch.cuda.max_memory_allocated(),
        *(sum(isinstance(thing, kind) for thing in gc.get_objects()) for kind in kinds),
    )


@pytest.mark.nightly
def test_nothing_grows_in_200_iterations():
    """The peak depends on when the step meets the activations: within a tenth."""
    size, argv = cases.case(2, 2, "--bf16", "--two-bw-correction", "extrapolate")
    short, long = (
        run_world(size, held, [*argv, "--train-iters", str(n)], timeout=280)
        for n in (20, 200)
    )
    for (_, peak, *_), (_, later, *_) in zip(short, long):
        assert later <= 1.1 * peak
    assert [(rank[0], *rank[2:]) for rank in long] == [
        (rank[0], *rank[2:]) for rank in short
    ]


def bytes_a_parameter(rank: int, argv: list[str]) -> tuple[float, float]:
    """On the device at the peak of setup and loading; in host memory at the end, of
    pages those that were written."""
    found, made = [], []

    def after_setup(model, optimizer) -> None:
        made.extend(
            (
                sum(param.numel() for param in model[0].parameters()),
                *optimizer.chained_optimizers,
            )
        )
        found.append(torch.cuda.max_memory_allocated() / made[0])

    train(rank, argv, after_setup)
    maps = re.findall(
        r"^(\w+)-\w+ .*\n(?:\w+: .*\n)*?Rss: +(\d+) kB",
        Path("/proc/self/smaps").read_text(),
        re.M,
    )
    resident, written = {int(start, 16): 1024 * int(size) for start, size in maps}, {}
    for kept in (thing for thing in gc.get_objects() if isinstance(thing, HostMemory)):
        for memory in (
            tensor.untyped_storage().data_ptr()
            for tensor in (*kept.flats, *kept.views, *kept._own)
        ):
            written[memory] = resident[memory]
    for part in (part.optimizer for part in made[1:]):
        stepped = [param for group in part.param_groups for param in group["params"]]
        for tensor in (
            *stepped,
            *(
                part.state[param][name]
                for param in stepped
                for name in ("exp_avg", "exp_avg_sq")
            ),
        ):
            assert tensor.device.type == "cpu"
            written.setdefault(
                tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
            )
    return found[0], sum(written.values()) / made[0]


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_the_optimizer_is_on_the_host(width, tmp_path):
    flags = ("--bf16", "--two-bw-optimizer", "host", *[cases.SHARDED] * (width - 1))
    size, argv = cases.case(1, 2, *flags, width=width, hidden_size=512, train_iters=3)
    found = run_world(
        size,
        bytes_a_parameter,
        [*argv, "--save", str(tmp_path), "--save-interval", "1"],
        timeout=250,
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    found += run_world(
        size, bytes_a_parameter, [*argv, "--load", str(tmp_path)], timeout=250
    )
    assert all(device < 8.3 and host < 18.1 / width for device, host in found)


PLANTS = (
    cases.no_wait_for_gradients,
    cases.wrong_store,
    cases.one_gradient_slot,
    cases.no_wait_for_portions,
)


@pytest.mark.parametrize(
    "plant, name", zip(PLANTS, ["untied", "untied", "untied", "host"])
)
def test_a_planted_fault_is_found(plant, name):
    with pytest.raises(WorldError, match="CUDASanitizerErrors"):
        run_world(cases.CASES[name][0], watch, cases.CASES[name][1], plant, timeout=250)


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
    variables = (
        os.environ
        | {"PYTHONPATH": str(ROOT)}
        | ({} if computed else {"DEVICE_MOST": "4096"})
    )
    words = [
        sys.executable,
        str(script),
        *(f"--row={row}" for row in rows),
        "--json",
        str(tmp_path / "results.json"),
    ]
    run = subprocess.run(
        words, env=variables, capture_output=True, text=True, timeout=800
    )
    assert f"{len(rows)} ok, 0 FAILED" in run.stdout and not run.returncode, (
        run.stdout[-3000:] + run.stderr[-3000:]
    )
