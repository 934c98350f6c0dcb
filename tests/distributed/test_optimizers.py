"""Megatron's optimizers of the package emerging_optimizers, where microbatches cross
iterations.

Against the single-process reference, which steps its own main parameters with the
package's classes: bit for bit, for the reasons that test_update_rule.py gives. Each has
two parts: one for matrices, and Adam or Lion for the rest.
"""

import threading

import pytest
import torch

from megatron_2bw.mcore.proxies import thread_local_matmul_precision
from tests.distributed.compare import (
    UNTIED,
    assert_same_losses,
    check_rule,
    run_pipeline,
)
from tests.distributed.test_checkpoint import DROPOUT, assert_goes_on, interrupted
from tests.distributed.test_correction import AUTO, FEEDBACK
from tests.distributed.test_update_rule import NO_BIAS, SKIPPED, assert_clipped, poison
from tests.distributed.training import command

MUON = "--optimizer muon --muon-nesterov"


@pytest.mark.proof("muon, auto", "lion", "soap")
@pytest.mark.parametrize(
    "flags, correction, rule",
    [
        (f"{MUON} --bf16", AUTO, dict(factor=11 / 12, gradient=11 / 12, late=2)),
        (
            "--optimizer muon --muon-scalar-optimizer lion",
            FEEDBACK,
            dict(factor=1.0),
        ),
        ("--optimizer lion --bf16", "", {}),
        ("--optimizer soap --bf16", "", {}),
    ],
    ids=["muon, auto", "lion beside muon", "lion", "soap"],
)
def test_2bw(flags, correction, rule):
    """With `auto` the matrices have no gradient term: it is known for Adam, which steps
    the other parameters."""
    runs, _ = check_rule(2, 3, UNTIED, flags, own=correction, rule=rule)
    assert_clipped(runs[0])


@pytest.mark.proof
def test_pipedream():
    check_rule(2, 2, UNTIED, MUON, schedule="pipedream")


def test_muon_on_tensor_parallel_ranks():
    """Orthogonalized whole, matrices give the losses of one rank, but for rounding that
    bf16 products enlarge."""
    flags = (UNTIED, NO_BIAS, MUON, FEEDBACK)
    alone = run_pipeline(command(2, 4, "2bw", *flags), 2)
    split = "--tensor-model-parallel-size 2 --muon-tp-mode distributed"
    runs = run_pipeline(command(2, 4, "2bw", *flags, split), 4)
    assert_same_losses(runs, alone, tolerance=3e-4)


def poison_and_skip(model, optimizer) -> None:
    """An inf in a stage's gradients, and Megatron's limit of the norm, which has no
    flag. Muon has no fp16."""
    poison(model, optimizer)
    for part in optimizer.chained_optimizers:
        part.config.grad_norm_skip_threshold = 1e6


def test_a_skipped_step_skips_all_parts():
    flags = (UNTIED, MUON, "--bf16")
    rule = dict(factor=1.0, poison=3)
    _, expected = check_rule(
        2, 3, *flags, own=FEEDBACK, prepare=poison_and_skip, rule=rule
    )
    assert expected.skipped == SKIPPED


@pytest.mark.parametrize(
    "optimizer, clip, tolerance", [("muon", 0, 0), ("lion", 1.0, 1e-6)]
)
def test_the_depth_changes_no_loss(optimizer, clip, tolerance):
    """Exact without clipping. An ulp of the norm is all that the depth changes; Muon
    and SOAP enlarge it."""
    flags = f"{UNTIED} --optimizer {optimizer} --clip-grad {clip}"
    one = run_pipeline(command(1, 3, "2bw", flags), 1)
    two = run_pipeline(command(2, 3, "2bw", flags), 2)
    assert_same_losses(two, one, tolerance=tolerance)


@pytest.mark.parametrize(
    "schedule, flags",
    [
        ("2bw", "--optimizer lion"),
        ("2bw", MUON),
        ("megatron", "--decoupled-lr 0.005"),
    ],
)
def test_resumed_where_a_stage_has_no_parameter_of_a_group(schedule, flags, tmp_path):
    """The middle stage has neither embedding nor output layer, which have a group of
    their own."""
    argv = command(3, 3, schedule, "--bf16 --swiglu", flags, num_layers=6, **DROPOUT)
    assert_goes_on(*interrupted(tmp_path, 3, argv))


def test_the_precision_of_products_is_that_of_one_thread():
    """Muon lowers it in the step's thread, while the next batch computes."""
    before = torch.get_float32_matmul_precision()
    seen = []

    def look() -> None:
        seen.append(torch.get_float32_matmul_precision())

    with thread_local_matmul_precision():
        torch.set_float32_matmul_precision("medium")
        other = threading.Thread(target=look)
        other.start()
        other.join()
        look()
        assert torch._C._get_float32_matmul_precision() == before
    look()
    assert seen == [before, "medium", before]
