"""The planner's profile: its file, what it says between the measured sizes, and one
real measurement on the CPU."""

import argparse
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_2bw.base.errors import UserError
from megatron_2bw.mcore import cpu
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.profile import BlockTime, Profile
from megatron_2bw.tools.planner.measure import blocks as measure

MODEL = Model("tiny", 2, 64, 4, vocab=100, sequence=32)
TIMES = dict(
    blocks=(BlockTime(2, 1.0, 2.0), BlockTime(4, 1.5, 3.5), BlockTime(8, 3.5, 7.5))
)
TIMES |= dict(
    output=(BlockTime(2, 0.25, 0.5),),
    optimizer_seconds_per_parameter=1e-9,
    optimizer="Adam",
)
SHAPE = dict(
    hidden=64,
    heads=4,
    ffn=256,
    groups=4,
    head_size=16,
    sequence=32,
    gated=False,
    dropout=True,
    vocab=100,
)
PROFILE = Profile(
    "cpu",
    "fp32",
    "gpt",
    **SHAPE,
    **TIMES,
    threads=1,
    made_with="by hand",
)


def test_round_trip(tmp_path):
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]


def test_times_of_a_layer():
    # beyond both ends, on their lines
    expected = {2: (1.0, 2.0), 3: (1.25, 2.75), 16: (7.5, 15.5), 1: (0.75, 1.25)}
    assert {
        microbatch: pytest.approx(PROFILE.layer(microbatch)) for microbatch in expected
    } == expected
    noisy = replace(PROFILE, blocks=(BlockTime(4, 2.0, 1.0), BlockTime(8, 1.0, 4.0)))
    assert noisy.layer(16) == (1.0, 10.0)  # never less than the last point
    # neither more than the first point nor less than in proportion
    assert noisy.layer(1) == (2.0, 0.25)
    assert PROFILE.output_layer(1) == (0.125, 0.25)  # a single point: in proportion
    assert PROFILE.output_layer(8) == (1.0, 2.0)


@pytest.mark.parametrize(
    "changes, flag",
    [({"groups": 2}, "--num-query-groups"), ({"gated": True}, "--swiglu")],
)
def test_a_profile_fits_layers_of_its_shape(changes, flag):
    assert PROFILE.fits(replace(MODEL, layers=99, vocab=7, tied=False), "fp32") is None
    assert PROFILE.fits(MODEL, "bf16").startswith("--precision")
    assert PROFILE.fits(replace(MODEL, **changes), "fp32").startswith(flag)


def options(path, *words: str) -> argparse.Namespace:
    parser = measure.profile_parser("plan profile")
    return parser.parse_args(["--json", str(path), *words])


@pytest.fixture
def alone(monkeypatch, one_thread):
    """No job around, and one thread, so that times say something."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_real_measurement(tmp_path, alone, capsys):
    path = tmp_path / "new" / "profile.json"
    words = ("--device", "cpu", "--microbatches", "64,1", "--repeats", "5")
    model = replace(MODEL, sequence=64, vocab=1000)
    assert measure.measure_blocks(options(path, *words), model) == 0
    profile = Profile.load(path)
    assert profile.fits(model, "fp32") is None
    assert (profile.device, profile.vocab, profile.architecture, profile.threads) == (
        "cpu",
        1000,
        "gpt",
        1,
    )
    assert profile.optimizer == "Megatron's FP32Optimizer with torch's AdamW"
    assert profile.optimizer_seconds_per_parameter > 0
    for points in (profile.blocks, profile.output):
        small, large = points
        assert (small.microbatch, large.microbatch) == (1, 64)
        assert small.forward > 0
        assert small.backward > 0
        assert small.forward + small.backward < large.forward + large.backward
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("MEASURED") for line in lines) == 5
    assert lines[-1] == f"wrote {path}"
    assert not cpu.installed()
    assert not dist.is_initialized()


def test_a_microbatch_that_exceeds_the_memory_is_omitted(
    tmp_path, alone, capsys, monkeypatch
):
    passes = measure._passes

    def full(stage, model, size, device):
        if size > 1:
            raise torch.OutOfMemoryError
        return passes(stage, model, size, device)

    monkeypatch.setattr(measure, "_passes", full)
    path = tmp_path / "p.json"
    words = ("--device", "cpu", "--repeats", "1", "--microbatches")
    assert measure.measure_blocks(options(path, *words, "1,2"), MODEL) == 0
    assert "layer, microbatch 2: does not fit the memory\n" in capsys.readouterr().out
    assert [point.microbatch for point in Profile.load(path).blocks] == [1]
    with pytest.raises(UserError, match="^--microbatches 2"):
        measure.measure_blocks(options(path, *words, "2"), MODEL)


@pytest.mark.parametrize(
    "precision, model",
    [
        (
            "bf16",
            replace(
                MODEL,
                gated=True,
                rms_norm=True,
                rotary=True,
                groups=2,
                bias=False,
                dropout=False,
            ),
        ),
        ("fp16", replace(MODEL, kind="bert", qkv_bias=True)),
    ],
)
def test_other_layers(precision, model, alone):
    profile = measure.measure_block(model, precision, [1], "cpu", repeats=1)
    assert profile.fits(model, precision) is None
    assert profile.architecture == model.kind
    assert "Float16Optimizer" in profile.optimizer
    assert min(*profile.layer(1), *profile.output_layer(1)) > 0
