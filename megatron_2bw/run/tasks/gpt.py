"""A GPT for Megatron's `pretrain`: model configuration, datasets, forward step and
loss.

`launch` imports it after it has checked the command line and, on a host without CUDA,
installed cpu.py.
"""

import json
from functools import partial
from pathlib import Path

import torch
from megatron.core import mpu
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
)
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from torch import Tensor

from megatron_2bw.run.tasks import common, hybrid, lora
from megatron_2bw.run.tasks.sft import PackedSFTDataset, SFTDataset

FIELDS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def model_config(args):
    """Megatron's configuration of the model."""
    if args.hybrid_layer_pattern:
        config = hybrid_config_from_args(args)
        if args.transformer_impl == "local" and not args.spec:
            config.hybrid_stack_spec = hybrid.local_stack(config.transformer)
    else:
        config = gpt_config_from_args(args)
    common.apply_dropped_flags(config, args)
    if args.lora_rank:
        config.pre_wrap_hooks.append(lora.adapted)
    return config


def forward_step(data_iterator, model):
    """One forward of this stage on the next microbatch.

    Returns the stage's output, [sequence, microbatch, hidden], or on the last stage the
    losses [microbatch, sequence], and the function that turns the losses into
    Megatron's loss triple.
    """
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(
        data_iterator, model.training, vp_stage
    )
    timer.stop()
    borders = {}
    if get_args().sft_packed and get_args().transformer_impl != "local":
        attention_mask = None
        borders["packed_seq_params"] = packed(position_ids)
    output = model(
        tokens,
        position_ids,
        attention_mask,
        labels=labels,
        loss_mask=loss_mask,
        **borders,
    )
    return output, partial(loss, loss_mask)


def packed(position_ids: Tensor) -> PackedSeqParams:
    """Where the conversations of one sample, [1, sequence], begin and end, for
    Transformer Engine's attention."""
    starts = (position_ids[0] == 0).nonzero().flatten()
    end = starts.new_tensor([position_ids.numel()])
    borders = torch.cat([starts, end]).to(torch.int32)
    longest = int(position_ids.max()) + 1
    return PackedSeqParams(
        "thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def get_batch(data_iterator, training: bool, vp_stage: int | None):
    """The fields of the next microbatch that this stage needs; the others (on middle
    stages all) are None.

    vp_stage: the number of the model chunk on this rank, with Megatron's interleaved
    stages.
    """
    args = get_args()
    place = dict(ignore_virtual=False, vp_stage=vp_stage)
    last = mpu.is_pipeline_last_stage(**place)
    # each stage needs the borders of packed conversations
    needs_tokens = args.sft_packed and not last
    first = mpu.is_pipeline_first_stage(**place) or needs_tokens
    if not (first or last):
        return (None,) * len(FIELDS)
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch["attention_mask"] = None
        for key, value in next(data_iterator).items():
            batch[key] = value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=common.micro_batch_size(args, training),
        seq_length=args.seq_length,
        # it needs all fields
        mtp_on_this_rank=bool(args.mtp_num_layers or args.sft_packed) and last,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=first,
        is_pipeline_last_stage=last,
    )
    batch = get_batch_on_this_cp_rank(
        {key: batch[key] for key in FIELDS},
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
    )
    return tuple(batch[key] for key in FIELDS)


_LOSS = common.LossCheck()


def loss(loss_mask: Tensor, losses: Tensor):
    """Megatron's loss triple: the summed loss of the unmasked tokens, their number, and
    the report of both."""
    total, tokens = common.masked_sum(losses, loss_mask)
    _LOSS.check(total)
    return total, tokens, {"lm loss": common.loss_report(total, tokens)}


def datasets_provider(samples: list[int], vp_stage: int | None = None):
    """Training, validation and test datasets with at least `samples` samples each."""
    args = get_args()
    return common.build_datasets(
        _dataset_class(args), samples, _builds_datasets, dataset_config(args)
    )


def _dataset_class(args) -> type:
    if args.sft_packed:
        return PackedSFTDataset
    if args.sft_data:
        return SFTDataset
    if args.mock_data:
        return MockGPTDataset
    return GPTFIMDataset if args.fim_data else GPTDataset


def _builds_datasets() -> bool:
    reads = (
        mpu.is_pipeline_first_stage()
        or mpu.is_pipeline_last_stage()
        or get_args().sft_packed  # it has the masks
    )
    return reads and mpu.get_tensor_model_parallel_rank() == 0


datasets_provider.is_distributed = True  # Megatron calls it on every rank


def dataset_config(args) -> GPTDatasetConfig:
    """Megatron's dataset configuration from its own flags."""
    options = dict(
        create_attention_mask=args.create_attention_mask_in_dataloader,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
    )
    if args.per_dataset_sequences_path is not None:
        text = Path(args.per_dataset_sequences_path).read_text()
        options["sequences_per_dataset"] = json.loads(text)
    if not args.fim_data:
        return common.dataset_config(GPTDatasetConfig, args, **options)
    tokens = {}
    for name in ("prefix", "middle", "suffix", "pad", "eod"):
        tokens[name] = getattr(args, f"fim_{name}_token")
    return common.dataset_config(
        GPTFIMDatasetConfig, args, fim_extra_tokens=tokens, **options
    )
