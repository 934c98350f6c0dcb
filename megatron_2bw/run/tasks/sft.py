"""Conversations of megatron-2bw preprocess --task sft as samples of a GPT, by
--sft-data.

Invariant: sample k depends only on the dataset, the seed, the split and k: it is one
whole conversation from its first token on, or with --sft-packed as many as fit, cut or
padded to the sequence length. Each epoch has every conversation once, in an order of
its own. The loss counts the targets; padding is never one, and no token attends to it
but padding, or to another conversation.
"""

from __future__ import annotations

import functools

import numpy
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from megatron.training import print_rank_0

from megatron_2bw.base.errors import UserError


class SFTDataset(MegatronDataset):
    """The conversations `indices` of a dataset; built by Megatron's
    BlendedMegatronDatasetBuilder."""

    packed = False
    build_low_level_dataset = staticmethod(GPTDataset.build_low_level_dataset)
    numel_low_level_dataset = staticmethod(GPTDataset.numel_low_level_dataset)

    def __init__(
        self,
        dataset: IndexedDataset,
        dataset_path,
        indices,
        num_samples,
        index_split,
        config,
    ):
        super().__init__(
            dataset, dataset_path, indices, num_samples, index_split, config
        )
        self._begun: list[numpy.ndarray] = []  # what `_begins` has found
        self._epoch, self._order = -1, numpy.zeros(0, int)
        length = config.sequence_length + 1
        cut = indices[dataset.sequence_lengths[indices] > length]
        lost = sum(
            not (dataset.get(number, length=length) >= 0).any() for number in cut
        )
        if len(cut):
            share = (
                f"{len(cut):,} of {len(indices):,} conversations for "
                f"{index_split.name} of {dataset_path}"
            )
            line = (
                f"--seq-length {config.sequence_length} cuts {share}; {lost:,} have "
                "no target left"
            )
            if lost == len(indices) and index_split == Split.train:
                raise UserError(f"{line}: give a longer one")
            print_rank_0(f"> {line}")

    def __len__(self) -> int:
        return self.num_samples or len(self._begins(0))

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Tokens, labels, loss mask and positions, each [sequence]; the attention mask,
        where one is made, is [1, sequence, sequence]. `idx` None: a sample that fills a
        batch and counts nothing."""
        config, length = self.config, self.config.sequence_length
        words = numpy.full(length + 1, ~0, numpy.int64)  # padding: token 0, no target
        end, starts = 0, numpy.zeros(length + 1, numpy.int64)
        for number in self._conversations(int(idx or 0)):
            held = min(length + 1 - end, int(self.dataset.sequence_lengths[number]))
            words[end : end + held] = self.dataset.get(number, length=held)
            starts[end], end = end, end + held
        if self.packed:
            starts[end:][:1] = end
        words, starts = (
            torch.from_numpy(words),
            torch.from_numpy(numpy.maximum.accumulate(starts))[:length],
        )
        tokens = torch.where(words < 0, ~words, words)
        sample = {
            "tokens": tokens[:-1].contiguous(),
            "labels": tokens[1:].contiguous(),
            "loss_mask": (words[1:] >= 0).float() * (idx is not None),
            "position_ids": torch.arange(length) - starts,
        }
        if config.create_attention_mask:
            sample["attention_mask"] = _hidden(length) | (
                starts[None, :, None] != starts[None, None, :]
            )
        return sample

    def _conversations(self, idx: int) -> numpy.ndarray:
        """The numbers of sample `idx` in the dataset."""
        epoch = 0
        while idx >= len(self._begins(epoch)):
            idx, epoch = idx - len(self._begins(epoch)), epoch + 1
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        begins = self._begins(epoch)
        end = begins[idx + 1] if idx + 1 < len(begins) else len(self._order)
        return self.indices[self._order[begins[idx] : end]]

    def _shuffled(self, epoch: int) -> numpy.ndarray:
        random = numpy.random.default_rng(
            [self.config.random_seed, self.index_split.value, epoch]
        )
        return random.permutation(len(self.indices))

    def _begins(self, epoch: int) -> numpy.ndarray:
        """The places of an epoch's order at which its samples begin."""
        while len(self._begun) <= epoch:
            room, begins, order = 0, [], self.indices[self._shuffled(len(self._begun))]
            for place, size in enumerate(self.dataset.sequence_lengths[order].tolist()):
                if size > room:
                    begins.append(place)
                    room = self.config.sequence_length + 1 if self.packed else 0
                room = max(room - size, 0)
            self._begun.append(numpy.array(begins))
        return self._begun[epoch]


class PackedSFTDataset(SFTDataset):
    """As many whole conversations in a sample as fit, in the epoch's order."""

    packed = True


@functools.cache
def _hidden(length: int) -> torch.Tensor:
    """What a token does not attend to: the tokens after it."""
    return torch.ones(1, length, length).triu(1).bool()
