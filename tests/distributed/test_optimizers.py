"""Megatron's optimizers of the package emerging_optimizers, where microbatches cross
iterations.

Against the single-process reference, which steps its own main parameters with the
package's classes: bit for bit, for the reasons that test_update_rule.py gives. Each has
two parts: one for matrices, and Adam or Lion for the rest.
"""

from __future__ import annotations

import threading

import pytest
import torch

from megatron_2bw.mcore.proxies import thread_local_matmul_precision
from tests.distributed.compare import UNTIED, assert_same, run_pipeline, run_reference
from tests.distributed.test_checkpoint import DROPOUT, assert_goes_on, interrupted
from tests.distributed.test_correction import AUTO, EXTRAPOLATE
from tests.distributed.test_equivalence import NO_BIAS
from tests.distributed.test_update_rule import poison
from tests.distributed.training import command

MUON = ("--optimizer", "muon", "--muon-nesterov")
LION_BESIDE_MUON = ("--optimizer", "muon", "--muon-scalar-optimizer", "lion")


@pytest.mark.proof(
    "--optimizer muon --muon-nesterov --bf16-auto",
    "--optimizer lion --bf16-",
    "--optimizer soap --bf16-",
)
@pytest.mark.parametrize(
    "flags, correction",
    [
        ((*MUON, "--bf16"), AUTO),
        (LION_BESIDE_MUON, EXTRAPOLATE),
        (("--optimizer", "lion", "--bf16"), {}),
        (("--optimizer", "soap", "--bf16"), {}),
    ],
    ids=lambda case: (
        " ".join(case) if isinstance(case, tuple) else case.get("two_bw_correction", "")
    ),
)
def test_2bw(flags, correction):
    """With `auto` the matrices have no gradient term: it is known for Adam, which steps
    the other parameters."""
    changes = dict(adam_beta1=0.9) if correction is AUTO else {}
    runs = run_pipeline(
        command(2, 3, "2bw", UNTIED, *flags, **correction, **changes), 2
    )
    argv = command(1, 3, "2bw", UNTIED, *flags, **changes)
    ahead = (
        dict(factor=1.5, gradient=2)
        if correction is AUTO
        else dict(factor=1.0 if correction else 0.0)
    )
    expected = run_reference(runs, argv, 3, optimizer=flags[1], **ahead)
    assert max(runs[0].grad_norms) > 1.0, "clipping must bite"
    assert_same(runs, expected, exact=True)


@pytest.mark.proof
def test_pipedream():
    flags = (UNTIED, *MUON)
    runs = run_pipeline(command(2, 2, "pipedream", *flags), 2)
    expected = run_reference(
        runs, command(1, 2, "pipedream", *flags), 2, optimizer="muon", per_stage=True
    )
    assert_same(runs, expected, exact=True)


def test_muon_on_tensor_parallel_ranks():
    """Orthogonalized whole, matrices give the losses of one rank, but for rounding that
    bf16 products enlarge."""
    flags = (UNTIED, NO_BIAS, *MUON)
    alone = torch.stack(
        run_pipeline(command(2, 4, "2bw", *flags, **EXTRAPOLATE), 2)[-1].losses
    )
    sizes = dict(tensor_model_parallel_size=2, muon_tp_mode="distributed")
    losses = torch.stack(
        run_pipeline(command(2, 4, "2bw", *flags, **sizes, **EXTRAPOLATE), 4)[-1].losses
    )
    assert (losses / alone - 1).abs().max() < 3e-4


def poison_and_skip(model, optimizer) -> None:
    """An inf in a stage's gradients, and Megatron's limit of the norm, which has no
    flag. Muon has no fp16."""
    poison(model, optimizer)
    for part in optimizer.chained_optimizers:
        part.config.grad_norm_skip_threshold = 1e6


def test_a_skipped_step_skips_all_parts():
    argv = command(1, 3, "2bw", UNTIED, *MUON, "--bf16")
    runs = run_pipeline(
        command(2, 3, "2bw", UNTIED, *MUON, "--bf16", **EXTRAPOLATE), 2, poison_and_skip
    )
    expected = run_reference(runs, argv, 3, optimizer="muon", factor=1.0, poison=3)
    assert (
        [run.skipped for run in runs]
        == [[0, 0, 0, 1, 0, 0]] * 2
        == [expected.skipped] * 2
    )
    assert_same(runs, expected, exact=True)


@pytest.mark.parametrize(
    "optimizer, clip, tolerance", [("muon", 0, 0), ("lion", 1.0, 1e-6)]
)
def test_the_depth_changes_no_loss(optimizer, clip, tolerance):
    """Exact without clipping. An ulp of the norm is all that the depth changes; Muon
    and SOAP enlarge it."""
    flags = (UNTIED, "--optimizer", optimizer)
    one, two = (
        run_pipeline(command(n, 3, "2bw", *flags, clip_grad=clip), n)[-1].losses
        for n in (1, 2)
    )
    assert [loss.item() for loss in two] == pytest.approx(
        [loss.item() for loss in one], rel=tolerance, abs=0
    )


def test_resumed_run_is_the_uninterrupted_one(tmp_path):
    assert_goes_on(
        *interrupted(
            tmp_path, 2, command(2, 2, "2bw", "--optimizer", "lion", **DROPOUT)
        )
    )


@pytest.mark.parametrize(
    "schedule, flags", [("2bw", MUON), ("megatron", ("--decoupled-lr", "0.005"))]
)
def test_resumed_where_a_stage_has_no_parameter_of_a_group(schedule, flags, tmp_path):
    """The middle stage has neither embedding nor output layer, which have a group of
    their own."""
    argv = command(
        3, 3, schedule, "--bf16", "--swiglu", *flags, num_layers=6, **DROPOUT
    )
    assert_goes_on(*interrupted(tmp_path, 3, argv))


def test_the_precision_of_products_is_that_of_one_thread():
    """Muon lowers it in the step's thread, while the next batch computes."""
    before, seen = torch.get_float32_matmul_precision(), []
    with thread_local_matmul_precision():
        torch.set_float32_matmul_precision("medium")
        other = threading.Thread(
            target=lambda: seen.append(torch.get_float32_matmul_precision())
        )
        other.start()
        other.join()
        assert (
            torch.get_float32_matmul_precision() == "medium"
            and torch._C._get_float32_matmul_precision() == before
        )
    assert seen == [before] == [torch.get_float32_matmul_precision()]
