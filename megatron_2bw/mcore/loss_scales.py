"""One loss scale per batch: a batch's gradients are unscaled with the scale of its
losses (docs/design.md, rule 7)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_2bw.engine.updates import PerBatch


class LossScales(PerBatch):
    """The loss scales by the weight version on which a batch runs.

    A batch is scaled as the step left it that made its weights: the newest that is
    surely complete on every stage.

    parts  Megatron's optimizers of the stage
    first  the first batch
    saved  the loss scale of the first batch, if it is not the scaler's present one
    """

    def __init__(self, parts: Sequence[Any], first: int, saved: float | None = None):
        self._parts = parts
        scalers = [getattr(part, "grad_scaler", None) for part in parts]
        # Each scaler's first scale is memory of the training stream. The step's thread
        # replaces it, right after it has launched the kernel that reads it: the
        # training thread must not get its memory.
        self._first = [getattr(scaler, "scale", None) for scaler in scalers]
        scale = self.now()
        shadow = scale if saved is None else torch.full_like(scale, saved)
        self._by_version = {first - 1: shadow, first: scale}
        self.current = scale  # of the batch whose backwards run
        self.logged = float(scale)  # after the last completed step

    def now(self) -> torch.Tensor:
        """A copy of the scaler's present scale."""
        part = self._parts[0]
        return type(part).get_loss_scale(part).clone()

    def begin_batch(self, batch: int, version: int) -> None:
        for older in [other for other in self._by_version if other < version]:
            del self._by_version[older]
        self.current = self._by_version[version]

    def end_batch(self, batch: int) -> torch.Tensor:
        return self.current

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss of the batch that `begin_batch` was last called for, times its
        scale."""
        # a host's optimizer keeps it on the host
        return self.current.to(loss.device, non_blocking=True) * loss

    def of(self, version: int) -> float:
        """The loss scale of a batch that runs on W(version), the newest or the one
        before. No step may be pending."""
        return float(self._by_version[version])

    def complete(self, batch: int, result: Any) -> None:
        """result: its `scale` is the scaler's after the step, as a tensor."""
        self._by_version[batch + 1] = result.scale
        self.logged = result.loss_scale

    @contextlib.contextmanager
    def unscaling_by(self, scale: torch.Tensor) -> Iterator[None]:
        """Inside, Megatron's optimizers unscale by `scale`, whatever their scaler's
        present one is."""
        scalers = [getattr(part, "grad_scaler", None) for part in self._parts]
        for part, scaler in zip(self._parts, scalers):
            if scaler is not None:
                part.grad_scaler = _BatchScaler(scaler, scale)
        try:
            yield
        finally:
            for part, scaler in zip(self._parts, scalers):
                if scaler is not None:
                    part.grad_scaler = scaler


class _BatchScaler:
    """A gradient scaler of Megatron that unscales by one batch's scale; `update` is the
    scaler's own."""

    def __init__(self, scaler: Any, scale: torch.Tensor):
        self.scale = scale
        self.update = scaler.update

    @property
    def inv_scale(self) -> torch.Tensor:
        return self.scale.double().reciprocal().float()
