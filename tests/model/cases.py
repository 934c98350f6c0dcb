"""The runs that the model explores, the mends that it takes out, and the bugs that it
must find."""

import tempfile
import time

from megatron_2bw.base.local_ranks import run_world
from tests.distributed.compare import UNTIED
from tests.distributed.training import BERT, command
from tests.model.programs import Programs, programs
from tests.model.record import record
from tests.session import once_a_session


def case(
    stages, microbatches, *flags, schedule="2bw", width=1, tensor=1, **changes
) -> tuple[int, list[str]]:
    """Ranks and command line. Two iterations warm up: the third is the first that posts
    receives early."""
    words = (
        # its waits on the CPU would hide deadlocks
        "--no-check-for-nan-in-loss-and-grad --log-interval 1000",
        f"--train-iters 6 --tensor-model-parallel-size {tensor}",
        *flags,
    )
    argv = command(stages, microbatches, schedule, *words, width=width, **changes)
    return stages * width * tensor, argv


SHARDED = "--use-distributed-optimizer"
EXPERTS = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-router-enable-expert-bias "
    "--disable-bias-linear --moe-router-score-function sigmoid "
    "--moe-token-dispatcher-type allgather"  # which has no grouped sends
)
MUON = "--optimizer muon --muon-tp-mode distributed"
EVALUATION = "--log-interval 1 --eval-interval 3 --eval-iters 2 --split 90,10,0"
EXTRAPOLATION = "--two-bw-correction 1 --two-bw-sync-iterations 2"
PREDICTION = "--two-bw-correction predict --two-bw-sync-iterations 2"
FP16 = "--fp16 --train-iters 10 --initial-loss-scale 2097152 --hysteresis 1"
SHORT = "--train-iters 3"
CASES = {
    "untied": case(2, 2, UNTIED),
    "tied": case(2, 2),
    "one-stage": case(1, 2, UNTIED, width=2),
    "sharded": case(2, 2, SHARDED, "--two-bw-memory shard", width=2),
    "experts": case(2, 2, UNTIED, EXPERTS, SHARDED, width=2),
    "sharded-overlap": case(2, 2, SHARDED, "--overlap-grad-reduce", width=2),
    "tensor": case(2, 2, tensor=2, script=BERT),
    "muon": case(1, 2, UNTIED, MUON, tensor=2),
    "four-stages": case(4, 4),
    "some-late": case(3, 4, "--num-layers 3 --two-bw-late 2"),
    "one-late": case(3, 3, "--num-layers 3 --two-bw-late 1"),
    "fewer-microbatches": case(3, 2, "--num-layers 3 --two-bw-late 1"),
    "extra-warmup": case(2, 3, UNTIED, "--two-bw-extra-warmup 1"),
    "more-extra-warmup": case(2, 4, UNTIED, "--two-bw-extra-warmup 2"),
    "uneven-extra-warmup": case(4, 8, UNTIED, "--two-bw-extra-warmup 0,2,0"),
    "fp16": case(2, 2, FP16),
    "evaluation": case(2, 2, EVALUATION, script=BERT),
    "exit": case(2, 2, "--exit-interval 4"),
    "saving": case(2, 2, "--save FOLDER --save-interval 4"),
    "tokens": case(2, 3, "--calculate-per-token-loss"),
    "extrapolation": case(2, 2, EXTRAPOLATION, "--train-iters 7"),
    "prediction": case(2, 3, SHARDED, PREDICTION, "--train-iters 7", width=2),
    "host": case(2, 2, UNTIED, "--bf16 --two-bw-memory host", width=2),
    "pipedream-flush": case(2, 3, SHORT, schedule="pipedream-flush"),
    "gpipe": case(2, 3, SHORT, schedule="gpipe"),
    "pipedream": case(2, 2, SHORT, UNTIED, schedule="pipedream"),
}


@once_a_session
def logs_of(name: str, *plants: str) -> list[list[tuple]]:
    """The logs of a case. plants: names of functions of this module."""
    size, argv = CASES[name]
    functions = [globals()[plant] for plant in plants]
    with tempfile.TemporaryDirectory() as folder:
        argv = [word.replace("FOLDER", folder) for word in argv]
        return run_world(size, record, argv, *functions, timeout=250)


def programs_of(name: str, *plants) -> Programs:
    return programs(logs_of(name, *(plant.__name__ for plant in plants)))


# Mends taken out.


def nothing(*_) -> None:
    """In place of a mend."""


def without_waits() -> None:
    """The step's thread does not wait after its collectives."""
    from megatron_2bw.engine import process_groups

    process_groups._wait_for_stream = nothing


def without_holding_back() -> None:
    """Receives are posted without regard to the pending step."""
    from megatron_2bw.engine.p2p import Receiver

    Receiver.hold_back = nothing


def one_lane() -> None:
    """All messages of a direction share a stream."""
    from megatron_2bw.mcore import runtime

    connect = runtime.connect

    def without_lanes(*args):
        return connect(*args[:-1])

    runtime.connect = without_lanes


# Bugs that are races, for tests/device.


def no_wait_for_gradients() -> None:
    """The step's stream does not wait for the last backward."""
    from megatron_2bw.engine.updates import LateUpdate

    run = LateUpdate._run

    class Past:
        wait = nothing

    def run_at_once(self, job, ready):
        return run(self, job, Past())

    LateUpdate._run = run_at_once


def no_wait_for_portions() -> None:
    """The next batch adds to gradients that are being copied to the host."""
    from megatron_2bw.mcore.complete_gradients import Portion

    take = Portion.take

    def then_sleep(self):
        take(self)
        # the step's thread waits for its copies later than the next batch writes
        time.sleep(0.5)

    def wait_for_the_start(self):
        self._released.wait()

    Portion.take = then_sleep
    Portion.wait = wait_for_the_start


def wrong_store() -> None:
    """A step writes over the version that is still read."""
    from megatron_2bw.engine.weights import WeightStores

    def other_views(self, slot):
        return self._views[1 - slot]

    WeightStores.views = other_views


def one_gradient_slot() -> None:
    """Two batches have one slot."""
    from megatron_2bw.mcore.grad_buffers import GradientSlots

    def first_slot(self, batch):
        return self._slots[0]

    GradientSlots.gradients_of = first_slot
