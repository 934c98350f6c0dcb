"""Megatron's flags of a first training of a plan. Pure Python.

Invariant: the intervals follow from the seconds of an iteration.
"""

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
