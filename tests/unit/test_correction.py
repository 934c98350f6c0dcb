"""What the flags of a correction stand for, and the lines about it.

What a step makes of it is held to the reference in
tests/distributed/test_correction.py.
"""

import argparse
import json
from pathlib import Path

import pytest
import torch

from megatron_2bw.base.errors import UserError
from megatron_2bw.base.portions import portions
from megatron_2bw.mcore.correction import Correction
from megatron_2bw.mcore.working_copy import resume_note
from megatron_2bw.run.flags.correction_notes import GAPS, gap, most_late, notes
from megatron_2bw.run.flags.project_flags import add_flags, translate
from megatron_2bw.run.flags.resolve import PREDICTED_AHEAD, START, resolve

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


def arguments(flags: str = "", **megatrons) -> argparse.Namespace:
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


def test_the_line_of_a_run():
    """One for each size of its batches: what the late microbatches gain, and what one
    more step on the dial would."""
    args = arguments(pipeline_model_parallel_size=8, world_size=8, seq_length=512)
    args.step_batch_size_schedule = "0:16 128:64"
    at_8k = GAPS["auto"][8192]
    at_32k = GAPS["auto"][32768]
    assert notes(args, resolve(args, 100).schedule) == [
        "> 2bw: 2 of 8 microbatches late, 1.15 times as fast as 1F1B, "
        f"measured gap {at_8k[0.25]:+.1f} % at 8,192 tokens a batch (--two-bw-late all: "
        f"1.88 times, measured gap {GAPS['predict'][8192]:+.1f} % at 8,192 tokens a batch)",
        "> 2bw: 8 of 32 microbatches late, 1.22 times as fast as 1F1B, "
        f"measured gap {at_32k[0.25]:+.1f} % at 32,768 tokens a batch",
    ]
    args.optimizer = "soap"
    line = notes(args, resolve(args, 100).schedule)[0]
    assert f"7: 1.88 times, measured gap {at_8k[0.875]:+.1f} %" in line
    args.two_bw_late = "all"
    line = notes(args, resolve(args, 100).schedule)[0]
    assert line.endswith("(not predicted: --optimizer soap was not measured)")
    assert f"{GAPS['none'][8192]:+.1f} %" in gap(8192, 1.0, "none")


def test_the_most_late_microbatches_for_a_gap(monkeypatch):
    """Between measured shares the gap is on a line."""
    monkeypatch.setitem(GAPS["auto"], 2048, {0: 0.0, 0.5: 0.0, 1: 1.0})
    assert [most_late(2048, 8, most) for most in (0.1, 0.5, 1)] == [4, 6, 8]
    assert most_late(2048, 1, 0.5) == 0


@pytest.mark.parametrize(
    "tokens, records",
    [
        (512, ["batch512", "dial512"]),
        (2048, ["batch2k", "dial2k"]),
        (8192, ["batch8k", "dial8k"]),
        (32768, ["batch32k"]),
    ],
)
def test_the_gaps_that_a_run_prints_are_those_of_the_records(tokens, records):
    """The first record is older: its 2bw is the paper's, and the second replaces its
    shares."""
    gaps = {0: 0.0}
    shares = {"quarter": 0.25, "half": 0.5, "all": 1.0}
    for record in records:
        content = json.loads((DOCS / f"convergence/{record}.json").read_text())
        flags = content["flags"]
        batch = int(flags[flags.index("--global-batch-size") + 1])
        microbatches = batch // int(flags[flags.index("--micro-batch-size") + 1])
        for row in content["summary"]:
            variant = row["variant"]
            percent = round(row["gap_percent"]["mean"], 1)
            if variant == "2bw":
                assert GAPS["none"][tokens] == percent
            elif variant.startswith("late"):
                gaps[int(variant.removeprefix("late")) / microbatches] = percent
            elif variant in shares:
                gaps[shares[variant]] = percent
    assert GAPS["auto"][tokens] == gaps


@pytest.mark.parametrize(
    "record, tokens",
    [
        ("predict512", 512),
        ("predict2k", 2048),
        ("predict8k", 8192),
        ("predict32k", 32768),
    ],
)
def test_the_gaps_with_predicted_weights_are_those_of_the_records(record, tokens):
    content = json.loads((DOCS / f"convergence/{record}.json").read_text())
    gaps = {row["variant"]: row["gap_percent"]["mean"] for row in content["summary"]}
    assert GAPS["predict"][tokens] == round(gaps["d50"], 1)


AUTO = "--two-bw-late all --two-bw-correction auto"
FEEDBACK = "--two-bw-correction 1"


@pytest.mark.parametrize(
    "flags, megatrons, expected",
    [
        ("", {}, Correction(0.75, 0.75)),  # one of two microbatches is late
        (AUTO, {}, Correction(ahead=PREDICTED_AHEAD)),
        (AUTO, dict(optimizer="soap"), Correction(1.25, 1.25)),
        # two replicas: nothing hides their sums with two microbatches
        (AUTO, dict(world_size=4, global_batch_size=8), Correction(1.25, 1.25)),
        (AUTO, dict(world_size=4, global_batch_size=12), Correction(ahead=0.5)),
        (
            "--two-bw-late 2",
            dict(optimizer="muon", muon_scalar_optimizer="lion"),
            Correction(1.25),
        ),
        (
            "--two-bw-late all --two-bw-correction predict,0.5",
            {},
            Correction(ahead=0.5),
        ),
        # 4 of 16 microbatches are late
        ("", dict(global_batch_size=32), Correction(0.5, 0.5)),
        ("", dict(global_batch_size=32, adam_beta1=0.4), Correction(0.1)),
        ("--two-bw-correction 0.5,3", {}, Correction(0.5, 3.0)),
    ],
)
def test_what_the_flags_stand_for(flags, megatrons, expected):
    args = arguments(flags, **megatrons)
    options = resolve(args, 100)
    assert options.correction(args.global_batch_size // 2) == expected


@pytest.mark.parametrize(
    "flags, late",
    [
        ("", (1, 1, 1, 2, 16)),  # a quarter, at least one
        ("--two-bw-late 60%", (1, 1, 2, 4, 38)),
        ("--two-bw-late 7", (1, 2, 4, 7, 7)),
        ("--two-bw-late 0", (0, 0, 0, 0, 0)),
        ("--two-bw-late all", (1, 2, 4, 8, 64)),
    ],
)
def test_how_many_microbatches_are_late(flags, late):
    schedule = resolve(arguments(flags), 100).schedule
    assert tuple(map(schedule.late_of, (1, 2, 4, 8, 64))) == late
    assert (resolve(arguments(flags), 100).correction is None) == (late[0] == 0)


def test_flags_of_the_last_release():
    """Their values pass to the flags that have replaced them, with a line for each."""
    old = (
        "--two-bw-late-microbatches 3 --two-bw-gradient-slots 1 --two-bw-exchange gloo "
        "--two-bw-trace folder --two-bw-correction extrapolate "
        "--two-bw-correction-gradient 2"
    )
    args = arguments(old, rampup_batch_size=None)
    assert len(translate(args)) == 5
    assert (args.two_bw_late, args.two_bw_memory) == (3, "one-slot")
    assert (args.pipeline_exchange, args.pipeline_trace) == ("gloo", Path("folder"))
    assert args.two_bw_correction == "1.0,2.0"
    with pytest.raises(UserError, match="^--two-bw-correction 2.5: give"):
        arguments("--two-bw-correction 2.5")
    args = arguments("--two-bw-optimizer host", rampup_batch_size=None)
    line = "> --two-bw-optimizer has another name now: --two-bw-memory host"
    assert translate(args) == [line]
    assert args.two_bw_memory == "host"


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
        ("", 1e-3, 1009, 201),
        ("", 1e-3, 10**6, START),
        (FEEDBACK, 1e-3, 1009, 0),
        ("", 1e-4, 1009, 0),
    ],
)
def test_the_length_of_a_synchronous_start(flags, lr, iterations, expected):
    schedule = resolve(arguments(flags, lr=lr), iterations).schedule
    assert schedule.sync_iterations == expected
