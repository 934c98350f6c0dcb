"""What Megatron asks of a GPT entry script: model configuration, datasets, forward step and loss.

Imported by `launch` after the command line is checked and CUDA, if absent, is answered for.
"""

from __future__ import annotations

import json
from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, get_tokenizer, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args as model_config  # noqa: F401  `launch` calls it
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_2bw.faults import Fault

MASKED = 3  # batches on end without a token that counts, after which a pipeline gives up; one alone may be chance
SPIKE = 10  # with --check-for-spiky-loss: a loss this many times the largest so far is reported

FIELDS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def forward_step(data_iterator, model):
    """One forward of this stage on the next microbatch.

    Returns the stage's output, [sequence, microbatch, hidden], or on the last stage the losses
    [microbatch, sequence], and the function that turns the losses into Megatron's loss triple.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator, model.training, vp_stage)
    timers("batch-generator").stop()
    output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(loss, loss_mask)


def get_batch(data_iterator, training: bool = True, vp_stage: int | None = None):
    """The fields of the next microbatch that this stage needs, None for the others (all on middle stages).

    vp_stage: the number of the model chunk on this rank, with Megatron's interleaved stages.
    """
    first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    if not (first or last):
        return (None,) * len(FIELDS)
    args = get_args()
    size = args.micro_batch_size if training else args.eval_micro_batch_size or args.micro_batch_size
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        fields = next(data_iterator)
        if training:
            _DATA.check(fields, args)
        batch = {key: value.cuda(non_blocking=True) for key, value in fields.items()}
        batch.setdefault("attention_mask", None)
    batch = get_batch_on_this_tp_rank(
        batch, has_cu_seqlens=False, is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(), cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(), micro_batch_size=size,
        seq_length=args.seq_length, mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=first, is_pipeline_last_stage=last,
    )
    batch = get_batch_on_this_cp_rank(
        {key: batch[key] for key in FIELDS}, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )
    return tuple(batch[key] for key in FIELDS)


class _Data:
    """Looks at each microbatch while it is on the host, where that costs no wait for the GPU."""

    def __init__(self) -> None:
        self._seen = 0  # microbatches of the present batch
        self._counts = False  # whether one of them had a token that counts
        self._masked = 0  # batches on end without one

    def check(self, fields: dict[str, torch.Tensor], args) -> None:
        """A Fault at tokens that the model does not have, and if MASKED batches on end have no token for the loss.

        fields: tokens, labels and loss_mask, all [microbatch, sequence].
        """
        for name in ("tokens", "labels"):
            low, high = (int(value) for value in torch.aminmax(fields[name]))
            if low < 0 or high >= args.padded_vocab_size:
                raise Fault(
                    f"--data-path: the data holds the token {low if low < 0 else high}, but the vocabulary of "
                    f"--tokenizer-type {args.tokenizer_type} ends at {args.padded_vocab_size - 1}: give the tokenizer "
                    "that the data was prepared with"
                )
        self._counts |= bool(fields["loss_mask"].any())
        self._seen += 1
        if self._seen >= get_num_microbatches():
            self._masked = 0 if self._counts else self._masked + 1
            self._seen, self._counts = 0, False
        if self._masked >= MASKED:
            raise Fault(
                f"--data-path: no token of the last {MASKED} batches counts for the loss: leave --eod-mask-loss out, "
                "or look for documents of nothing but end-of-document tokens"
            )


_DATA = _Data()


def loss(loss_mask: torch.Tensor, losses: torch.Tensor):
    """Megatron's loss triple: the summed loss of the unmasked tokens, their number, and the report of both."""
    mask = loss_mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    _check(total)
    report = torch.cat([total.detach().view(1), tokens.view(1)])
    return total, tokens, {"lm loss": report}


def _check(total: torch.Tensor) -> None:
    """Stop on NaN or inf, report spikes: what Megatron's flags promise."""
    args, machine = get_args(), get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejected, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            machine.validate_result(
                result=total, rejection_func=rejected, message=f"found {name} in local forward loss calculation",
                tolerance=0.0, fatal=True,
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=total, message="Spiky loss", tolerance=0.0, fatal=False,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss"),
        )


def datasets_provider(samples: list[int], vp_stage: int | None = None):
    """Training, validation and test datasets with at least `samples` samples each."""
    args = get_args()
    kind = MockGPTDataset if args.mock_data else GPTFIMDataset if args.fim_data else GPTDataset
    print_rank_0(f"> building {kind.__name__} for training, validation and test ...")
    return BlendedMegatronDatasetBuilder(kind, samples, _builds_datasets, dataset_config(args)).build()


datasets_provider.is_distributed = True  # Megatron calls it on every rank


def _builds_datasets() -> bool:
    at_an_end = mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
    return at_an_end and mpu.get_tensor_model_parallel_rank() == 0


def dataset_config(args) -> GPTDatasetConfig:
    """Megatron's dataset configuration from its own flags."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences = json.load(file)
    options = dict(
        random_seed=args.seed, sequence_length=args.seq_length, blend=blend, blend_per_split=blend_per_split,
        split=args.split, multiple_validation_sets=args.multiple_validation_sets, full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads, path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files, tokenizer=get_tokenizer(), reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask, eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens, fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=sequences, defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
    )
    if not args.fim_data:
        return GPTDatasetConfig(**options)
    return GPTFIMDatasetConfig(
        **options, fim_rate=args.fim_rate, fim_spm_rate=args.fim_spm_rate, fim_split_sample=args.fim_split_sample,
        fim_fragment_rate=args.fim_fragment_rate, fim_no_prefix=args.fim_no_prefix,
        fim_extra_tokens={
            name: getattr(args, f"fim_{name}_token") for name in ("prefix", "middle", "suffix", "pad", "eod")
        },
    )
