"""Runs of the pipeline and of the reference, and how two of them are compared."""

from __future__ import annotations

import torch

from megatron_2bw.base.local_ranks import run_world
from tests.distributed.reference import Rule, reference
from tests.distributed.training import Run, full_weights, train
from tests.session import once_a_session

UNTIED = "--untie-embeddings-and-output-weights"
SGD = dict(optimizer="sgd", sgd_momentum=0.9, lr=0.1, min_lr=0.01)


def run_pipeline(argv: list[str], ranks: int, prepare=None, finish=None) -> list[Run]:
    return run_world(ranks, train, argv, prepare, finish)


def run_reference(runs: list[Run], argv: list[str], microbatches: int, **rule) -> Run:
    """The reference of `argv`, with the norm added in the order of `runs`."""
    return reference_run(
        argv, Rule(microbatches, norm_order=[run.names for run in runs], **rule)
    )


@once_a_session
def reference_run(argv: list[str], rule: Rule) -> Run:
    return run_world(1, reference, argv, rule)[0]


def assert_same(
    runs: list[Run], expected: Run, exact: bool, tolerance: float = 1e-6
) -> None:
    """Losses and all final weights: equal bits, or equal relative to the largest
    element of each tensor."""
    losses = torch.stack(runs[-1].losses)
    assert_close(losses, torch.stack(expected.losses), "losses", exact, tolerance)
    weights = full_weights(runs)
    assert weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert_close(weights[name], value, name, exact, tolerance)


def assert_close(found, expected, name: str, exact: bool, tolerance: float) -> None:
    if exact:
        assert torch.equal(found, expected), (
            f"{name} differs by {(found - expected).abs().max()}"
        )
    else:
        error = ((found - expected).abs().max() / expected.abs().max()).item()
        assert error <= tolerance, f"{name}: relative error {error}"


def assert_same_runs(
    runs: list[Run], others: list[Run], exact: bool, tolerance: float = 1e-6
) -> None:
    """Two pipelines of the same model, of any depths."""
    other = Run(losses=others[-1].losses, weights=full_weights(others))
    assert_same(runs, other, exact, tolerance)
