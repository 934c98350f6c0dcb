"""Whether what is about to be saved can be loaded again: its structure, before a byte
is written.

Invariant: these are Megatron's own steps of a load, in its order, on the state that a
run saves. They read no tensor.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    merge,
)
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base


def obstacle(state: dict[str, Any]) -> str | None:
    """What would stop this rank's load, at the same sizes, of a checkpoint of the
    sharded `state`; or None.

    All ranks call it, since a load takes what is no tensor from the first rank. It
    cannot see what a load at other sizes needs, what an optimizer does with its
    entries, or what is wrong with a tensor.
    """
    content, local, factories = load_preprocess(state)
    entries, common = extract_sharded_base(content)
    # Only the structure counts: `id` stands for a leaf, and for what a factory merges.
    shared = [dict_list_map_outplace(id, common)]
    dist.broadcast_object_list(shared, src=0)
    dict_list_map_inplace(partial(replace, merge_fn=id), factories)
    try:
        merge(shared[0], local)
        merge(shared[0], entries)
        apply_factory_merges(shared[0], factories)
    except ValueError as error:
        return str(error)
    return None
