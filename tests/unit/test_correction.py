"""What the flags of a correction stand for, and the lines about it.

What a step makes of it is held to the reference in
tests/distributed/test_correction.py.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_2bw.base.portions import portions
from megatron_2bw.mcore.correction import Correction
from megatron_2bw.mcore.working_copy import resume_note
from megatron_2bw.run.flags.correction_flags import (
    GAPS,
    beta1,
    correction,
    late_of,
    notes,
)
from megatron_2bw.run.flags.project_flags import START, sync_iterations

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    "saved, now, text",
    [
        ({"factor": 0.5, "gradient": 2.0}, Correction(0.5, 2), ""),
        # as older releases have saved it
        ({"factor": "0.5 and gradient 2"}, Correction(0.5, 2), ""),
        ({"factor": "0.5:1"}, Correction(0.5), ""),
        ({"factor": 0.5}, Correction(0.5), ""),
        (
            {"factor": None, "gradient": None},
            Correction(1),
            ": not corrected at first, corrected by 1 from then on",
        ),
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


SIZES = dict(
    pipeline_model_parallel_size=2,
    tensor_model_parallel_size=1,
    context_parallel_size=1,
    world_size=2,
)
SIZES |= dict(
    micro_batch_size=2,
    global_batch_size=4,
    two_bw_extra_warmup=(),
    two_bw_late_microbatches=None,
)
SIZES |= dict(step_batch_size_schedule=None)


@pytest.mark.parametrize(
    "given, expected",
    [
        (
            {},
            [
                (
                    "At 8,192 tokens a batch a small GPT's gap to vanilla's loss was "
                    f"{GAPS[8192][0]:+} %"
                )
            ],
        ),
        (
            dict(two_bw_correction="auto"),
            ["auto: all microbatches of a batch are late; weights 1.5 updates ahead"],
        ),
        (
            dict(two_bw_correction="auto", step_batch_size_schedule="0:4 128:32"),
            [
                (
                    "auto: all microbatches of a batch of 4 samples are late; "
                    "weights 1.5 updates ahead"
                ),
                (
                    "auto: the first 4 of 16 microbatches of a batch of 32 samples "
                    "are late; weights 0.5 updates ahead"
                ),
            ],
        ),
        (dict(two_bw_correction="extrapolate"), []),
        (dict(two_bw_sync_iterations=3), []),
        (dict(pipeline_schedule="pipedream-flush"), []),
    ],
)
def test_a_run_has_a_line_for_each_size_of_its_batches(given, expected):
    named = SIZES | dict(
        pipeline_schedule="2bw", two_bw_correction="none", two_bw_sync_iterations=None
    )
    args = Namespace(**named | given, seq_length=2048, optimizer="adam", adam_beta1=0.9)
    for line, words in zip(notes(args), expected, strict=True):
        assert words in line


def test_the_gaps_that_a_run_prints_are_those_of_the_record():
    for tokens, name in ((512, "512"), (2048, "2k"), (8192, "8k"), (32768, "32k")):
        rows = json.loads((DOCS / f"convergence/batch{name}.json").read_text())[
            "summary"
        ]
        found = {row["variant"]: round(row["gap_percent"]["mean"], 1) for row in rows}
        assert GAPS[tokens] == tuple(
            found.get(variant) for variant in ("2bw", "all", "half", "quarter")
        )


BY_HAND = dict(two_bw_correction="extrapolate")


@pytest.mark.parametrize(
    "given, expected",
    [
        (dict(two_bw_correction="auto"), Correction(1.5, 2.0)),
        (dict(two_bw_correction="auto", adam_beta1=0.5), Correction(0.5)),
        (
            dict(
                two_bw_correction="auto", optimizer="muon", muon_scalar_optimizer="lion"
            ),
            Correction(1.5),
        ),
        # 4 of 16 microbatches are late
        (dict(two_bw_correction="auto", global_batch_size=32), Correction(0.5, 0.5)),
        (
            dict(two_bw_correction="auto", global_batch_size=32, adam_beta1=0.4),
            Correction(0.1),
        ),
        (BY_HAND, Correction(1.0)),
        (
            BY_HAND
            | dict(two_bw_correction_factor=0.5, two_bw_correction_gradient=3.0),
            Correction(0.5, 3.0),
        ),
    ],
)
def test_what_the_flags_stand_for(given, expected):
    named = SIZES | dict(
        two_bw_correction_factor=1.0,
        two_bw_correction_gradient=0.0,
        optimizer="adam",
        adam_beta1=0.9,
    )
    named["muon_momentum"] = 0.95
    args = Namespace(**named | given)
    assert correction(args, args.global_batch_size // 2) == expected


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, 2),  # all
        (dict(global_batch_size=8), 2),  # one for each stage, half of a batch
        (dict(global_batch_size=16), 2),  # a quarter
        (dict(global_batch_size=64), 4),  # two for each stage
        (dict(global_batch_size=64, two_bw_extra_warmup=(1,)), 6),
        (dict(global_batch_size=64, two_bw_late_microbatches=7), 7),
    ],
)
def test_how_many_microbatches_are_late(given, expected):
    args = Namespace(**SIZES | dict(two_bw_correction="auto") | given)
    assert late_of(args, args.global_batch_size // 2) == expected


def test_the_largest_batch_decides_on_the_decay():
    named = SIZES | dict(two_bw_correction="auto")
    assert beta1(Namespace(**named)) == 0.95
    assert (
        beta1(Namespace(**named | dict(step_batch_size_schedule="0:4 128:32"))) == 0.9
    )


def test_denominators_exist_for_a_few_elements_at_a_time():
    tensors = [torch.zeros(size) for size in (3, 1, 2, 9, 1)]
    cut = portions(tensors, torch.Tensor.numel, 4)
    assert [[tensor.numel() for tensor in some] for some in cut] == [
        [3, 1],
        [2],
        [9],
        [1],
    ]
    assert list(portions([], torch.Tensor.numel, 4)) == []


@pytest.mark.parametrize(
    "given, expected",
    [
        (dict(two_bw_sync_iterations=7), 7),
        (dict(two_bw_sync_iterations="20%"), 201),  # of 1009
        ({}, 201),
        (dict(train_iters=10**6), START),
        (dict(two_bw_sync_iterations=0), 0),
        (dict(two_bw_correction="extrapolate"), 0),
        (dict(lr=1e-4), 0),
    ],
)
def test_the_length_of_a_synchronous_start(given, expected):
    named = (
        SIZES
        | dict(two_bw_sync_iterations=None, two_bw_correction="auto", lr=1e-3)
        | given
    )
    iterations = named.pop("train_iters", 1009)
    assert sync_iterations(Namespace(**named), iterations) == expected
