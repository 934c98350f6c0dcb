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
        self._epochs = []  # what `_epoch` has found
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
        return self.num_samples or len(self._epoch(0)[1])

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
        order, begins = self._epoch(epoch)
        while idx >= len(begins):
            idx -= len(begins)
            epoch += 1
            order, begins = self._epoch(epoch)
        end = begins[idx + 1] if idx + 1 < len(begins) else len(order)
        return order[begins[idx] : end]

    def _epoch(self, number: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """An epoch's order of the conversations, and the places in it at which samples
        begin."""
        while len(self._epochs) <= number:
            seed = [self.config.random_seed, self.index_split.value, len(self._epochs)]
            order = numpy.random.default_rng(seed).permutation(self.indices)
            room = 0
            begins = []
            for place, size in enumerate(self.dataset.sequence_lengths[order].tolist()):
                if size > room:
                    begins.append(place)
                    room = self.config.sequence_length + 1 if self.packed else 0
                room = max(room - size, 0)
            self._epochs.append((order, numpy.array(begins)))
        return self._epochs[number]


class PackedSFTDataset(SFTDataset):
    """A sample has as many whole conversations as fit, in the epoch's order."""

    packed = True


@functools.cache
def _hidden(length: int) -> torch.Tensor:
    """What a token does not attend to: the tokens after it."""
    return torch.ones(1, length, length).triu(1).bool()
