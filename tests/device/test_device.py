"""The CUDA path on the stand-in for CUDA, `make test-device`: order of accesses, NCCL's calls, waits for the device.

torch's stream sanitizer watches every run: it ends a run at the first access of two streams that nothing orders.
"""

from __future__ import annotations

import collections
import ctypes
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_2bw.local_ranks import WorldError, run_world
from tests.distributed.training import train
from tests.model import cases
from tests.session import once_a_session

pytestmark = pytest.mark.device
NAMES = (
    "untied",
    "tied",
    "sharded-overlap",
    "tensor",
    "some-late",
    "extra-warmup",
    "fp16",
    "evaluation",
    "extrapolation",
)
STEADY = 4  # the first iteration whose waits count
OURS = "/megatron/", "/megatron_2bw/"
STEP, TRAINING = "2bw step", "MainThread"
WAITS = {
    (STEP, "utils.py: local_multi_tensor_l2_norm"),  # Megatron's norm without Apex and Transformer Engine: each tensor
    (STEP, "groups.py: _wait_for_stream"),  # after each collective of the step
    (STEP, "groups.py: StepGroup._through_host"),
    (STEP, "recorder.py: Recorder.resolve"),
    (STEP, "clip_grads.py: get_grad_norm_fp32"),
    (STEP, "late_step.py: LateStep.run_job"),
    (STEP, "updates.py: LateUpdate._run"),
    (TRAINING, "training.py: training_log"),  # on the last stage, for a line of the log
    (TRAINING, "training.py: print_datetime"),  # when the training ends
}


@dataclass
class Watched:
    waits: dict[tuple[str, str, str], int]  # call, thread, place
    calls: list[list[str]]  # of NCCL: name, communicator, rank, size, elements, type, peer, stream, thread
    steady: int  # the first call of the steady state; thread 0 is the training thread


def watch(rank: int, argv: list[str], plant) -> Watched:
    from megatron.training import get_args

    from megatron_2bw.gpu_check.rows import sanitized

    if plant:
        plant()
    sanitized()
    waits: collections.Counter[tuple[str, str, str]] = collections.Counter()

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long)
    def note(what: bytes, number: int) -> None:
        waits[what.decode(), threading.current_thread().name, place()] += 1

    def calls() -> list[list[str]]:
        return [
            line.split() for line in Path(os.environ["WORLD_FOLDER"], f"nccl.{os.getpid()}").read_text().splitlines()
        ]

    before: list[int] = []

    def is_steady(*_) -> None:
        if not before and get_args().curr_iteration + 1 >= STEADY:
            before.append(len(calls()))
            ctypes.CDLL(None).device_hook(note)

    def after_setup(model, optimizer) -> None:
        model[0].register_forward_pre_hook(is_steady)

    train(rank, argv, after_setup)
    ctypes.CDLL(None).device_hook(None)
    return Watched(dict(waits), calls(), *before)


def place() -> str:
    """The innermost line of Megatron or of this project in the calling thread."""
    frame = sys._getframe(2)
    while frame is not None and not any(part in frame.f_code.co_filename for part in OURS):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_qualname}"


@once_a_session
def watched(name: str) -> list[Watched]:
    size, argv = cases.CASES[name]
    return run_world(size, watch, argv, None, timeout=250)


@pytest.mark.parametrize("name", NAMES)
def test_every_access_is_ordered_and_nccls_calls_match(name):
    """The ranks of a communicator make the same collectives; each message has a receiver; one thread uses it."""
    of: dict[str, dict[str, list[list[str]]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for rank in watched(name):
        for number, call in enumerate(rank.calls):
            of[call[1]][call[2]].append([*call, number >= rank.steady])
    assert sum(len(ranks) > 1 for ranks in of.values()) >= 2
    for communicator, ranks in of.items():
        assert len(ranks) == int(next(iter(ranks.values()))[0][3]), communicator
        collectives = [[[c[0], *c[4:7]] for c in calls if c[0] not in ("send", "recv")] for calls in ranks.values()]
        assert all(each == collectives[0] for each in collectives), communicator
        for sender, receiver in [(a, b) for a in ranks for b in ranks if a != b]:
            sent = [call[4:6] for call in ranks[sender] if call[0] == "send" and call[6] == receiver]
            assert sent == [call[4:6] for call in ranks[receiver] if call[0] == "recv" and call[6] == sender]
        if name != "sharded-overlap":  # there the training thread reduces between two steps, which gather
            for calls in ranks.values():
                assert len({call[8] for call in calls if call[9]}) <= 1, communicator


@pytest.mark.parametrize("name", ["untied", "tied", "sharded-overlap", "extrapolation"])
def test_where_a_thread_waits_for_the_device(name):
    """In the steady state."""
    for number, rank in enumerate(watched(name)):
        found = {(thread, where) for what, thread, where in rank.waits if what != "cudaMalloc"}
        assert (STEP, "updates.py: LateUpdate._run") in found and found <= WAITS, number


@pytest.mark.parametrize("plant", [cases.no_wait_for_gradients, cases.wrong_store, cases.one_gradient_slot])
def test_a_planted_fault_is_found(plant):
    with pytest.raises(WorldError, match="CUDASanitizerErrors"):
        run_world(2, watch, cases.CASES["untied"][1], plant, timeout=250)
