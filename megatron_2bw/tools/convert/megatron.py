"""Megatron's side: a model without data, and its parameters one at a time in a
torch_dist checkpoint.

Invariants:
- Megatron's own `sharded_state_dict` says under which key and at which place each
  parameter is;
- a checkpoint's tracker is written last: a conversion that was killed has left nothing
  that a run would load.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
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
from megatron_2bw.mcore import cpu, rebinding
from megatron_2bw.mcore.checkpoints.folder import TRACKER, latest_iteration, problem
from megatron_2bw.mcore.checkpoints.unpickle import causes
from megatron_2bw.run.flags.rehearsal import OFF, ON_CPU, QUANTISED

RELEASE = "release"  # Megatron's name for a checkpoint of weights alone
_WHOLE = ON_CPU | dict(
    perform_initialization=False, use_distributed_optimizer=False, config_logger_dir=""
)
# Of the fields moe_*, those on which outputs depend.
_ROUTING = """layer_freq ffn_hidden_size shared_expert_intermediate_size shared_expert_gate router_topk latent_size
router_num_groups router_group_topk router_pre_softmax router_topk_scaling_factor router_score_function
router_enable_expert_bias apply_probs_on_input expert_capacity_factor"""
# Fields of Megatron's configuration on which no output depends: kernels, memory,
# precision, initial weights, training.
_FREE = """
*fus* *recompute* *offload* *cuda_graph* fp[48]* *bf16* *fp16* *fp32* attention_backend flash_* *init* cp_comm_type
batch_invariant_mode symmetric_ar_type nccl_* distribute_* high_* clone_* use_te_* mlp_chunks_* log_* calculate_*
*dropout qk_clip* apply_query_* make_* inference_* use_grouped_* transformer test_mode moe_* mtp_loss*
""".split()
_RUN = (
    "--micro-batch-size 1 --train-iters 1 --lr 1e-5 --eval-iters 0 --mock-data "
    "--device cpu"
).split()


def arguments(flags: list[str], task: str) -> argparse.Namespace:
    """Megatron's checked arguments for a model's flags. UserError with the line that a
    run would end with."""
    from megatron_2bw.run.flags import parse

    def stop(line: str) -> NoReturn:
        raise UserError(line)

    argv, sys.argv = sys.argv, [sys.argv[0], *flags, *_RUN]
    try:
        with silence():
            from megatron.training.global_vars import unset_global_variables

            unset_global_variables()
            return parse.parse(parse.parse_early(sys.argv[1:], stop, task), stop)
    finally:
        sys.argv = argv


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Without Megatron's list of arguments and its warnings about a host without a
    GPU."""
    logging.disable(logging.ERROR)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    finally:
        logging.disable(logging.NOTSET)


def of_one_rank(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments of the same model on one rank of the CPU, in fp32: each argument of
    the pipeline, each field of Megatron's ModelParallelConfig (sizes, overlap,
    precision), and what needs a GPU, has its default."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer import TransformerConfig

    defaults = {
        field.name: field.default for field in dataclasses.fields(TransformerConfig)
    }
    names = {
        *OFF,
        *QUANTISED,
        *(field.name for field in dataclasses.fields(ModelParallelConfig)),
    }
    names |= {name for name in vars(args) if "pipeline" in name}
    # Megatron's fused GeLU has the tanh form
    tanh = args.openai_gelu or args.bias_gelu_fusion
    plain = args.swiglu or args.squared_relu or args.quick_geglu
    one = (
        vars(args)
        | {name: defaults.get(name) for name in (*names, "lora_rank")}
        | _WHOLE
    )
    return argparse.Namespace(**one | {"openai_gelu": tanh and not plain})


def _function(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of Megatron's configuration that decide what the model computes, or
    why there is none."""
    from megatron_2bw.run.tasks import gpt

    try:
        config = gpt.model_config(of_one_rank(args))
    except (AssertionError, ValueError) as error:
        return {"error": str(error)}
    found = (
        vars(config)
        | vars(config.transformer)
        | dict(task=args.task, bert_binary_head=args.bert_binary_head)
    )
    routing = {f"moe_{name}" for name in _ROUTING.split()}
    free = {
        name for name in found if any(fnmatchcase(name, each) for each in _FREE)
    } - routing
    return {name: value for name, value in found.items() if name not in free}


def unlike(saved: argparse.Namespace, other: argparse.Namespace) -> str:
    """The flags by which the models of two runs' arguments compute something else; ""
    if there are none."""
    from megatron.training.arguments import add_megatron_arguments

    def changes(name: str) -> bool:
        value = getattr(saved, name, None)
        alone = argparse.Namespace(**vars(other) | {name: value})
        return value != getattr(other, name, None) and _function(alone) != expected

    with silence():
        expected = _function(other)
        if _function(saved) == expected:
            return ""
        actions = add_megatron_arguments(
            argparse.ArgumentParser(allow_abbrev=False)
        )._actions
        return (
            ", ".join(
                action.option_strings[0] for action in actions if changes(action.dest)
            )
            or "the arguments"
        )


@contextlib.contextmanager
def whole_model(
    args: argparse.Namespace, device: str
) -> Iterator[tuple[torch.nn.Module, dict[str, Any]]]:
    """The model of one stage on `device`, its weights not yet read, and the entries of
    its sharded state dict by name, those of adapters too; in a world of one process."""
    with silence():
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from megatron.training.checkpointing import _build_sharded_state_dict_metadata
        from megatron.training.global_vars import set_args, unset_global_variables
        from megatron.training.models.gpt import GPTModelBuilder

        from megatron_2bw.run.tasks import bert, gpt, lora

        one = of_one_rank(args)
        unset_global_variables()
        set_args(one)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1, 1)
        groups = ProcessGroupCollection.use_mpu_process_groups()
    try:
        with silence(), torch.device(device):
            if device != "meta":  # the layers ask for the generators of their dropout
                model_parallel_cuda_manual_seed(one.seed)
            if one.task == "bert":
                model = bert.model_provider(pg_collection=groups)
            else:
                model = GPTModelBuilder(gpt.model_config(one)).build_model(
                    groups, True, True
                )
            state = model.sharded_state_dict(
                metadata=_build_sharded_state_dict_metadata(one)
            )
            if args.lora_rank:
                lora.adapt(model, args)
                state |= model.sharded_state_dict(
                    metadata=_build_sharded_state_dict_metadata(one)
                )
        yield model, state
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _pieces(
    entry: Any, data: torch.Tensor
) -> Iterator[tuple[MetadataIndex, ChunkStorageMetadata, Any, slice]]:
    """The pieces of a parameter in the checkpoint: key and place, sizes there, the
    whole's sizes, and their rows."""
    build = getattr(entry, "build_fn", None)  # of SwiGLU's two halves
    pieces = (
        build(entry.key, data, entry.replica_id, entry.flattened_range)
        if build
        else [entry]
    )
    start = 0
    for piece in pieces:
        rows = slice(start, start + piece.local_shape[0])
        start = rows.stop
        offset, sizes = (
            torch.Size(piece.global_offset),
            (1,) * piece.prepend_axis_num + tuple(piece.local_shape),
        )
        chunk = ChunkStorageMetadata(offset, torch.Size(sizes))
        yield MetadataIndex(piece.key, offset), chunk, piece.global_shape, rows


class _Planner(dcp.DefaultSavePlanner):
    """A plan whose tensors are made when they are written, in its order: the memory of
    one parameter is held."""

    def __init__(self, items: list[tuple[WriteItem, Callable[[], Any]]]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._items = [item for item, _ in items]
        self._made = {item.index: make for item, make in items}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(items=self._items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._made[write_item.index]()


def write(
    folder: Path,
    args: argparse.Namespace,
    entries: dict[str, Any],
    dtypes: dict[str, torch.dtype],
    make: Callable,
) -> None:
    """A checkpoint of weights alone, which Megatron loads at any parallel sizes, in
    `folder`, with the tracker.

    dtypes, make: of each parameter; `make` gives its tensor, and is called once for
    each, in the order of `dtypes`
    """
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    items: list[tuple[WriteItem, Callable[[], Any]]] = []
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
    objects = [entry for name, entry in entries.items() if name not in dtypes]
    for entry in [*objects, ShardedObject("common_state", common, (1,), (0,))]:
        item = WriteItem(MetadataIndex(entry.unique_key), WriteItemType.BYTE_IO)
        items.append((item, lambda content=entry.data: _bytes_of(content)))
    made: dict[str, torch.Tensor] = {}

    def whole(name: str) -> torch.Tensor:
        if name not in made:
            # one parameter at a time: its pieces are asked for one after the other
            made.clear()
            made[name] = make(name)
        return made[name]

    for name, dtype in dtypes.items():
        data = torch.empty(entries[name].data.shape, dtype=dtype, device="meta")
        for index, chunk, size, rows in _pieces(entries[name], data):
            described = TensorWriteData(
                chunk, TensorProperties(dtype=dtype), torch.Size(size)
            )
            item = WriteItem(index, WriteItemType.SHARD, tensor_data=described)
            items.append(
                (
                    item,
                    lambda name=name, rows=rows, sizes=chunk.sizes: whole(name)[
                        rows
                    ].reshape(sizes),
                )
            )
    target = folder / RELEASE
    shutil.rmtree(target, ignore_errors=True)  # of a conversion that was killed
    target.mkdir(parents=True)
    with silence():
        try:
            dcp.save(
                {},
                storage_writer=dcp.FileSystemWriter(target),
                planner=_Planner(items),
                no_dist=True,
            )
        # torch's collection of the ranks' errors
        except dcp.CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            if not isinstance(cause, RuntimeError) or isinstance(cause, UserError):
                raise cause from None
            # a full disk
            raise UserError(
                f"--save {folder}: the checkpoint could not be written ({cause})"
            ) from cause
        save_config(CheckpointingConfig("torch_dist", 1), str(target))
    write_whole(folder / TRACKER, RELEASE, sync=True)


def _bytes_of(content: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save([content], file)
    file.seek(0)
    return file


def find(folder: Path, iteration: int | None) -> Path:
    """The checkpoint of an iteration, or the latest; `folder` may be a checkpoint
    itself. Raises UserError."""
    if (folder / "metadata.json").is_file():
        folder, name = folder.parent, folder.name
        iteration = (
            int(name.removeprefix("iter_")) if name.startswith("iter_") else None
        )
    elif not (folder / TRACKER).is_file():
        raise UserError(
            f"{folder}: it is no folder of Megatron's checkpoints (there is no {TRACKER})"
        )
    if fault := problem(folder, iteration):
        raise UserError(f"{folder}: {fault}")
    number = iteration or latest_iteration(folder)
    found = folder / (RELEASE if number is None else f"iter_{number:07d}")
    if not (found / "metadata.json").is_file():
        raise UserError(
            f"{found}: only checkpoints of --ckpt-format torch_dist can be exported: save it as one"
        )
    return found


def saved_arguments(checkpoint: Path, trust: bool = False) -> argparse.Namespace:
    """Of the checkpoint's run. No code of whoever wrote it runs.

    trust: of the command line, whether a tokenizer's code may run
    """
    with silence():
        from megatron.core.dist_checkpointing.serialization import (
            load_common_state_dict,
        )

        from megatron_2bw.mcore import patches

        rebinding.apply(patches.for_reading())
        try:
            args = load_common_state_dict(checkpoint).get("args")
        except (dcp.CheckpointException, UnpicklingError) as error:
            raise UserError(f"{checkpoint}: {causes(error).splitlines()[0]}") from None
    if args is None:
        raise UserError(
            f"{checkpoint}: it holds no arguments, from which the model would be known"
        )
    # the local layers, which are built here, drop it
    norm = args.qk_l2_norm and args.transformer_impl != "local"
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if norm or pattern or args.spec not in (None, ["local"]):
        flag = (
            "--qk-l2-norm"
            if norm
            else "--hybrid-layer-pattern"
            if pattern
            else "--spec"
        )
        raise UserError(f"{checkpoint}: {flag}: its layers are not built here")
    older = {"task": "gpt", "lora_rank": None}  # a checkpoint's without them
    return argparse.Namespace(
        **older | vars(args) | {"spec": None, "trust_remote_code": trust}
    )


class _Read(dcp.DefaultLoadPlanner):
    """A plan that fills views of one tensor."""

    def __init__(
        self, views: dict[MetadataIndex, tuple[ChunkStorageMetadata, torch.Tensor]]
    ):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._views = views

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        held, items = self.metadata.state_dict_metadata, []
        for index, (chunk, _) in self._views.items():
            items += create_read_items_for_chunk_list(
                index.fqn, held[index.fqn], [chunk]
            )
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)
        return narrow_tensor_by_index(
            self._views[index][1], read_item.dest_offsets, read_item.lengths
        )


class Checkpoint:
    """Reads whole parameters, saved at any parallel sizes; those of --lora-base too, if
    it is of adapters."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        from megatron.core.dist_checkpointing.strategies import (
            cached_metadata_filesystem_reader as cached,
        )

        self._folder, self._held, self._readers = folder, {}, {}
        for part in [
            folder,
            *([find(Path(args.lora_base), None)] if args.lora_rank else []),
        ]:
            reader = cached.CachedMetadataFileSystemReader(part)
            found = reader.read_metadata().state_dict_metadata
            self._held = found | self._held
            self._readers = dict.fromkeys(found, reader) | self._readers

    def dtypes(
        self, entries: dict[str, Any], names: Iterable[str]
    ) -> dict[str, torch.dtype]:
        """Of the parameters by name. UserError unless the checkpoint holds just their
        elements."""
        wanted: Counter[str] = Counter()
        for name in names:
            for index, chunk, _, _ in _pieces(
                entries[name], torch.empty(entries[name].data.shape, device="meta")
            ):
                wanted[index.fqn] += chunk.sizes.numel()
        for key, count in wanted.items():
            held = self._held[key].size.numel() if key in self._held else 0
            if held != count:
                raise UserError(
                    f"{self._folder}: it holds {held:,} of the {count:,} elements "
                    f"that {key} should have"
                )
        return {name: self._held[entries[name].key].properties.dtype for name in names}

    def read(self, entry: Any) -> torch.Tensor:
        whole = torch.empty(
            entry.data.shape, dtype=self._held[entry.key].properties.dtype
        )
        views = {
            index: (chunk, whole[rows].view(chunk.sizes))
            for index, chunk, _, rows in _pieces(entry, whole)
        }
        with silence():
            dcp.load(
                {},
                storage_reader=self._readers[entry.key],
                planner=_Read(views),
                no_dist=True,
            )
        return whole


def read_into(
    model: torch.nn.Module, entries: dict[str, Any], checkpoint: Checkpoint
) -> None:
    """Fill the parameters of `whole_model` from the checkpoint, in the types that they
    have."""
    checkpoint.dtypes(entries, [name for name, _ in model.named_parameters()])
    for name, parameter in model.named_parameters():
        parameter.data.copy_(checkpoint.read(entries[name]))


def use_cpu() -> None:
    """Before Megatron is imported: on a host with or without a GPU this process uses
    none."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    cpu.install()
    with silence():
        from megatron_2bw.mcore import patches

        rebinding.apply(patches.for_cpu())
