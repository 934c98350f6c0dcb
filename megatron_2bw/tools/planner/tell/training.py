"""A first training of a plan: Megatron's flags, and what they take in days, tokens and
GiB. Pure Python.

Invariant: the intervals follow from the seconds of an iteration; `flags` and `about`
name the same ones.
"""

from megatron_2bw.tools.planner.cost.memory import ELEMENT, GIB, bytes_of
from megatron_2bw.tools.planner.cost.simulated import Cost, Estimate
from megatron_2bw.tools.planner.descriptions.plan import Plan

ITERATIONS = 100_000
EVAL_ITERS = 10
SAVE_SECONDS = 1800
LOG_SECONDS = 60
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
    each = bytes_of(cost.precision, plan.grad_reduce_in_bf16)
    copies = 1 + plan.pipeline.late_step + plan.corrected
    size = copies * ELEMENT[cost.precision] + each.main + each.moments
    return cost.model.trained_parameters() * size


def about(cost: Cost, estimate: Estimate) -> list[str]:
    """Sentences about the run that `flags` describes: its length, its checkpoints."""
    plan = estimate.plan
    seconds = estimate.seconds
    tokens = ITERATIONS * plan.global_batch * cost.model.sequence
    save = save_interval(seconds)
    evaluate = max(save, LEAST_EVAL_INTERVAL)
    size = checkpoint_bytes(cost, plan) / GIB
    each = tokens / cost.model.parameters()
    return [
        f"--train-iters {ITERATIONS}: {_time(ITERATIONS * seconds)} by these estimates "
        f"({_time(seconds)} an iteration), and {tokens / 1e9:.3g} billion tokens, {each:.3g} a parameter.",
        f"--save-interval {save}: a checkpoint of {size:.3g} GiB every {_time(save * seconds)}. "
        f"--eval-interval {evaluate}: an evaluation every {_time(evaluate * seconds)}.",
    ]


def _time(seconds: float) -> str:
    for name, unit in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
