"""Replacements for functions of Megatron that have faults which every user meets. Each takes the original function."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable

from megatron_2bw.checkpoints import save_workers, unpickle


def skip_when_compiled(original: Callable) -> Callable:
    @functools.wraps(original)
    def compile_helpers() -> None:
        try:
            import megatron.core.datasets.helpers_cpp  # noqa: F401
        except ImportError:
            original()

    return compile_helpers


def set_without_step(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_states(self, model_param, tensors):
        import torch

        with torch.no_grad():
            return original(self, model_param, {**tensors, "step": None})

    return set_states


def results_queue(original: Callable) -> Callable:
    return save_workers.results_queue


def async_loop(original: Callable) -> staticmethod:
    return staticmethod(save_workers.async_loop)


def raise_cause(original: Callable) -> staticmethod:
    @functools.wraps(original)
    def write_preloaded_data(*args, **kwargs):
        if multiprocessing.parent_process() is not None:  # of an asynchronous save
            save_workers.end_with_parent()
        output = original(*args, **kwargs)
        if kwargs["results_queue"] is None and output is not None and isinstance(output[1], Exception):
            raise save_workers.root(output[1])  # caught by the caller, which passes its text on
        return output

    return staticmethod(write_preloaded_data)


def known_records(original: Callable) -> Callable:
    @functools.wraps(original)
    def read_metadata(self, *args, **kwargs):
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            unpickle.read_metadata(file)
        return original(self, *args, **kwargs)

    return original if hasattr(original, "__wrapped__") else read_metadata


def weights_only(original: Callable) -> Callable:
    @functools.wraps(original)
    def load_bytes(self, read_item, value):
        unpickle.check_bytes(read_item.storage_index.fqn, value)
        return original(self, read_item, value)

    return original if hasattr(original, "__wrapped__") else load_bytes
