"""The sizes of a run's batches (--step-batch-size-schedule), as Megatron's calculator
of microbatches has them.

Invariant: the calculator is read and never changed.
"""

import argparse
import math
from typing import NamedTuple

from megatron.core import num_microbatches_calculator as calculators


class Position(NamedTuple):
    """Where the training loop is.

    iteration  the one that runs now
    end        the iteration after the last planned one, or the first one whose batch
               has another size
    following  microbatches of the batch `end`
    """

    iteration: int
    end: int
    following: int


def position(args: argparse.Namespace) -> Position:
    """Where the training loop of `args` is."""
    calculator = calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    microbatches = calculator.get()
    size = calculator.get_current_global_batch_size()
    samples = args.consumed_train_samples
    for start, _ in getattr(calculator, "schedule", ()):  # a constant size has none
        batches = max(math.ceil((start - samples) / size), 0)
        # a batch may skip a step
        other = calculator._get_batch_size_for_samples(samples + batches * size)
        end = args.curr_iteration + batches
        if other != size and end < args.train_iters:
            return Position(args.curr_iteration, end, microbatches * other // size)
    return Position(args.curr_iteration, args.train_iters, microbatches)


def planned(
    args: argparse.Namespace, iteration: int = 0, samples: int = 0
) -> tuple[int, int]:
    """Iterations and samples of the whole run, which has consumed `samples` before
    `iteration`."""
    iterations = args.train_iters
    target = 0 if iterations else args.train_samples or 0
    if args.step_batch_size_schedule is None:
        size = calculators.get_current_running_global_batch_size()
        iterations = iterations or target // args.global_batch_size
        return iterations, samples + (iterations - iteration) * size
    calculator = calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    while iteration < iterations if iterations else samples < target:
        samples += calculator._get_batch_size_for_samples(samples)
        iteration += 1
    return iteration, samples
