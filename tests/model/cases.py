"""The runs that the model explores, the mends that it takes out, and the bugs that it
must find."""

from __future__ import annotations

import tempfile
import time

from megatron_2bw.base.local_ranks import run_world
from tests.distributed.compare import UNTIED
from tests.distributed.training import BERT, command
from tests.model.explore import Programs, programs
from tests.model.record import record
from tests.session import once_a_session


def case(
    stages,
    microbatches,
    *flags,
    schedule="2bw",
    width=1,
    tensor=1,
    task=None,
    **changes,
) -> tuple[int, list[str]]:
    """Ranks and command line. Two iterations warm up: the third is the first that posts
    receives early."""
    changes = (
        dict(train_iters=6, log_interval=1000, tensor_model_parallel_size=tensor)
        | changes
    )
    # its waits on the CPU would hide deadlocks
    flags = ("--no-check-for-nan-in-loss-and-grad", *flags)
    argv = command(stages, microbatches, schedule, *flags, width=width, **changes)
    return stages * width * tensor, [*filter(None, [task]), *argv]


SHARDED = "--use-distributed-optimizer"
EXPERTS = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-router-enable-expert-bias "
    "--disable-bias-linear "
)
# which has no grouped sends
EXPERTS += "--moe-router-score-function sigmoid --moe-token-dispatcher-type allgather"
CASES = {
    "untied": case(2, 2, UNTIED),
    "tied": case(2, 2),
    "one-stage": case(1, 2, UNTIED, width=2),
    "sharded": case(2, 2, SHARDED, "--two-bw-gradient-slots", "shard", width=2),
    "experts": case(2, 2, UNTIED, *EXPERTS.split(), SHARDED, width=2),
    "sharded-overlap": case(2, 2, SHARDED, "--overlap-grad-reduce", width=2),
    "tensor": case(2, 2, tensor=2, task=BERT),
    "muon": case(
        1, 2, UNTIED, "--optimizer", "muon", "--muon-tp-mode", "distributed", tensor=2
    ),
    "four-stages": case(4, 4),
    "some-late": case(3, 4, "--num-layers", "3", two_bw_late_microbatches=2),
    "extra-warmup": case(2, 3, UNTIED, two_bw_extra_warmup=1),
    "more-extra-warmup": case(2, 4, UNTIED, two_bw_extra_warmup=2),
    "uneven-extra-warmup": case(4, 8, UNTIED, two_bw_extra_warmup="0,2,0"),
    "fp16": case(
        2, 2, "--fp16", train_iters=10, initial_loss_scale=2**21, hysteresis=1
    ),
    "evaluation": case(
        2, 2, task=BERT, log_interval=1, eval_interval=3, eval_iters=2, split="90,10,0"
    ),
    "exit": case(2, 2, exit_interval=4),
    "saving": case(2, 2, save="FOLDER", save_interval=4),
    "tokens": case(2, 3, "--calculate-per-token-loss"),
    "extrapolation": case(
        2,
        2,
        "--two-bw-correction",
        "extrapolate",
        two_bw_sync_iterations=2,
        train_iters=7,
    ),
    "host": case(2, 2, UNTIED, "--bf16", "--two-bw-optimizer", "host", width=2),
    "pipedream-flush": case(2, 3, schedule="pipedream-flush", train_iters=3),
    "gpipe": case(2, 3, schedule="gpipe", train_iters=3),
    "pipedream": case(2, 2, UNTIED, schedule="pipedream", train_iters=3),
}


@once_a_session
def logs_of(name: str, *plants: str) -> list[list[tuple]]:
    """The logs of a case. plants: names of functions of this module."""
    size, argv = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        argv = [folder if word == "FOLDER" else word for word in argv]
        return run_world(
            size, record, argv, *(globals()[plant] for plant in plants), timeout=250
        )


def programs_of(name: str, *plants) -> Programs:
    return programs(logs_of(name, *(plant.__name__ for plant in plants)))


# Mends taken out.


def without_waits() -> None:
    """The step's thread does not wait after its collectives."""
    from megatron_2bw.engine import process_groups

    process_groups._wait_for_stream = lambda: None


def without_holding_back() -> None:
    """Receives are posted without regard to the pending step."""
    from megatron_2bw.engine.p2p import Receiver

    Receiver.hold_back = lambda self, *args: None


def one_lane() -> None:
    """All messages of a direction share a stream."""
    from megatron_2bw.mcore import runtime

    connect = runtime.connect
    runtime.connect = lambda *args: connect(*args[:-1])


# Bugs that are races, for tests/device.


def no_wait_for_gradients() -> None:
    """The step's stream does not wait for the last backward."""
    from megatron_2bw.engine.updates import LateUpdate

    run = LateUpdate._run

    class Past:
        def wait(self, stream) -> None:
            """At once."""

    LateUpdate._run = lambda self, job, ready: run(self, job, Past())


def no_wait_for_portions() -> None:
    """The next batch adds to gradients that are being copied to the host."""
    from megatron_2bw.mcore.complete_gradients import Portion

    take = Portion.take

    def then_sleep(self):
        take(self)
        # the step's thread waits for its copies later than the next batch writes
        time.sleep(0.5)

    Portion.take, Portion.wait = then_sleep, lambda self: self._released.wait()


def wrong_store() -> None:
    """A step writes over the version that is still read."""
    from megatron_2bw.engine.weights import WeightStores

    WeightStores.views = lambda self, slot: self._views[1 - slot]


def one_gradient_slot() -> None:
    """Two batches have one slot."""
    from megatron_2bw.mcore.grad_buffers import GradientSlots

    GradientSlots.gradients_of = lambda self, batch: self._slots[0]
