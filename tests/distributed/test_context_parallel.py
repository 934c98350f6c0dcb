"""Context parallelism on the CPU, with an attention that gathers the sequence in place
of Transformer Engine's."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist

from megatron_2bw.base.local_ranks import run_world
from tests.distributed.compare import UNTIED, assert_same_losses, run_pipeline
from tests.distributed.test_update_rule import NO_BIAS
from tests.distributed.training import Run, command, train


class Gathered(torch.autograd.Function):
    """The whole sequence from the parts of the ranks: of 2 n chunks rank r has the r-th
    and the r-th from the end."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        halves = [half for part in parts for half in part.chunk(2)]
        return torch.cat(halves[0::2] + halves[1::2][::-1])

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return part_of(gradient, ctx.group), None


def part_of(whole: torch.Tensor, group) -> torch.Tensor:
    chunks = whole.chunk(2 * group.size())
    rank = group.rank()
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def train_in_parts(rank: int, argv: list[str]) -> Run:
    """`train` without the rehearsal's replacement of context parallelism."""
    from megatron.core import mpu
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron_2bw.run.flags import rehearsal

    rehearse = rehearsal.rehearse
    make = DotProductAttention.__init__
    attend = DotProductAttention.forward

    def kept(args, *rest):
        size = args.context_parallel_size
        args.context_parallel_size = 1
        line = rehearse(args, *rest)
        args.context_parallel_size = size
        return line

    @functools.wraps(make)
    def made(self, config, *args, **kwargs):
        whole = copy.copy(config)
        whole.context_parallel_size = 1
        make(self, whole, *args, **kwargs)

    def attended(self, query, key, value, mask, *args, **kwargs):
        group = mpu.get_context_parallel_group()
        whole = [Gathered.apply(part, group) for part in (query, key, value)]
        return part_of(attend(self, *whole, None, *args, **kwargs), group)

    rehearsal.rehearse = kept
    DotProductAttention.__init__ = made
    DotProductAttention.forward = attended
    return train(rank, argv)


EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 1e-2"


@pytest.mark.parametrize(
    "flags, of_parts",
    [
        ("--two-bw-correction auto", ""),
        ("--use-distributed-optimizer --calculate-per-token-loss", ""),
        (EXPERTS, "--expert-model-parallel-size 2"),
    ],
    ids=["correction", "shards", "experts"],
)
def test_parts_of_a_sequence_give_the_numbers_of_the_whole(flags, of_parts):
    """The ranks' sums are added in another order, so equal to rounding only."""
    flags = f"{NO_BIAS} --no-create-attention-mask-in-dataloader {flags}"
    argv = command(2, 4, "2bw", UNTIED, flags)
    split = ["--context-parallel-size", "2", *of_parts.split()]
    parts = run_world(4, train_in_parts, [*argv, *split])
    whole = run_pipeline(argv, 2)
    assert_same_losses(parts, whole, tolerance=1e-6)
    assert parts[0].grad_norms == pytest.approx(whole[0].grad_norms, rel=1e-5)
