"""Replacements for functions of Megatron and torch that have faults (docs/upstream.md).

Their first argument is the original; that of a method has the object, `self`, as its
second.
"""

import contextlib
import functools
import itertools
import multiprocessing
import queue
from collections.abc import Callable
from multiprocessing.managers import SyncManager
from typing import Any

import torch
from torch import Tensor

from megatron_2bw.base.processes import end_with_parent
from megatron_2bw.mcore.checkpoints import folder, unpickle
from megatron_2bw.mcore.rebinding import around, replaced


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
def whole_model(load_args: Callable, args: Any, *rest, **options) -> Any:
    loaded = load_args(args, *rest, **options)
    if isinstance(loaded, tuple):
        saved = loaded[1]
        for name in _OF_THE_MODEL:
            if hasattr(saved, name):
                setattr(args, name, getattr(saved, name))
        for name in _OF_THE_TOKENIZER:
            if getattr(args, name) is None:
                setattr(args, name, getattr(saved, name, None))
    return loaded


def wait_once(norm: Callable) -> Callable:
    """Megatron's own norm of gradients has the same bits. Apex's and Transformer
    Engine's stay."""
    local = getattr(norm, "__name__", "") == "local_multi_tensor_l2_norm"
    return _norm_of_all if local else norm


def _norm_of_all(
    size: int, overflow: Any, lists: list[list[Tensor]], *args: Any
) -> tuple[Tensor, None]:
    norms = [torch.norm(tensor) for tensor in itertools.chain(*lists)]
    norm = torch.norm(torch.stack(norms).cpu()).reshape(1)
    device = lists[0][0].device
    return norm.to(device, torch.float, non_blocking=True), None


@around
def set_without_step(
    set_states: Callable, self, model_param: Any, tensors: dict[str, Any]
) -> None:
    with torch.no_grad():
        set_states(self, model_param, tensors | {"step": None})


@around
def switch_once(switch: Callable, self, *args, **kwargs) -> None:
    disables = switch.__name__ == "disable_forward_pre_hook"
    if bool(self.remove_forward_pre_hook_handles) == disables:
        switch(self, *args, **kwargs)


@around
def places_without_padding(sharded_param_state: Callable, self, *args, **kwargs) -> Any:
    with contextlib.ExitStack() as undo:
        for buffer in self.buffers:
            undo.enter_context(replaced(buffer, param_index_map=_unpadded(buffer)))
        return sharded_param_state(self, *args, **kwargs)


def _unpadded(buffer: Any) -> dict:
    """Each parameter's start, end and bucket in the buckets' contents, which follow
    each other without padding."""
    starts = [0]
    for bucket in buffer.buckets:
        starts.append(starts[-1] + bucket.numel_unpadded)
    places = {}
    for param, (*_, number) in buffer.param_index_map.items():
        first, last = buffer.buckets[number].param_to_index[param]
        places[param] = (starts[number] + first, starts[number] + last, number)
    return places


@around
def skip_empty_validation(build_loaders: Callable, provider: Callable) -> tuple:
    """No rank evaluates where the first one has no validation data; middle stages never
    have any."""
    from megatron.training import get_args, print_rank_0

    train, valid, test = build_loaders(provider)
    args = get_args()
    has_data = valid is not None and valid[0] is not None
    flag = torch.tensor([has_data], dtype=torch.uint8, device="cuda")
    torch.distributed.broadcast(flag, 0)
    if args.do_valid and not flag:
        args.do_valid = False
        valid = None
        cause = f"--split {args.split}" if args.split else "no --valid-data-path"
        print_rank_0(f"> {cause}: no data for validation, so it is skipped")
    return train, valid, test


@around
def queue_in_process(get_results_queue: Callable, mp_mode: str = "spawn") -> Any:
    """A save that is not asynchronous puts and gets in one process. The process of the
    others ends with its rank."""
    from megatron.training import get_args

    return _process_queue(mp_mode) if get_args().async_save else queue.Queue()


@functools.cache
def _process_queue(mp_mode: str) -> Any:
    manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
    manager.start(end_with_parent)
    return manager.Queue()


@around
def raise_cause(write_preloaded_data: Callable, *args, **kwargs) -> Any:
    if multiprocessing.parent_process() is not None:  # of an asynchronous save
        end_with_parent()
    output = write_preloaded_data(*args, **kwargs)
    if kwargs["results_queue"] is None and output is not None:
        if isinstance(output[1], Exception):
            # caught by the caller, which passes its text on
            raise folder.root(output[1])
    return output


@around
def known_records(read_metadata: Callable, self, *args, **kwargs) -> Any:
    path = self._get_metadata_path(kwargs.get("rank"))
    with self.fs.create_stream(path, "rb") as file:
        unpickle.read_metadata(file)
    return read_metadata(self, *args, **kwargs)


@around
def weights_only(load_bytes: Callable, self, read_item: Any, value: Any) -> Any:
    unpickle.check_bytes(read_item.storage_index.fqn, value)
    return load_bytes(self, read_item, value)
