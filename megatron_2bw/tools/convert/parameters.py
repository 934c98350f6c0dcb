"""Megatron's parameters, written to and read from a torch_dist checkpoint one at a
time.

Invariants:
- Megatron's own `sharded_state_dict` says under which key and at which place each
  parameter is;
- a checkpoint's tracker is written last: a conversion that was killed has left nothing
  that a run would load.
"""

import functools
import shutil
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import (
    create_read_items_for_chunk_list,
)

from megatron_2bw.base.errors import UserError
from megatron_2bw.base.files import write_whole
from megatron_2bw.mcore.checkpoints.folder import TRACKER
from megatron_2bw.tools.convert.megatron import RELEASE, find, silence

Dtypes = dict[str, torch.dtype]
Entries = dict[str, Any]  # of a sharded state dict, by the name of the parameter


class _Piece(NamedTuple):
    """A piece of a parameter in the checkpoint.

    index, chunk: its key, place and sizes there. total: the sizes of the tensor of that
    key. rows: those of the parameter.
    """

    index: MetadataIndex
    chunk: ChunkStorageMetadata
    total: tuple[int, ...]
    rows: slice

    def view(self, whole: Tensor) -> Tensor:
        return whole[self.rows].view(self.chunk.sizes)


def _pieces(entry: Any) -> Iterator[_Piece]:
    pieces = [entry]
    if hasattr(entry, "build_fn"):  # of SwiGLU's two halves
        pieces = entry.build_fn(
            entry.key, entry.data, entry.replica_id, entry.flattened_range
        )
    start = 0
    for piece in pieces:
        end = start + piece.local_shape[0]
        offset = torch.Size(piece.global_offset)
        sizes = torch.Size((1,) * piece.prepend_axis_num + tuple(piece.local_shape))
        chunk = ChunkStorageMetadata(offset, sizes)
        index = MetadataIndex(piece.key, offset)
        yield _Piece(index, chunk, piece.global_shape, slice(start, end))
        start = end


class _SavePlanner(dcp.DefaultSavePlanner):
    """A plan whose tensors are made when they are written, in its order."""

    def __init__(self):
        super().__init__(flatten_state_dict=False)
        self.plan = SavePlan([])
        self._objects = {}
        self._pieces = {}

    def add_object(self, key: str, content: Any) -> None:
        item = WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
        self.plan.items.append(item)
        self._objects[item.index] = [content]

    def add_parameter(self, entry: Any, dtype: torch.dtype, make: Callable) -> None:
        for piece in _pieces(entry):
            total = torch.Size(piece.total)
            described = TensorWriteData(piece.chunk, TensorProperties(dtype), total)
            item = WriteItem(piece.index, WriteItemType.SHARD, tensor_data=described)
            self.plan.items.append(item)
            self._pieces[item.index] = make, piece

    def create_local_plan(self) -> SavePlan:
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index in self._objects:
            return self._objects[index]
        make, piece = self._pieces[index]
        return piece.view(make())


def write(
    folder: Path,
    args: Namespace,
    entries: Entries,
    dtypes: Dtypes,
    make: Callable[[str], Tensor],
) -> None:
    """A checkpoint of weights alone, which Megatron loads at any parallel sizes, in
    `folder`, with the tracker.

    dtypes, make: of each parameter; `make` gives its tensor, and is called once for
    each, in the order of `dtypes`
    """
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    planner = _SavePlanner()
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
    state = ShardedObject("common_state", common, (1,), (0,))
    for name, entry in [*entries.items(), ("common_state", state)]:
        if name not in dtypes:
            planner.add_object(entry.unique_key, entry.data)
    # The pieces of a parameter are asked for one after the other; one parameter at a
    # time is held.
    make = functools.lru_cache(maxsize=1)(make)
    for name, dtype in dtypes.items():
        planner.add_parameter(entries[name], dtype, functools.partial(make, name))
    target = folder / RELEASE
    shutil.rmtree(target, ignore_errors=True)  # of a conversion that was killed
    target.mkdir(parents=True)
    with silence():
        try:
            writer = dcp.FileSystemWriter(target)
            dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
        # torch's collection of the ranks' errors
        except dcp.CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            if isinstance(cause, UserError):
                raise cause from None
            raise UserError(
                f"--save {folder}: the checkpoint could not be written ({cause})"
            ) from cause
        save_config(CheckpointingConfig("torch_dist", 1), str(target))
    write_whole(folder / TRACKER, RELEASE, sync=True)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """A plan that fills views of one tensor."""

    def __init__(self, whole: Tensor, pieces: Iterable[_Piece]):
        super().__init__()
        self._whole = whole
        self._pieces = {piece.index: piece for piece in pieces}

    def create_local_plan(self) -> LoadPlan:
        items = []
        for index, piece in self._pieces.items():
            held = self.metadata.state_dict_metadata[index.fqn]
            items += create_read_items_for_chunk_list(index.fqn, held, [piece.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index].view(self._whole)


class Checkpoint:
    """Reads whole parameters, saved at any parallel sizes; those of --lora-base too, if
    it is of adapters."""

    def __init__(self, folder: Path, args: Namespace):
        from megatron.core.dist_checkpointing.strategies import (
            cached_metadata_filesystem_reader as cached,
        )

        self._folder = folder
        self._held = {}
        self._readers = {}
        folders = [folder]
        if args.lora_rank:
            folders.insert(0, find(Path(args.lora_base), None))
        for part in folders:  # the adapters' has the last word
            reader = cached.CachedMetadataFileSystemReader(part)
            held = reader.read_metadata().state_dict_metadata
            self._held |= held
            self._readers |= dict.fromkeys(held, reader)

    def dtypes(self, entries: Entries, names: Iterable[str]) -> Dtypes:
        """The type of each parameter. UserError unless the checkpoint holds just the
        elements of these."""
        wanted = Counter()
        for name in names:
            for piece in _pieces(entries[name]):
                wanted[piece.index.fqn] += piece.chunk.sizes.numel()
        for key, count in wanted.items():
            held = self._held[key].size.numel() if key in self._held else 0
            if held != count:
                raise UserError(
                    f"{self._folder}: it holds {held:,} of the {count:,} elements "
                    f"that {key} should have"
                )
        return {name: self._dtype(entries[name]) for name in names}

    def _dtype(self, entry: Any) -> torch.dtype:
        return self._held[entry.key].properties.dtype

    def read(self, entry: Any) -> Tensor:
        whole = torch.empty(entry.data.shape, dtype=self._dtype(entry))
        planner = _LoadPlanner(whole, _pieces(entry))
        reader = self._readers[entry.key]
        with silence():
            dcp.load({}, storage_reader=reader, planner=planner, no_dist=True)
        return whole


def read_into(model: torch.nn.Module, entries: Entries, checkpoint: Checkpoint) -> None:
    """Fill the parameters of `whole_model` from the checkpoint, in the types that they
    have."""
    parameters = dict(model.named_parameters())
    checkpoint.dtypes(entries, parameters)
    for name, parameter in parameters.items():
        parameter.data.copy_(checkpoint.read(entries[name]))
