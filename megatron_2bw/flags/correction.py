"""--two-bw-correction: how far ahead of the newest weights a batch of 2bw computes.

With 2BW the gradient of batch j + 1 changes W(j+1) and is taken one update earlier. With a correction it is taken at
the working copy

    W'(j) = W(j) + factor (W(j) - W(j-1)) + gradient D(j),

where D(j) is the part of the update W(j) - W(j-1) that the last gradient alone contributed. For Adam D(j) is
-(1 - beta1) rate g / (sqrt(v) + eps). The first term is the error feedback of arXiv 2606.30634; the second damps the
directions of high curvature, in which the delay oscillates (docs/convergence.md).

Invariant: without torch, as all flags; the values in `args` are strings and numbers, which Megatron saves.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from megatron_2bw.flags.rule import Args

SHAPES = {"linear": lambda share: 1 - share, "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2}
# Optimizers whose update is a running mean of gradients, and the decay of that mean.
DECAYS = {"adam": "adam_beta1", "sgd": "sgd_momentum", "muon": "muon_momentum", "soap": "adam_beta1"}
BETA1 = 0.95  # Adam's with `auto`, if --adam-beta1 is not given: with a delay it bears higher rates than 0.9
LEAST_MOMENTUM = 0.8  # below it `auto` adds the best factor of a gradient of pure noise, the momentum


@dataclass(frozen=True)
class Factor:
    """A number, or a schedule from `first` to `last` over the run, by a function of SHAPES."""

    first: float
    shape: str = "linear"
    last: float | None = None

    def at(self, share: float) -> float:
        """The factor after this share of the run's iterations, 0 to 1."""
        if self.last is None:
            return self.first
        return self.last + (self.first - self.last) * SHAPES[self.shape](share)

    def __str__(self) -> str:
        return f"{self.first:g}" if self.last is None else f"{self.first:g}:{self.shape}:{self.last:g}"


@dataclass(frozen=True)
class Correction:
    """What a batch adds to the newest weights: `factor` x the last update, `gradient` x its last gradient's part."""

    factor: Factor
    gradient: float = 0.0

    def __str__(self) -> str:
        return f"{self.factor}" + (f" and gradient {self.gradient:g}" if self.gradient else "")


def factor(text: str) -> str:
    """The value of --two-bw-correction-factor: a number, or FIRST:SHAPE:LAST. Returns it; raises ArgumentTypeError."""
    _parse(text)
    return text


def _parse(text: str) -> Factor:
    words = text.split(":")
    try:
        numbers = [float(word) for word in words[::2]]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or len(words) != 2 * len(numbers) - 1 or not {*words[1::2]} <= {*SHAPES}:
        raise argparse.ArgumentTypeError(f"{text}: must be a number such as 1, or a schedule such as 1.5:cosine:0.9")
    if not all(0 <= number <= 2 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: must be between 0 and 2")
    return Factor(numbers[0], *words[1:2], *numbers[1:])


def correction(args: Args) -> Correction | None:
    """What --two-bw-correction asks for; None without a correction."""
    if args.two_bw_correction == "none":
        return None
    if args.two_bw_correction == "auto":
        return recommended(args)
    return Correction(_parse(args.two_bw_correction_factor), args.two_bw_correction_gradient)


def recommended(args: Args) -> Correction:
    """The setting of `auto` (docs/convergence.md)."""
    decay = getattr(args, DECAYS.get(args.optimizer, ""), LEAST_MOMENTUM)
    if decay < LEAST_MOMENTUM:
        return Correction(Factor(decay))
    return Correction(Factor(1.5), 0.0 if _only_lion(args) else 2.0)


def _only_lion(args: Args) -> bool:
    """Whether no parameter is stepped by an optimizer whose gradient's part is known: Muon and Lion."""
    return args.optimizer == "muon" and args.muon_scalar_optimizer == "lion"


def warning(args: Args) -> str | None:
    """A line for the user who gives too little momentum, or None.

    Where gradients are independent noise, extrapolation takes them sqrt(1 - 2 decay factor + factor^2) updates away
    from the weights that they change, and plain 2BW takes them one update away (docs/convergence.md).
    """
    if args.two_bw_correction != "extrapolate":
        return None
    decay, given = getattr(args, DECAYS.get(args.optimizer, ""), 1.0), _parse(args.two_bw_correction_factor)
    if decay >= max(given.first, given.last or 0.0) / 2:
        return None
    flag = "--" + DECAYS[args.optimizer].replace("_", "-")
    return (
        f"WARNING: --two-bw-correction extrapolate with {flag} {decay:g}: one update says little about the next, and "
        "where gradients are mostly noise this is worse than no correction. Give --two-bw-correction auto, which "
        "adapts to the momentum (docs/convergence.md)"
    )


def note(args: Args) -> str | None:
    """A line on the correction of a run of 2bw: what `auto` stands for, or that there is none. None: nothing to say."""
    if args.pipeline_schedule != "2bw":
        return None
    if args.two_bw_correction == "auto":
        found, adam = recommended(args), args.optimizer == "adam"
        return (
            f"> 2bw: --two-bw-correction auto: factor {found.factor} and gradient {found.gradient:g}"
            + f", --adam-beta1 {args.adam_beta1:g}" * adam
            + f" ({BETA1} bears higher learning rates)" * (adam and args.adam_beta1 < BETA1)
        )
    if args.two_bw_correction == "none" and args.two_bw_sync_iterations == 0:
        return (
            "> 2bw: every gradient is late by one update, which raises the loss. --two-bw-correction auto recovers "
            "most of it (docs/convergence.md)"
        )
    return None
