"""The weight versions of one stage: contiguous stores, one per dtype and slot, and the pointers into them.

Invariants (a graph in flight may hold the leaf Parameter or a view taken in its forward, so both must see one storage):
- a microbatch's forward and backward are bound to the same storage;
- a store is written only by `writing`, and only when no version that somebody still reads lives in it;
- a version change rebinds `param.data`; it never copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch.autograd import _unsafe_preserve_version_counter


ALIGNMENT = 64  # elements: matrix kernels want the addresses of whole vectors, and so do Megatron's buffers


class WeightStores:
    """`slots` versions of the trainable parameters of a stage (2 for 2BW: double buffering, paper section 3.1).

    params  the trainable parameters of the stage, of any dtypes; each appears once
    slots   versions held at most

    Slot 0 takes over the values that the parameters have now. Bytes: slots x the size of the parameters, each
    padded to ALIGNMENT elements.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], slots: int):
        self.params = list(params)
        self.slots = slots
        self._slot_of: dict[int, int] = {0: 0}  # version -> slot; two versions share one after a skipped step
        self._bound: int | None = None  # the slot that the parameters point to
        self._views = [self._allocate(copy=True)]
        self._point_to(0)  # gives the parameters' own storage back before the other slots are taken
        self._views += [self._allocate(copy=False) for _ in range(1, slots)]

    def _allocate(self, copy: bool) -> list[torch.Tensor]:
        """Views of one flat tensor per dtype, in the order of the parameters, with their values if `copy`."""
        starts: list[int] = []
        sizes: dict[torch.dtype, int] = {}
        for param in self.params:
            starts.append(sizes.get(param.dtype, 0))
            sizes[param.dtype] = starts[-1] + -(-param.numel() // ALIGNMENT) * ALIGNMENT
        device = self.params[0].device
        flats = {dtype: torch.empty(numel, dtype=dtype, device=device) for dtype, numel in sizes.items()}
        views = []
        for param, start in zip(self.params, starts):
            views.append(flats[param.dtype][start : start + param.numel()].view(param.shape))
            if copy:
                views[-1].copy_(param.detach())
        return views

    @property
    def newest(self) -> int:
        """The highest finished version."""
        return max(self._slot_of)

    @property
    def versions(self) -> list[int]:
        """The versions held, ascending."""
        return sorted(self._slot_of)

    def start(self, version: int) -> None:
        """Call the present values W(version), and W(version - 1) too: a run starts with shadow := weights."""
        slot = self._slot_of[self.newest]
        self._slot_of = {version: slot}
        if version > 0:
            self._slot_of[version - 1] = slot
        self._point_to(slot)

    def bind(self, version: int) -> None:
        """Point the parameters to W(version). KeyError if it is not held."""
        self._point_to(self._slot_of[version])

    def bind_newest(self) -> None:
        self.bind(self.newest)

    def _point_to(self, slot: int) -> None:
        if slot != self._bound:
            for param, view in zip(self.params, self._views[slot]):
                param.data = view
            self._bound = slot

    @contextlib.contextmanager
    def writing(self, needed: Iterable[int]) -> Iterator[Write]:
        """Make W(newest + 1) in a free slot: the parameters point there while the optimizer steps.

        needed: versions that microbatches in flight, or forwards to come, still read. The newest is kept too if
        a slot is left for it; if nobody needs it and there is one slot only, the step writes in place.
        The yielded `Write` tells whether the optimizer did step (a skipped step makes W(v+1) = W(v), without
        a copy). Afterwards the parameters point to the newest version. RuntimeError if no slot is free.
        """
        newest = self.newest
        kept = {version: slot for version, slot in self._slot_of.items() if version in {newest, *needed}}
        current = kept[newest]
        target = next((slot for slot in range(self.slots) if slot not in kept.values()), None)
        if target is None and newest not in needed and current not in [kept[version] for version in needed]:
            target = kept.pop(newest)
        if target is None:
            raise RuntimeError(f"no free weight store: versions {sorted(kept)} are all in use")
        if target != current:
            self._copy_in_place_parameters(current, target)
        self._point_to(target)
        write = Write()
        # Graphs in flight saved these parameters; autograd counts writes per parameter, not per storage.
        with _unsafe_preserve_version_counter(tuple(self.params)):
            yield write
        kept[newest + 1] = target if write.stepped else current
        self._slot_of = kept
        self.bind_newest()

    def _copy_in_place_parameters(self, source: int, target: int) -> None:
        """An optimizer without main parameters steps in place: it must find W(v) where it writes W(v+1)."""
        for param, old, new in zip(self.params, self._views[source], self._views[target]):
            if param.dtype == torch.float32:
                new.copy_(old)


class Write:
    """Filled in by whoever steps the optimizer inside `WeightStores.writing`."""

    stepped = True
