"""This project's own flags: wrong values and combinations are answered with the flag, right ones are accepted.

`MISTAKEN` is used by the end-to-end test too.
"""

from __future__ import annotations

import pytest

from megatron_2bw import cpu
from megatron_2bw.schedules import SCHEDULE_NAMES
from tests.distributed.training import BERT, command
from tests.unit.command_lines import UNTIED, complaint

pytestmark = pytest.mark.usefixtures("on_the_cpu")

ADDS = {"two_bw_correction": "extrapolate"}


def case(flag: str, words: str = "", stages: int = 2, microbatches: int = 2, schedule: str = "2bw", **changes):
    """The flag with which the line begins, words in it, and the changes to a command line that is right."""
    argv = command(stages, microbatches, schedule, **changes)
    return pytest.param(argv, stages, flag, words, id=f"{flag} {schedule} {changes}")


MISTAKEN = [
    case("--lr", lr=None),
    case("--global-batch-size 2", "use --global-batch-size 4 or more", microbatches=1),
    case("--global-batch-size 6", "use --global-batch-size 8 or more", microbatches=3, two_bw_extra_warmup=2),
    case("--two-bw-exchange nccl", "--distributed-backend nccl", two_bw_exchange="nccl", distributed_backend="gloo"),
    case("--two-bw-exchange", schedule="megatron", two_bw_exchange="gloo"),
    case("--two-bw-trace", schedule="megatron", two_bw_trace="folder"),
    case("--two-bw-gradient-slots", schedule="gpipe", two_bw_gradient_slots=1),
    case("argument --two-bw-gradient-slots", two_bw_gradient_slots=3),
    case("--two-bw-sync-iterations", schedule="pipedream-flush", two_bw_sync_iterations=3),
    case("argument --two-bw-sync-iterations", two_bw_sync_iterations="1.5%"),
    case("--two-bw-correction", schedule="megatron", two_bw_correction="auto"),
    case("--two-bw-correction-factor", two_bw_correction_factor=0.5),
    case("argument --two-bw-correction-factor", **ADDS, two_bw_correction_factor="1:sine:0"),
    case("--two-bw-correction-gradient", two_bw_correction="auto", two_bw_correction_gradient=1),
    case("--two-bw-correction-gradient", **ADDS, two_bw_correction_gradient="nan"),
    case("--two-bw-extra-warmup", schedule="gpipe", two_bw_extra_warmup=1),
    case("--two-bw-extra-warmup", stages=1, two_bw_extra_warmup=1),
    case("--two-bw-extra-warmup", microbatches=8, two_bw_extra_warmup="1,1"),
    case("argument --two-bw-extra-warmup", two_bw_extra_warmup="1,-1"),
    case("--gpipe-round", gpipe_round=2),
    case("argument --gpipe-round", schedule="gpipe", gpipe_round=0),
    case("--gpipe-round 4", schedule="gpipe", microbatches=3, gpipe_round=4),
    case("argument --pipeline-schedule", "3bw", schedule="3bw"),
]


@pytest.mark.parametrize("argv, world, flag, words", MISTAKEN)
def test_a_mistake_is_answered_with_its_flag(argv, world, flag, words):
    message = complaint(argv, world)
    assert message is not None and message.startswith(flag) and words in message and "\n" not in message


@pytest.mark.parametrize(
    "flags",
    [
        ["--two-bw-sync-iterations", "1000"],
        ["--two-bw-correction", "auto", "--two-bw-sync-iterations", "20%"],
        ["--two-bw-correction", "extrapolate", "--two-bw-correction-gradient", "2"],
        ["--two-bw-correction", "extrapolate", "--two-bw-correction-factor", "1.5:cosine:0.9"],
        ["--two-bw-gradient-slots", "1", "--two-bw-trace", "folder", "--two-bw-exchange", "gloo"],
    ],
    ids=" ".join,
)
def test_flags_of_2bw_are_accepted(flags):
    assert complaint(command(2, 2, "2bw", *flags), 2) is None


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("stages, width, tensor", [(1, 1, 1), (1, 2, 2), (2, 3, 1), (4, 1, 2)])
def test_all_shapes_of_the_world_are_accepted(schedule, stages, width, tensor):
    argv = command(stages, 4, schedule, UNTIED, width=width, tensor_model_parallel_size=tensor)
    assert complaint(argv, stages * width * tensor) is None
    assert complaint([BERT, *argv], stages * width * tensor) is None


@pytest.mark.parametrize(
    "stages, width, micro, batch, needed",
    [(2, 1, 2, 2, 4), (4, 1, 2, 6, 8), (4, 3, 2, 18, 24), (2, 2, 1, None, 4), (4, 1, 5, 5, 20)],
)
def test_too_few_microbatches_says_which_batch_would_do(stages, width, micro, batch, needed):
    def answer(size, schedule="2bw"):
        changes = dict(micro_batch_size=micro, global_batch_size=size)
        return complaint(command(stages, 1, schedule, width=width, **changes), stages * width)

    assert answer(batch).endswith(f"use --global-batch-size {needed} or more")
    assert answer(needed) is None
    assert answer(batch, "pipedream-flush") is None


@pytest.mark.parametrize(
    "extra, level, backend, fits",
    [(2, 2, "nccl", False), (1, 2, "nccl", True), (2, 1, "nccl", True), (2, 2, "gloo", True)],
)
def test_timers_that_wait_for_the_gpu_allow_one_more_forward_ahead(extra, level, backend, fits, monkeypatch):
    monkeypatch.setattr(cpu, "installed", lambda: False)
    changes = dict(two_bw_extra_warmup=extra, timing_log_level=level, distributed_backend=backend)
    message = complaint(command(2, 6, "2bw", transformer_impl="local", **changes), 2)
    assert message is None if fits else message.startswith("--two-bw-extra-warmup")
