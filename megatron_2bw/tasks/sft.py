"""Conversations of megatron-2bw preprocess --task sft as samples of a GPT, by --sft-data.

Invariant: sample k depends only on the dataset, the seed, the split and k: it is one whole conversation from its first
token on, cut or padded to the sequence length. Each epoch has every conversation once, in an order of its own. The loss
counts the targets; padding is never one, and no token attends to it but padding.
"""

from __future__ import annotations

import functools

import numpy
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.training import print_rank_0


class SFTDataset(MegatronDataset):
    """The conversations `indices` of a dataset; built by Megatron's BlendedMegatronDatasetBuilder."""

    build_low_level_dataset = staticmethod(GPTDataset.build_low_level_dataset)
    numel_low_level_dataset = staticmethod(GPTDataset.numel_low_level_dataset)

    def __init__(self, dataset: IndexedDataset, dataset_path, indices, num_samples, index_split, config):
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self._epoch, self._order = -1, numpy.zeros(0, int)
        cut = int((dataset.sequence_lengths[indices] > config.sequence_length + 1).sum())
        if cut:
            share = f"{cut:,} of {len(indices):,} conversations for {index_split.name}"
            print_rank_0(f"> --seq-length {config.sequence_length} cuts {share} of {dataset_path}")

    def __len__(self) -> int:
        return len(self.indices) if self.num_samples is None else self.num_samples

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Tokens, labels, loss mask and positions, each [sequence]; the attention mask, where one is made, is
        [1, sequence, sequence]. `idx` None: a sample that fills a batch and counts nothing."""
        config, length = self.config, self.config.sequence_length
        number = self._conversation(idx or 0)
        held = min(length + 1, int(self.dataset.sequence_lengths[number]))
        words = numpy.full(length + 1, ~0, numpy.int64)  # padding: token 0, no target
        words[:held] = self.dataset.get(number, length=held)
        words = torch.from_numpy(words)
        tokens = torch.where(words < 0, ~words, words)
        sample = {
            "tokens": tokens[:-1].contiguous(),
            "labels": tokens[1:].contiguous(),
            "loss_mask": (words[1:] >= 0).float() * (idx is not None),
            "position_ids": torch.arange(length),
        }
        if config.create_attention_mask:
            sample["attention_mask"] = _hidden(length)
        return sample

    def _conversation(self, idx: int) -> int:
        """The number of sample `idx` in the dataset."""
        epoch, place = divmod(int(idx), len(self.indices))
        if epoch != self._epoch:
            random = numpy.random.default_rng([self.config.random_seed, self.index_split.value, epoch])
            self._epoch, self._order = epoch, random.permutation(len(self.indices))
        return int(self.indices[self._order[place]])


@functools.cache
def _hidden(length: int) -> torch.Tensor:
    """What a token does not attend to: the tokens after it."""
    return torch.ones(1, length, length).triu(1).bool()
