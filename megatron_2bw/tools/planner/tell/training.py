"""A first training of a plan: Megatron's flags, and what they take in days, tokens and
GiB. Pure Python.

Invariant: the intervals follow from the seconds of an iteration; `flags` and `about`
name the same ones.
"""

from __future__ import annotations

from megatron_2bw.tools.planner.cost.memory import ELEMENT, GIB, bytes_of
from megatron_2bw.tools.planner.cost.simulated import Cost, Estimate
from megatron_2bw.tools.planner.descriptions.plan import Plan

ITERATIONS, EVAL_ITERS = 100_000, 10
SAVE_SECONDS, LOG_SECONDS = 1800, 60
# An evaluation computes EVAL_ITERS forwards, about as long as three iterations: at most
# 2 % of the time.
LEAST_EVAL_INTERVAL = 200


def rounded(number: float) -> int:
    """The nearest number with one significant digit; at least 1."""
    return max(int(float(f"{number:.0e}")), 1)


def save_interval(seconds: float) -> int:
    """Iterations in about half an hour, if one takes that many seconds; 1000 if that is
    not known (0)."""
    return min(rounded(SAVE_SECONDS / seconds), ITERATIONS // 10) if seconds else 1000


def flags(seconds: float = 0.0) -> list[str]:
    """Megatron's flags of a first run, without those that save.

    The warm-up is a share, so the caller may give another --train-iters.
    seconds  of an iteration; 0 if that is not known
    """
    evaluate = max(save_interval(seconds), LEAST_EVAL_INTERVAL)
    log = min(rounded(LOG_SECONDS / seconds), 10) if seconds else 10
    return (
        f"--train-iters {ITERATIONS} --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style "
        "cosine --lr-warmup-fraction 0.01 "
        f"--weight-decay 0.1 --clip-grad 1.0 --eval-interval {evaluate} --eval-iters {EVAL_ITERS} "
        f"--log-interval {log} --log-throughput"
    ).split()


def checkpoint_bytes(cost: Cost, plan: Plan) -> float:
    """Bytes of a checkpoint: weights, main weights, Adam's moments; of 2bw also the
    shadow weights and, with extrapolation, the working copy."""
    each, copies = (
        bytes_of(cost.precision, plan.grad_reduce_in_bf16),
        1 + plan.pipeline.late_step + plan.extrapolate,
    )
    return cost.model.trained_parameters() * (
        copies * ELEMENT[cost.precision] + each.main + each.moments
    )


def about(cost: Cost, estimate: Estimate) -> list[str]:
    """Sentences about the run that `flags` describes: its length, its checkpoints, its
    options against the delay."""
    plan, seconds = estimate.plan, estimate.seconds
    tokens, every = (
        ITERATIONS * plan.global_batch * cost.model.sequence,
        save_interval(seconds),
    )
    evaluate = max(every, LEAST_EVAL_INTERVAL)
    correction = (
        "--two-bw-correction auto acts against the delay (docs/convergence.md). "
        "`none` switches it off."
    )
    return [
        f"--train-iters {ITERATIONS}: {_time(ITERATIONS * seconds)} by these "
        f"estimates ({_time(seconds)} an "
        f"iteration), and {tokens / 1e9:.3g} billion tokens, "
        f"{tokens / cost.model.parameters():.3g} a parameter.",
        f"--save-interval {every}: a checkpoint of "
        f"{checkpoint_bytes(cost, plan) / GIB:.3g} GiB every "
        f"{_time(every * seconds)}. --eval-interval {evaluate}: an evaluation "
        f"every {_time(evaluate * seconds)}.",
        *[correction] * plan.extrapolate,
    ]


def _time(seconds: float) -> str:
    for name, unit in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
