"""Replacements for functions of Megatron and torch that have faults (docs/upstream.md).

Their first argument is the original; that of a method has the object, `self`, as its
second.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import queue
from collections.abc import Callable
from multiprocessing.managers import SyncManager
from typing import Any

import torch

from megatron_2bw.base.processes import end_with_parent
from megatron_2bw.mcore.checkpoints import folder, unpickle
from megatron_2bw.mcore.rebinding import around


@around
def skip_when_compiled(compile_helpers: Callable) -> None:
    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError:
        compile_helpers()


# Flags that make another model of the same weights, or without which there is none:
# those that --use-checkpoint-args of Megatron 0.19 leaves at their defaults, and those
# that it leaves out where none was typed.
_OF_THE_MODEL = """
    layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm openai_gelu quick_geglu glu_linear_offset
    activation_func_clamp_value apply_residual_connection_post_layernorm attention_output_gate softmax_type
    use_rope_scaling rope_scaling_factor rotary_seq_len_interpolation_factor no_rope_freq window_size
    window_attn_skip_freq use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult
    mup_base_head_dim mup_attn_scale_power bert_binary_head
""".split()
_OF_THE_TOKENIZER = ("vocab_size", "vocab_file", "merge_file")


@around
def whole_model(load_args: Callable, args: Any, *more: Any, **options: Any) -> Any:
    found = load_args(args, *more, **options)
    if isinstance(found, tuple):
        saved = found[1]
        new = {
            name: getattr(saved, name) for name in _OF_THE_MODEL if hasattr(saved, name)
        }
        new |= {
            name: getattr(saved, name, None)
            for name in _OF_THE_TOKENIZER
            if getattr(args, name) is None
        }
        vars(args).update(new)
    return found


def wait_once(norm: Callable) -> Callable:
    """Megatron's own norm of gradients has the same bits. Apex's and Transformer
    Engine's stay."""

    def of_all(
        size: int, overflow: Any, lists: list[list[torch.Tensor]], *more: Any
    ) -> tuple[torch.Tensor, None]:
        norms = torch.stack(
            [torch.norm(tensor) for tensors in lists for tensor in tensors]
        ).cpu()
        return torch.norm(norms).reshape(1).to(
            lists[0][0].device, torch.float, non_blocking=True
        ), None

    return (
        of_all
        if getattr(norm, "__name__", "") == "local_multi_tensor_l2_norm"
        else norm
    )


@around
def set_without_step(
    set_states: Callable, self: Any, model_param: Any, tensors: dict[str, Any]
) -> None:
    with torch.no_grad():
        set_states(self, model_param, {**tensors, "step": None})


@around
def switch_once(switch: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    disables = switch.__name__ == "disable_forward_pre_hook"
    if bool(self.remove_forward_pre_hook_handles) == disables:
        switch(self, *args, **kwargs)


@around
def places_without_padding(
    sharded_param_state: Callable, self: Any, *args: Any, **kwargs: Any
) -> Any:
    padded = [buffer.param_index_map for buffer in self.buffers]
    try:
        for buffer in self.buffers:
            buffer.param_index_map = _unpadded(buffer)
        return sharded_param_state(self, *args, **kwargs)
    finally:
        for buffer, places in zip(self.buffers, padded):
            buffer.param_index_map = places


def _unpadded(buffer) -> dict:
    """Each parameter's start, end and bucket in the buckets' contents, which follow
    each other without padding."""
    starts = [
        0,
        *itertools.accumulate(bucket.numel_unpadded for bucket in buffer.buckets),
    ]
    own = {
        param: place
        for bucket in buffer.buckets
        for param, place in bucket.param_to_index.items()
    }
    return {
        param: (starts[number] + own[param][0], starts[number] + own[param][1], number)
        for param, (_, _, number) in buffer.param_index_map.items()
    }


@around
def skip_empty_validation(build_loaders: Callable, provider: Callable) -> tuple:
    """No rank evaluates where the first one has no validation data; middle stages never
    have any."""
    from megatron.training import get_args, print_rank_0

    (train, valid, test), args = build_loaders(provider), get_args()
    there = torch.tensor(
        [valid is not None and valid[0] is not None], dtype=torch.uint8, device="cuda"
    )
    torch.distributed.broadcast(there, 0)
    if args.do_valid and not there:
        args.do_valid, valid = False, None
        given = f"--split {args.split}" if args.split else "no --valid-data-path"
        print_rank_0(f"> {given}: no data for validation, so it is skipped")
    return train, valid, test


def queue_in_process(get_results_queue: Callable) -> Callable:
    """A save that is not asynchronous puts and gets in one process. The process of the
    others ends with its rank."""
    from megatron.training import get_args

    @functools.cache
    def of_a_process(mp_mode: str) -> Any:
        manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
        manager.start(end_with_parent)
        return manager.Queue()

    return lambda mp_mode="spawn": (
        of_a_process(mp_mode) if get_args().async_save else queue.Queue()
    )


@around
def raise_cause(write_preloaded_data: Callable, *args: Any, **kwargs: Any) -> Any:
    if multiprocessing.parent_process() is not None:  # of an asynchronous save
        end_with_parent()
    output = write_preloaded_data(*args, **kwargs)
    if (
        kwargs["results_queue"] is None
        and output is not None
        and isinstance(output[1], Exception)
    ):
        raise folder.root(output[1])  # caught by the caller, which passes its text on
    return output


@around
def known_records(read_metadata: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    with self.fs.create_stream(
        self._get_metadata_path(kwargs.get("rank")), "rb"
    ) as file:
        unpickle.read_metadata(file)
    return read_metadata(self, *args, **kwargs)


@around
def weights_only(load_bytes: Callable, self: Any, read_item: Any, value: Any) -> Any:
    unpickle.check_bytes(read_item.storage_index.fqn, value)
    return load_bytes(self, read_item, value)
