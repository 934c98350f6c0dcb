"""What the flags of a correction stand for, and the lines about it.

What a step makes of it is held to the reference in tests/distributed/test_correction.py.
"""

from __future__ import annotations

import argparse
from argparse import Namespace

import pytest
import torch

from megatron_2bw.flags.correction import Correction, correction, factor, note, parse
from megatron_2bw.flags.own import short_warmup, sync_iterations
from megatron_2bw.mcore.working_copy import resume_note
from megatron_2bw.portions import portions


@pytest.mark.parametrize(
    "then, now, text",
    [
        (parse("0.5"), Correction(0.5), ""),
        (None, Correction(1.0), ": not corrected at first, corrected by 1 from then on"),
        (Correction(1.0), Correction(1.0, 2), ": corrected by 1 at first, corrected by 1 and gradient 2 from then on"),
    ],
)
def test_the_log_of_a_resumed_run_whose_first_weights_differ(then, now, text):
    assert resume_note(then, now) == text


@pytest.mark.parametrize("text", ["1", "0.5 and gradient 2", "1.5:cosine:0.9 and gradient 0.25", "0:linear:2"])
def test_the_text_of_a_correction_in_a_checkpoint(text):
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "schedule, given, start, words",
    [
        ("2bw", "none", 0, "--two-bw-correction auto recovers"),
        ("2bw", "auto", 0, "gradient's part of an update; --adam-beta1 0.9 (0.95 bears higher learning rates)"),
        ("2bw", "extrapolate", 0, None),
        ("2bw", "none", 3, None),
        ("pipedream-flush", "none", 0, None),
    ],
)
def test_a_run_has_a_line_on_what_it_does_against_the_delay(schedule, given, start, words):
    named = dict(pipeline_schedule=schedule, two_bw_correction=given, two_bw_sync_iterations=start)
    args = Namespace(**named, optimizer="adam", adam_beta1=0.9, two_bw_correction_factor="1")
    line = note(correction(Namespace(**vars(args), two_bw_correction_gradient=0.0)), args)
    assert (line is None) if words is None else (words in line and "\n" not in line)


@pytest.mark.parametrize(
    "given, said",
    [
        ({}, " 20 iterations"),
        (dict(lr_warmup_iters=100), None),
        (dict(lr_warmup_iters=0, lr_warmup_fraction=0.2, lr_decay_iters=100), " 20 iterations"),
        (dict(lr_warmup_iters=0, lr_warmup_samples=792), " 99 iterations"),
        (dict(train_iters=None, train_samples=1592), None),  # 199 iterations
        (dict(two_bw_sync_iterations=25), " 20 iterations"),
        (dict(lr=1e-4), None),
        (dict(load="checkpoints"), None),
    ],
)
def test_a_short_warmup_has_a_line(given, said):
    named = dict(pipeline_schedule="2bw", lr=1e-3, train_iters=500, train_samples=None, global_batch_size=8)
    named |= dict(micro_batch_size=1, two_bw_sync_iterations=0, load=None, pretrained_checkpoint=None)
    named |= dict(lr_warmup_iters=20, lr_warmup_samples=0, lr_warmup_fraction=None)
    line = short_warmup(Namespace(**named | dict(lr_decay_iters=None, lr_decay_samples=None) | given))
    assert (line is None) if said is None else (line.startswith("WARNING: ") and said in line and "\n" not in line)


BY_HAND = dict(two_bw_correction="extrapolate")


@pytest.mark.parametrize(
    "given, expected",
    [
        (dict(two_bw_correction="none"), None),
        (dict(two_bw_correction="auto"), Correction(1.5, 2.0)),
        (dict(two_bw_correction="auto", adam_beta1=0.5), Correction(0.5)),
        (dict(two_bw_correction="auto", optimizer="muon", muon_scalar_optimizer="lion"), Correction(1.5)),
        (BY_HAND, Correction(1.0)),
        (BY_HAND | dict(two_bw_correction_factor="1.5:cosine:0.9"), Correction(1.5, 0.0, "cosine", 0.9)),
        (BY_HAND | dict(two_bw_correction_factor="0.5", two_bw_correction_gradient=3.0), Correction(0.5, 3.0)),
    ],
)
def test_what_the_flags_stand_for(given, expected):
    named = dict(two_bw_correction_factor="1", two_bw_correction_gradient=0.0, optimizer="adam", adam_beta1=0.9)
    named["muon_momentum"] = 0.95
    assert correction(Namespace(**named | given)) == expected


def test_schedules_of_the_factor():
    def course(text: str, *shares: float) -> list[float]:
        return [parse(text).at(share).factor for share in shares]

    assert course("0.7", 0, 0.3, 1) == [0.7] * 3
    assert course("1.5:linear:0.5", 0, 0.25, 1) == [1.5, 1.25, 0.5]
    assert course("0.5:cosine:1.5", 0, 0.5, 1) == pytest.approx([0.5, 1, 1.5])


@pytest.mark.parametrize("text", ["x", "2.1", "nan", "1:cosine", "1:sine:0.5", "1:cosine:3"])
def test_a_wrong_factor_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be"):
        factor(text)


def test_denominators_exist_for_a_few_elements_at_a_time():
    tensors = [torch.zeros(size) for size in (3, 1, 2, 9, 1)]
    cut = portions(tensors, torch.Tensor.numel, 4)
    assert [[tensor.numel() for tensor in some] for some in cut] == [[3, 1], [2], [9], [1]]
    assert list(portions([], torch.Tensor.numel, 4)) == []


@pytest.mark.parametrize(
    "given, expected",
    [
        (dict(two_bw_sync_iterations=7), 7),
        (dict(two_bw_sync_iterations="20%"), 201),  # of 1009
        (dict(two_bw_sync_iterations="20%", train_iters=None, train_samples=4000), 100),  # of 500 batches
    ],
)
def test_a_synchronous_start_as_a_share_of_the_run(given, expected):
    sizes = dict(train_iters=1009, train_samples=None, micro_batch_size=2, global_batch_size=8)
    assert sync_iterations(Namespace(**sizes | given)) == expected
