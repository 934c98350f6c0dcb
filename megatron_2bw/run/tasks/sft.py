"""Conversations of megatron-2bw preprocess --task sft as samples of a GPT, by
--sft-data.

Invariant: sample k depends only on the dataset, the seed, the split and k: it is one
whole conversation from its first token on, or with --sft-packed as many as fit, cut or
padded to the sequence length. Each epoch has every conversation once, in an order of
its own. The loss counts the targets; padding is never one, and no token attends to it
but padding, or to another conversation.
"""

import functools

import numpy
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
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

    def __init__(self, *place):
        super().__init__(*place)
        self._begun: list[numpy.ndarray] = []  # what `_begins` has found
        self._epoch = -1
        self._order = numpy.zeros(0, int)
        self._report_cuts()

    def _report_cuts(self) -> None:
        """UserError if no conversation of the training has a target."""
        length = self.config.sequence_length
        cut = self.indices[self.dataset.sequence_lengths[self.indices] > length + 1]
        if not len(cut):
            return
        lost = 0
        for number in cut:
            if not (self.dataset.get(number, length=length + 1) >= 0).any():
                lost += 1
        line = (
            f"--seq-length {length} cuts {len(cut):,} of {len(self.indices):,} "
            f"conversations for {self.index_split.name} of {self.dataset_path}; "
            f"{lost:,} have no target left"
        )
        if lost == len(self.indices) and self.index_split == Split.train:
            raise UserError(f"{line}: give a longer one")
        print_rank_0(f"> {line}")

    def __len__(self) -> int:
        return self.num_samples or len(self._begins(0))

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Tokens, labels, loss mask and positions, each [sequence]; the attention mask,
        where one is made, is [1, sequence, sequence]. `idx` None: a sample that fills a
        batch and counts nothing."""
        length = self.config.sequence_length
        words = numpy.full(length + 1, ~0, numpy.int64)  # padding: token 0, no target
        starts = numpy.zeros(length + 1, numpy.int64)
        end = 0
        for number in self._conversations(int(idx or 0)):
            size = min(length + 1 - end, int(self.dataset.sequence_lengths[number]))
            words[end : end + size] = self.dataset.get(number, length=size)
            starts[end] = end
            end += size
        if self.packed:
            starts[end:][:1] = end
        words = torch.from_numpy(words)
        starts = torch.from_numpy(numpy.maximum.accumulate(starts))[:length]
        tokens = torch.where(words < 0, ~words, words)
        sample = {
            "tokens": tokens[:-1].contiguous(),
            "labels": tokens[1:].contiguous(),
            "loss_mask": (words[1:] >= 0).float() * (idx is not None),
            "position_ids": torch.arange(length) - starts,
        }
        if self.config.create_attention_mask:
            others = starts[None, :, None] != starts[None, None, :]
            sample["attention_mask"] = _hidden(length) | others
        return sample

    def _conversations(self, idx: int) -> numpy.ndarray:
        """The numbers of sample `idx` in the dataset."""
        epoch = 0
        while idx >= len(self._begins(epoch)):
            idx -= len(self._begins(epoch))
            epoch += 1
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self._shuffled(epoch)
        begins = self._begins(epoch)
        end = begins[idx + 1] if idx + 1 < len(begins) else len(self._order)
        return self.indices[self._order[begins[idx] : end]]

    def _shuffled(self, epoch: int) -> numpy.ndarray:
        seed = [self.config.random_seed, self.index_split.value, epoch]
        return numpy.random.default_rng(seed).permutation(len(self.indices))

    def _begins(self, epoch: int) -> numpy.ndarray:
        """The places of an epoch's order at which its samples begin."""
        while len(self._begun) <= epoch:
            room = 0
            begins = []
            order = self.indices[self._shuffled(len(self._begun))]
            for place, size in enumerate(self.dataset.sequence_lengths[order].tolist()):
                if size > room:
                    begins.append(place)
                    room = self.config.sequence_length + 1 if self.packed else 0
                room = max(room - size, 0)
            self._begun.append(numpy.array(begins))
        return self._begun[epoch]


class PackedSFTDataset(SFTDataset):
    """A sample has as many whole conversations as fit, in the epoch's order."""

    packed = True


@functools.cache
def _hidden(length: int) -> torch.Tensor:
    """What a token does not attend to: the tokens after it."""
    return torch.ones(1, length, length).triu(1).bool()
