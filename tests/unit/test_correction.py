"""What the flags of a correction stand for, and the lines about it.

What a step makes of it is held to the reference in
tests/distributed/test_correction.py.
"""

import argparse
import json
from pathlib import Path

import pytest
import torch

from megatron_2bw.base.portions import portions
from megatron_2bw.mcore.correction import Correction
from megatron_2bw.mcore.working_copy import resume_note
from megatron_2bw.run.flags.correction_notes import GAPS, notes
from megatron_2bw.run.flags.project_flags import add_flags
from megatron_2bw.run.flags.resolve import START, adam_beta1, resolve

DOCS = Path(__file__).parents[2] / "docs"
# Megatron's arguments that the flags of this project are resolved by
MEGATRONS = dict(
    pipeline_model_parallel_size=2,
    tensor_model_parallel_size=1,
    context_parallel_size=1,
    world_size=2,
    micro_batch_size=2,
    global_batch_size=4,
    step_batch_size_schedule=None,
    seq_length=2048,
    optimizer="adam",
    adam_beta1=0.9,
    muon_momentum=0.95,
    lr=1e-3,
    eval_iters=0,
    timing_log_level=0,
    distributed_timeout_minutes=10,
    exit_signal_handler=False,
    exit_duration_in_mins=None,
)


def arguments(
    flags: str = "--two-bw-correction auto", **megatrons
) -> argparse.Namespace:
    words = f"--pipeline-schedule 2bw {flags}".split()
    own = add_flags(argparse.ArgumentParser()).parse_args(words)
    return argparse.Namespace(**vars(own) | MEGATRONS | megatrons)


@pytest.mark.parametrize(
    "saved, now, text",
    [
        ({"factor": 0.5, "gradient": 2.0}, Correction(0.5, 2), ""),
        # as older releases have saved it
        ({"factor": "0.5 and gradient 2"}, Correction(0.5, 2), ""),
        (
            {"factor": 1.0, "gradient": 0.0},
            Correction(1, 2),
            ": corrected by 1 at first, corrected by 1 and gradient 2 from then on",
        ),
    ],
)
def test_the_log_of_a_resumed_run_whose_first_weights_differ(
    saved, now, text, cpu_layer
):
    from megatron_2bw.mcore.checkpoints.state import correction_of_checkpoint

    assert resume_note(correction_of_checkpoint(saved), now) == text


@pytest.mark.parametrize(
    "flags, schedule, expected",
    [
        (
            "",
            None,
            [
                f"8,192 tokens a batch a small GPT's gap to vanilla's loss was {GAPS[8192][0]:+} %"
            ],
        ),
        (
            "--two-bw-correction auto",
            "0:4 128:32",
            [
                "all microbatches of a batch of 4 samples are late; weights 1.5 updates",
                "the first 4 of 16 microbatches of a batch of 32 samples are late; weights 0.5",
            ],
        ),
        ("--two-bw-correction extrapolate", None, []),
    ],
)
def test_a_run_has_a_line_for_each_size_of_its_batches(flags, schedule, expected):
    args = arguments(flags, step_batch_size_schedule=schedule)
    lines = notes(args, resolve(args, 100))
    for line, words in zip(lines, expected, strict=True):
        assert words in line


def test_the_gaps_that_a_run_prints_are_those_of_the_record():
    for tokens, name in ((512, "512"), (2048, "2k"), (8192, "8k"), (32768, "32k")):
        record = json.loads((DOCS / f"convergence/batch{name}.json").read_text())
        gaps = {}
        for row in record["summary"]:
            gaps[row["variant"]] = round(row["gap_percent"]["mean"], 1)
        variants = ("2bw", "all", "half", "quarter")
        assert GAPS[tokens] == tuple(map(gaps.get, variants))


AUTO = "--two-bw-correction auto"
BY_HAND = "--two-bw-correction extrapolate"


@pytest.mark.parametrize(
    "flags, megatrons, expected",
    [
        (AUTO, {}, Correction(1.5, 2.0)),
        (AUTO, dict(adam_beta1=0.5), Correction(0.5)),
        (AUTO, dict(optimizer="muon", muon_scalar_optimizer="lion"), Correction(1.5)),
        # 4 of 16 microbatches are late
        (AUTO, dict(global_batch_size=32), Correction(0.5, 0.5)),
        (AUTO, dict(global_batch_size=32, adam_beta1=0.4), Correction(0.1)),
        (BY_HAND, {}, Correction(1.0)),
        (
            f"{BY_HAND} --two-bw-correction-factor 0.5 --two-bw-correction-gradient 3",
            {},
            Correction(0.5, 3.0),
        ),
    ],
)
def test_what_the_flags_stand_for(flags, megatrons, expected):
    args = arguments(flags, **megatrons)
    options = resolve(args, 100)
    assert options.correction(args.global_batch_size // 2) == expected


@pytest.mark.parametrize(
    "flags, batch, expected",
    [
        ("", 4, 2),  # all
        ("", 8, 2),  # one for each stage, half of a batch
        ("", 16, 2),  # a quarter
        ("", 64, 4),  # two for each stage
        ("--two-bw-extra-warmup 1", 64, 6),
        ("--two-bw-late-microbatches 7", 64, 7),
    ],
)
def test_how_many_microbatches_are_late(flags, batch, expected):
    options = resolve(arguments(f"{AUTO} {flags}"), 100)
    assert options.schedule.late(stages=2, microbatches=batch // 2) == expected


def test_the_largest_batch_decides_on_the_decay():
    assert adam_beta1(arguments()) == 0.95
    assert adam_beta1(arguments(step_batch_size_schedule="0:4 128:32")) == 0.9


def test_denominators_exist_for_a_few_elements_at_a_time():
    tensors = [torch.zeros(size) for size in (3, 1, 2, 9, 1)]
    cut = portions(tensors, torch.Tensor.numel, 4)
    sizes = [[*map(torch.Tensor.numel, some)] for some in cut]
    assert sizes == [[3, 1], [2], [9], [1]]
    assert list(portions([], torch.Tensor.numel, 4)) == []


@pytest.mark.parametrize(
    "flags, lr, iterations, expected",
    [
        ("--two-bw-sync-iterations 7", 1e-3, 1009, 7),
        ("--two-bw-sync-iterations 20%", 1e-3, 1009, 201),
        (AUTO, 1e-3, 1009, 201),
        (AUTO, 1e-3, 10**6, START),
        (f"{AUTO} --two-bw-sync-iterations 0", 1e-3, 1009, 0),
        (BY_HAND, 1e-3, 1009, 0),
        (AUTO, 1e-4, 1009, 0),
    ],
)
def test_the_length_of_a_synchronous_start(flags, lr, iterations, expected):
    schedule = resolve(arguments(flags, lr=lr), iterations).schedule
    assert schedule.sync_iterations == expected
