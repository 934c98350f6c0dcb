"""A BERT for Megatron's `pretrain`: model, datasets, forward step and loss.

`launch` imports it after it has checked the command line and, on a host without CUDA,
installed cpu.py. A masked language model, and with the binary head (disabled by
--bert-no-binary-head) a second loss: whether two spans of text are in order. Every
stage reads the data, since every layer needs the padding mask.
"""

from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from megatron.core.models.bert.bert_layer_specs import (
    bert_layer_local_spec,
    get_bert_layer_with_transformer_engine_spec,
)
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.transformer.spec_utils import import_module
from megatron.training import get_args, get_timers
from megatron.training.arguments import core_transformer_config_from_args
from torch import Tensor

from megatron_2bw.run.tasks import common, lora
from megatron_2bw.run.tasks.mock_bert import MockBertDataset

# [microbatch, sequence] each
FIELDS = ("padding_mask", "text", "types", "labels", "loss_mask")
# at most so many consecutive words are masked together, as in Megatron's own BERT
MASKED_WORDS = 3


def model_config(args) -> None:
    """Megatron 0.19 has no configuration class for BERT: `model_provider` builds it."""


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config=None,
    pg_collection=None,
) -> BertModel:
    """This stage of the model, of Megatron's local layers or Transformer Engine's."""
    args = get_args()
    if config is None:
        config = core_transformer_config_from_args(args)
        common.apply_dropped_flags(config, args)
    model = BertModel(
        config=config,
        transformer_layer_spec=_layer(args),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        num_tokentypes=2 if args.bert_binary_head else 0,
        add_binary_head=args.bert_binary_head,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
    if post_process and args.openai_gelu:
        model.lm_head.gelu = common.TANH_GELU  # Megatron's is always exact
    if args.lora_rank:
        lora.adapted([model])
    return model


def _layer(args) -> Any:
    if args.spec not in (None, ["local"]):
        return import_module(args.spec)
    if args.spec is not None or args.transformer_impl == "local":
        return bert_layer_local_spec
    return get_bert_layer_with_transformer_engine_spec()


def forward_step(data_iterator, model):
    """One forward of this stage on the next microbatch.

    Returns the stage's output, [sequence, microbatch, hidden], or on the last stage the
    losses [microbatch, sequence] and the binary head's logits [microbatch, 2] or None;
    and the function that turns these into Megatron's loss triple.
    """
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = get_batch(data_iterator, model.training)
    timer.stop()
    types = batch["types"] if get_args().bert_binary_head else None
    output = model(
        batch["text"],
        batch["padding_mask"],
        tokentype_ids=types,
        lm_labels=batch["labels"],
    )
    return output, partial(loss, batch["loss_mask"], batch["is_random"])


def get_batch(data_iterator, training: bool) -> dict[str, Tensor | None]:
    """FIELDS and is_random [microbatch] of the next microbatch; on middle stages the
    padding mask alone, else None."""
    args = get_args()
    # of any chunk, if stages are interleaved
    ends = mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
    names = FIELDS if ends else FIELDS[:1]
    parts = []
    if mpu.get_tensor_model_parallel_rank() == 0:
        fields = next(data_iterator)
        fields["is_random"] = fields["is_random"].view(-1, 1)
        for name in (*names, "is_random"):
            parts.append(fields[name].cuda(non_blocking=True))
    if mpu.get_tensor_model_parallel_world_size() > 1:
        widths = [args.seq_length] * len(names) + [1]
        size = common.micro_batch_size(args, training)
        parts = _from_first_tensor_rank(parts, widths, size)
    batch = dict.fromkeys(FIELDS)
    batch.update(zip(names, parts))
    batch["is_random"] = parts[-1].view(-1)
    return batch


def _from_first_tensor_rank(
    parts: list[Tensor], widths: list[int], size: int
) -> list[Tensor]:
    """The parts, [size, width] each, on all tensor ranks: one message."""
    if parts:
        message = torch.cat(parts, dim=1)
    else:
        device = torch.cuda.current_device()
        message = torch.empty(size, sum(widths), dtype=torch.int64, device=device)
    torch.distributed.broadcast(
        message,
        mpu.get_tensor_model_parallel_src_rank(),
        group=mpu.get_tensor_model_parallel_group(),
    )
    return [part.contiguous() for part in message.split(widths, dim=1)]


_LOSS = common.LossCheck()


def loss(
    loss_mask: Tensor,
    is_random: Tensor,
    output: tuple[Tensor, Tensor | None],
):
    """Megatron's loss triple: a sum over the masked tokens, their number, and the
    reports of both losses.

    The sum over the number of masked tokens is the mean loss of those tokens plus the
    binary head's mean over the microbatch's samples. With --calculate-per-token-loss
    the latter has the weight of its tokens (1 without any).
    """
    losses, order = output
    total, tokens = common.masked_sum(losses, loss_mask)
    reports = {"lm loss": common.loss_report(total, tokens)}
    if order is not None:
        binary = torch.nn.functional.cross_entropy(order.float(), is_random)
        samples = torch.full_like(tokens, is_random.numel())
        reports["sop loss"] = common.loss_report(binary * samples, samples)
        total = total + binary * tokens.clamp(min=1)
    _LOSS.check(total)
    return total, tokens, reports


def datasets_provider(samples: list[int], vp_stage: int | None = None):
    """Training, validation and test datasets with at least `samples` samples each."""
    args = get_args()
    kind = MockBertDataset if args.mock_data else BERTMaskedWordPieceDataset
    # With --eval-iters 0 Megatron asks for 0 samples; this dataset would be empty,
    # which Megatron's loader refuses.
    samples = [count if count is None else max(count, 1) for count in samples]
    return common.build_datasets(kind, samples, _builds_datasets, dataset_config(args))


def _builds_datasets() -> bool:
    return mpu.get_tensor_model_parallel_rank() == 0


datasets_provider.is_distributed = True  # Megatron calls it on every rank


def dataset_config(args) -> BERTMaskedWordPieceDatasetConfig:
    """Megatron's dataset configuration from its own flags."""
    return common.dataset_config(
        BERTMaskedWordPieceDatasetConfig,
        args,
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        masking_max_ngram=MASKED_WORDS,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=args.bert_binary_head,
    )
