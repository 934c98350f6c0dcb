"""Runs of the pipeline and of the reference, and how two of them are compared."""

import torch

from megatron_2bw.base.local_ranks import run_world
from tests.distributed.reference_modes import Rule, reference
from tests.distributed.training import Run, command, full_weights, train
from tests.session import once_a_session

UNTIED = "--untie-embeddings-and-output-weights"
DROPOUT = dict(attention_dropout=0.1, hidden_dropout=0.1)
SGD = dict(optimizer="sgd", sgd_momentum=0.9, lr=0.1, min_lr=0.01)


def run_pipeline(argv: list[str], ranks: int, prepare=None, finish=None) -> list[Run]:
    return run_world(ranks, train, argv, prepare, finish)


def run_reference(runs: list[Run], argv: list[str], microbatches: int, **rule) -> Run:
    """The reference of `argv`, with the norm added in the order of `runs`."""
    norm_order = [run.names for run in runs]
    return reference_run(argv, Rule(microbatches, norm_order=norm_order, **rule))


@once_a_session
def reference_run(argv: list[str], rule: Rule) -> Run:
    return run_world(1, reference, argv, rule)[0]


def check_rule(
    stages: int,
    microbatches: int,
    *flags: str,
    own: str = "",
    schedule: str = "2bw",
    prepare=None,
    finish=None,
    tolerance: float = 0,
    rule: dict | None = None,
    **changes,
) -> tuple[list[Run], Run]:
    """Train the same model with a pipeline and with the reference: losses, weights and
    skipped steps must be equal. Returns the ranks' runs, and the reference's.

    own           flags of the pipeline alone
    rule          values of Rule
    flags, changes, schedule  of `command`
    """
    argv = command(stages, microbatches, schedule, *flags, own, **changes)
    runs = run_pipeline(argv, stages, prepare, finish)
    argv = command(1, microbatches, schedule, *flags, **changes)
    rule = {"microbatches": microbatches} | (rule or {})
    expected = run_reference(runs, argv, **rule)
    for run in runs:
        assert run.skipped == expected.skipped
    assert_same(runs, expected, tolerance)
    return runs, expected


def assert_same(runs: list[Run], expected: Run, tolerance: float = 0) -> None:
    """Losses and all final weights: equal bits, or equal to a tolerance relative to the
    largest element of each tensor."""
    assert_same_losses(runs, [expected], tolerance)
    weights = full_weights(runs)
    assert weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert_close(weights[name], value, name, tolerance)


def assert_same_losses(runs, others, tolerance: float = 0) -> None:
    """The runs of the last ranks."""
    assert_close_losses(runs[-1].losses, others[-1].losses, tolerance)


def assert_close_losses(found: list, expected: list, tolerance: float) -> None:
    assert_close(torch.stack(found), torch.stack(expected), "losses", tolerance)


def assert_close(found, expected, name: str, tolerance: float) -> None:
    difference = (found - expected).abs().max()
    if tolerance == 0:
        assert torch.equal(found, expected), f"{name} differs by {difference}"
    else:
        error = (difference / expected.abs().max()).item()
        assert error <= tolerance, f"{name}: relative error {error}"


def assert_same_runs(runs: list[Run], others: list[Run], tolerance: float = 0) -> None:
    """Two pipelines of the same model, of any depths."""
    other = Run(losses=others[-1].losses, weights=full_weights(others))
    assert_same(runs, other, tolerance)


def assert_equal_weights(run: Run, other: Run) -> None:
    """Two ranks have the same weights, bit for bit."""
    assert run.weights.keys() == other.weights.keys()
    for name, weight in run.weights.items():
        assert torch.equal(other.weights[name], weight), name
