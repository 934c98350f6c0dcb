"""On the CPU a cluster's flags are replaced, in one line; what runs there computes what
it computes on GPUs."""

import types

import pytest
import torch

from megatron_2bw.mcore import torch_norm
from megatron_2bw.run.flags import rehearsal
from tests.distributed.compare import run_pipeline
from tests.distributed.training import command
from tests.unit import command_lines


@pytest.mark.proof
def test_sequence_parallelism_has_the_losses_of_tensor_parallelism():
    """The late step sums the norms' gradients over the tensor ranks in a group of its
    own."""
    argv = command(2, 2, "2bw", tensor_model_parallel_size=2)
    flags = "--sequence-parallel --attention-backend flash".split()
    split = run_pipeline([*argv, *flags], 4)[-1]
    whole = run_pipeline([*argv, "--distributed-backend", "nccl"], 4)[-1]
    assert_close = torch.testing.assert_close
    assert_close(split.losses, whole.losses, rtol=0, atol=1e-6)
    assert_close(split.grad_norms, whole.grad_norms, rtol=1e-6, atol=0)


@pytest.mark.proof
def test_a_clusters_flags_are_replaced_in_one_line():
    typed = (
        "--distributed-backend nccl --fp8-format hybrid --bf16 --profile "
        "--context-parallel-size 2"
    ).split()
    argv = command(1, 4, "megatron", *typed, micro_batch_size=4)
    args = command_lines.parse(argv, 2)
    parser = command_lines.parser_of("megatron", "gpt")
    line = rehearsal.rehearse(args, parser, argv)
    for words in (
        "--distributed-backend gloo",
        "without --profile",
        "without --fp8-format (computed in bf16)",
    ):
        assert words in line
    # Megatron's default, not typed
    assert "transformer-impl" not in line and args.transformer_impl == "local"
    assert (args.context_parallel_size, args.micro_batch_size, args.fp8) == (1, 2, None)


@pytest.mark.parametrize("kind", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_norms_with_weights_around_0(kind):
    config = types.SimpleNamespace(
        layernorm_zero_centered_gamma=True, sequence_parallel=True
    )
    norm = torch_norm.torch_norm(lambda cls, config, size: kind(size))(kind, config, 8)
    x = torch.randn(4, 8)
    torch.testing.assert_close(norm(x), kind(8)(x))
    assert not norm.weight.any()
    for param in norm.parameters():
        assert param.sequence_parallel
