"""--two-bw-correction: the working copy of the newest weights, on which a batch of 2bw computes.

With 2BW the gradient of batch j + 1 changes W(j+1) and is taken one update earlier. With a correction it is taken at
the working copy

    W'(j) = W(j) + factor (W(j) - W(j-1)) + gradient D(j),

where D(j) is the last gradient's part of the update W(j) - W(j-1). For Adam D(j) is -(1 - beta1) rate g / (sqrt(v) +
eps), without the 1 / (1 - beta1^t) of the first iterations. The first term is the error feedback of arXiv 2606.30634;
the second damps the directions of high curvature, in which the delay oscillates (docs/convergence.md).

Invariant: without torch, as all flags; the values in `args` are strings and numbers, which Megatron saves.
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass, replace

from megatron_2bw.flags.rule import Args

SHAPES = {"linear": lambda share: 1 - share, "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2}
# Optimizers whose update is a running mean of gradients, and the decay of that mean.
DECAYS = {"adam": "adam_beta1", "sgd": "sgd_momentum", "muon": "muon_momentum", "soap": "adam_beta1"}
BETA1 = 0.95  # Adam's with `auto`, if --adam-beta1 is not given: with a delay it bears higher rates than 0.9
LEAST_MOMENTUM = 0.8  # below it `auto` adds the best factor of a gradient of pure noise, the momentum


@dataclass(frozen=True)
class Correction:
    """What a working copy adds to W: `factor` x the last update, `gradient` x its last gradient's part.

    last  the factor at the end of the run, if it changes over the run, by the function `shape` of SHAPES
    """

    factor: float = 0.0
    gradient: float = 0.0
    shape: str = "linear"
    last: float | None = None

    def at(self, share: float) -> Correction:
        """The correction after this share of the run's iterations, 0 to 1."""
        if self.last is None:
            return self
        return Correction(self.last + (self.factor - self.last) * SHAPES[self.shape](share), self.gradient)

    def __str__(self) -> str:
        course = "" if self.last is None else f":{self.shape}:{self.last:g}"
        return f"{self.factor:g}{course}" + (f" and gradient {self.gradient:g}" if self.gradient else "")


def parse(text: str) -> Correction:
    """The correction of a text: FACTOR or FIRST:SHAPE:LAST, then " and gradient TIMES" or nothing.

    Raises ArgumentTypeError. For a correction that `str` has written, it returns the same.
    """
    number = r"([\d.][\d.e-]*)"
    found = re.fullmatch(rf"{number}(?::({'|'.join(SHAPES)}):{number})?(?: and gradient {number})?", text)
    if found is None or not all(float(factor or 0) <= 2 for factor in found.group(1, 3)):
        raise argparse.ArgumentTypeError(f"{text}: must be a number from 0 to 2, or a schedule such as 1.5:cosine:0.9")
    first, shape, last, gradient = found.groups()
    return Correction(float(first), float(gradient or 0), shape or "linear", last and float(last))


def factor(text: str) -> str:
    """The value of --two-bw-correction-factor, checked: arguments are saved with a checkpoint, so it stays text."""
    parse(text)
    return text


def correction(args: Args) -> Correction | None:
    """What --two-bw-correction asks for; None without a correction."""
    if args.two_bw_correction == "none":
        return None
    if args.two_bw_correction == "auto":
        return recommended(args)
    return replace(parse(args.two_bw_correction_factor), gradient=args.two_bw_correction_gradient)


def recommended(args: Args) -> Correction:
    """The setting of `auto` (docs/convergence.md)."""
    decay = getattr(args, DECAYS.get(args.optimizer, ""), LEAST_MOMENTUM)
    if decay < LEAST_MOMENTUM:
        return Correction(decay)
    unknown = args.optimizer == "muon" and args.muon_scalar_optimizer == "lion"  # no optimizer has a gradient's part
    return Correction(1.5, 0.0 if unknown else 2.0)


def note(found: Correction | None, args: Args) -> str | None:
    """A line on the correction of a run of 2bw: what `auto` stands for, or that there is none. None: nothing to say."""
    if args.pipeline_schedule != "2bw":
        return None
    if found is not None and args.two_bw_correction == "auto":
        line = f"> 2bw: --two-bw-correction auto: like Nesterov's momentum, gradients {found.factor:g} updates ahead"
        line += f", and {found.gradient:g} x the last gradient's part of an update" * (found.gradient > 0)
        low = f" ({BETA1} bears higher learning rates)" * (args.adam_beta1 < BETA1)
        return line + f"; --adam-beta1 {args.adam_beta1:g}{low}" * (args.optimizer == "adam")
    if found is None and args.two_bw_sync_iterations == 0:
        return (
            "> 2bw: every gradient is late by one update, which raises the loss. --two-bw-correction auto recovers "
            f"most of it: it takes gradients ahead, as Nesterov's momentum does, with --adam-beta1 {BETA1}"
        )
    return None
