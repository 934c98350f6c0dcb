"""A synchronous start and extrapolated weights, against the single-process reference of the update rule.

Bitwise, for the reasons that test_update_rule.py gives.
"""

from __future__ import annotations

import pytest

from tests.distributed.compare import SGD, UNTIED, assert_same, run_pipeline, run_reference
from tests.distributed.test_update_rule import POISONED, poison
from tests.distributed.training import command

EXTRAPOLATE = dict(two_bw_correction="extrapolate")


@pytest.mark.parametrize("stages, microbatches, sync, more", [
    (2, 4, 3, {}), (4, 5, 2, {}), (2, 3, 4, dict(two_bw_extra_warmup=1)), (1, 2, 3, {}),
])
def test_synchronous_start(stages, microbatches, sync, more):
    changes = dict(clip_grad=0 if stages == 4 else 1.0)
    argv = command(stages, microbatches, "2bw", UNTIED, two_bw_sync_iterations=sync, **more, **changes)
    runs = run_pipeline(argv, stages)
    argv = command(1, microbatches, "2bw", UNTIED, **changes)
    assert_same(runs, run_reference(runs, argv, microbatches, sync=sync), exact=True)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("flags", [(), ("--bf16",), ("--fp16",)])
def test_extrapolation(flags, optimizer):
    changes = SGD if optimizer == "sgd" else {}
    changes = changes | (dict(initial_loss_scale=4096) if flags == ("--fp16",) else {})
    runs = run_pipeline(command(2, 4, "2bw", UNTIED, *flags, **changes, **EXTRAPOLATE), 2)
    argv = command(1, 4, "2bw", UNTIED, *flags, **changes)
    assert_same(runs, run_reference(runs, argv, 4, optimizer=optimizer, factor=1.0), exact=True)
    plain = run_reference(runs, argv, 4, optimizer=optimizer)
    with pytest.raises(AssertionError):
        assert_same(runs, plain, exact=False)


@pytest.mark.parametrize("correction", [{}, EXTRAPOLATE])
@pytest.mark.parametrize("sync", [0, 3, POISONED + 1, 6])
def test_skipped_step(sync, correction):
    """After a skipped step W(j+1) = W(j), and the working copy is W(j) too; each batch has the scale of its weights."""
    changes = dict(initial_loss_scale=4096, hysteresis=1, train_iters=7)
    flags = (UNTIED, "--fp16")
    runs = run_pipeline(command(2, 4, "2bw", *flags, **changes, **correction, two_bw_sync_iterations=sync), 2, poison)
    rule = dict(poison=POISONED, sync=sync, factor=1.0 if correction else 0.0)
    expected = run_reference(runs, command(1, 4, "2bw", *flags, **changes), 4, **rule)
    assert [run.skipped for run in runs] == [[0, 0, 0, 1, 0, 0, 0]] * 2 == [expected.skipped] * 2
    assert runs[0].scales == expected.scales
    assert_same(runs, expected, exact=True)
