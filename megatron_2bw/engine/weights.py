"""The weight versions of one stage: contiguous stores, one per dtype and slot, and the
pointers into them.

Invariants (docs/design.md, rules 1 to 4 and [Note: one storage per microbatch]):
- a microbatch's forward and backward are bound to the same storage: an autograd graph
  holds the leaf Parameter or a view of it, and both must see the forward's weights;
- only the slot that `reserve` returns is written, and no version in it has a reader
  left;
- a version change rebinds `param.data`; it never copies.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import Parameter

# elements: matrix kernels want the addresses of whole vectors, and so do Megatron's
# buffers
ALIGNMENT = 64


@dataclass
class Write:
    """The caller of `WeightStores.writing` reports here whether the optimizer
    stepped."""

    stepped: bool = True


class WeightStores:
    """`slots` versions of the trainable parameters of a stage (2 for 2BW: double
    buffering, paper section 3.1).

    params   the trainable parameters of the stage, of any dtypes; each appears once. A
             frozen stage has none
    slots    versions held at most
    buffers  Megatron's contiguous parameter buffers, if it has some (distributed
             optimizer): they are slot 0, and the other slots have their layout, so that
             shards can be gathered into a store

    Slot 0 starts with the present values of the parameters. Bytes: slots x the size of
    the parameters, each padded to ALIGNMENT elements.
    """

    def __init__(
        self,
        params: Iterable[Parameter],
        slots: int,
        buffers: Sequence[Any] | None = None,
    ):
        self.params = list(params)
        self.slots = slots
        self.buffer_data: list[list[Tensor]] = []  # by slot, then by buffer
        # version -> slot; two versions share one after a skipped step
        self._slot_of: dict[int, int] = {0: 0}
        self._bound: int | None = None  # the slot that the parameters point to
        if buffers is not None:
            first = [buffer.param_data for buffer in buffers]
            self.buffer_data.append(first)
            for _ in range(1, slots):
                self.buffer_data.append([torch.zeros_like(data) for data in first])
            self._views = [self._views_of(buffers, data) for data in self.buffer_data]
            self._point_to(0)
        else:
            self._views = [self._allocate(copy=True)]
            # gives the parameters' own storage back before the other slots are taken
            self._point_to(0)
            for _ in range(1, slots):
                self._views.append(self._allocate(copy=False))

    def _views_of(self, buffers: Sequence[Any], data: list[Tensor]) -> list[Tensor]:
        views: dict[Parameter, Tensor] = {}
        for buffer, flat in zip(buffers, data):
            for param, (start, end, _) in buffer.param_index_map.items():
                views[param] = flat[start:end].view(param.shape)
        return [views[param] for param in self.params]

    def _allocate(self, copy: bool) -> list[Tensor]:
        """Views of one flat tensor per dtype, in the order of the parameters; with
        their values if `copy`."""
        starts: list[int] = []
        sizes: dict[torch.dtype, int] = {}
        for param in self.params:
            start = sizes.get(param.dtype, 0)
            padded = math.ceil(param.numel() / ALIGNMENT) * ALIGNMENT
            starts.append(start)
            sizes[param.dtype] = start + padded
        flats: dict[torch.dtype, Tensor] = {}
        for dtype, size in sizes.items():
            flats[dtype] = torch.empty(size, dtype=dtype, device=self.params[0].device)
        views = []
        for param, start in zip(self.params, starts):
            flat = flats[param.dtype][start : start + param.numel()]
            view = flat.view(param.shape)
            if copy:
                view.copy_(param.detach())
            views.append(view)
        return views

    @property
    def newest(self) -> int:
        """The highest finished version."""
        return max(self._slot_of)

    @property
    def versions(self) -> list[int]:
        """The versions held, ascending."""
        return sorted(self._slot_of)

    def start(self, version: int, shadow: Sequence[Tensor] | None = None) -> None:
        """Name the present values W(version), and `shadow` W(version - 1).

        shadow: one tensor a parameter, in their order; None: a run starts with shadow
        := weights.
        """
        slot = self._slot_of[self.newest]
        self._slot_of = {version: slot}
        if version > 0:
            self._slot_of[version - 1] = slot
            if shadow is not None:
                other = 1 if slot == 0 else 0
                for view, tensor in zip(self._views[other], shadow, strict=True):
                    view.copy_(tensor)
                self._slot_of[version - 1] = other
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

    def reserve(self, needed: Iterable[int]) -> int:
        """A free slot for W(newest + 1); `commit` names it so.

        needed: versions that microbatches in flight, or later forwards, still read. The
        newest is kept too if a slot is left for it; if it is not needed and there is
        one slot only, the step writes in place. RuntimeError if no slot is free.
        """
        newest = self.newest
        in_use = {newest, *needed}
        kept: dict[int, int] = {}
        others: set[int] = set()  # slots of versions other than the newest
        for version, slot in self._slot_of.items():
            if version in in_use:
                kept[version] = slot
                if version != newest:
                    others.add(slot)
        free = [slot for slot in range(self.slots) if slot not in kept.values()]
        if not free and newest not in needed and kept[newest] not in others:
            free = [kept[newest]]
        if not free:
            raise RuntimeError(
                f"no free weight store: versions {sorted(in_use)} are all in use"
            )
        self._slot_of = kept
        return free[0]

    def commit(self, target: int, stepped: bool) -> None:
        """Name the content of slot `target` W(newest + 1). After a skipped step W(v+1)
        = W(v), without a copy."""
        newest = self.newest
        current = self._slot_of[newest]
        if stepped and current == target:  # it was written in place
            del self._slot_of[newest]
        self._slot_of[newest + 1] = target if stepped else current

    def values(self, version: int) -> list[Tensor]:
        """W(version), in the order of `params`. KeyError if it is not held."""
        return self._views[self._slot_of[version]]

    def slot(self, version: int) -> int:
        """The slot that holds W(version). KeyError if it is not held."""
        return self._slot_of[version]

    def views(self, slot: int) -> list[Tensor]:
        """The parameters' values in a slot, in the order of `params`."""
        return self._views[slot]

    def prepare(self, target: int) -> None:
        """Copy W(v) in fp32 to where W(v+1) is written: an optimizer without main
        parameters steps it in place."""
        current = self._slot_of[self.newest]
        # the distributed optimizer's shards are main parameters
        if target == current or self.buffer_data:
            return
        views = zip(self.params, self._views[current], self._views[target])
        for param, old, new in views:
            if param.dtype == torch.float32:
                new.copy_(old)

    @contextlib.contextmanager
    def writing(self, needed: Iterable[int]) -> Iterator[Write]:
        """Write W(newest + 1) in this thread: inside, the parameters point to a free
        slot.

        needed: see `reserve`. The caller reports in the yielded `Write` whether the
        optimizer stepped. Afterwards the parameters point to the newest version.
        """
        target = self.reserve(needed)
        self.prepare(target)
        self._point_to(target)
        write = Write()
        # Graphs in flight saved these parameters; autograd counts writes per parameter,
        # not per storage.
        with _unsafe_preserve_version_counter(tuple(self.params)):
            yield write
        self.commit(target, write.stepped)
        self.bind_newest()
