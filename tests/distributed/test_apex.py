"""Apex under the late step, by stand-ins for its kernels: FusedAdam, and gradients
fused into the weights' main_grad.

The stand-ins have Apex's arguments, state and arithmetic
(apex/optimizers/fused_adam.py, csrc/multi_tensor_adam.cu) in torch's operations. Apex
itself needs a GPU and has not been run.
"""

import functools
import time
import types

import pytest
import torch

from megatron_2bw.base.local_ranks import run_world
from tests.distributed.compare import (
    SGD,
    UNTIED,
    assert_close_losses,
    assert_same,
    assert_same_runs,
    run_pipeline,
)
from tests.distributed.reference_modes import Rule, reference
from tests.distributed.test_checkpoint import (
    DROPOUT,
    SAVED,
    SHARDED,
    assert_goes_on,
    moved,
    run_loading,
    run_saving,
)
from tests.distributed.test_host_memory import HOST
from tests.distributed.test_late_step import FP16, UNCLIPPED
from tests.distributed.test_update_rule import POISONED, SKIPPED, assert_clipped, poison
from tests.distributed.training import Run, command, delayed, train

pytestmark = pytest.mark.cpu


class FusedAdam(torch.optim.Optimizer):
    """One step counter for each group, in the group; a parameter's state is its
    moments, made at its first step."""

    def __init__(self, params, weight_decay=0.0, adam_w_mode=True, **defaults):
        assert not defaults.pop("capturable", False), "not of this stand-in"
        defaults |= dict(bias_correction=True, weight_decay=weight_decay)
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                self._update(param.data, param.grad, state, group)

    def _update(self, weight, gradient, state, group) -> None:
        """The kernel: a parameter is written once, in place."""
        mean = state["exp_avg"]
        square = state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        if not self.adam_w_mode:
            gradient = gradient + decay * weight
        mean.copy_(beta1 * mean + (1 - beta1) * gradient)
        square.copy_(beta2 * square + (1 - beta2) * gradient * gradient)
        root = (square / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
        update = mean / (1 - beta1 ** group["step"]) / root
        if self.adam_w_mode:
            update = update + decay * weight
        weight.copy_(weight - group["lr"] * update)


def use_apex() -> None:
    """What Megatron's two modules hold after `from apex.optimizers import FusedAdam as
    Adam`."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.USING_APEX_OPTIMIZER = True
    distrib_optimizer.HAVE_APEX_OR_TE = True


def is_fused(then, model, optimizer) -> None:
    for part in optimizer.chained_optimizers:
        assert type(part.optimizer) is FusedAdam
    if then is not None:
        then(model, optimizer)


def train_with_apex(rank: int, argv: list[str], prepare=None) -> Run:
    use_apex()
    return train(rank, argv, functools.partial(is_fused, prepare))


def reference_with_apex(rank: int, argv: list[str], rule: Rule) -> Run:
    """The reference makes its own optimizer; here it is the stand-in."""
    use_apex()
    torch.optim.AdamW = FusedAdam
    return reference(rank, argv, rule)


def assert_exact(flags: str, own: str = "", prepare=None, changes=None, **rule) -> Run:
    """Two stages with three microbatches, and the reference."""
    changes = changes or {}
    argv = command(2, 3, "2bw", UNTIED, flags, own, **changes)
    runs = run_world(2, train_with_apex, argv, prepare)
    rule = Rule(3, norm_order=[run.names for run in runs], **rule)
    argv = command(1, 3, "2bw", UNTIED, flags, **changes)
    (expected,) = run_world(1, reference_with_apex, argv, rule)
    for run in runs:
        assert run.skipped == expected.skipped
    assert_same(runs, expected)
    return runs[0]


@pytest.mark.proof("fp32")
@pytest.mark.parametrize(
    "flags, own",
    [("", ""), ("--bf16", SHARDED)],
    ids=["fp32", "bf16, distributed optimizer"],
)
def test_late_step_is_exact(flags, own):
    assert_clipped(assert_exact(flags, own))


def test_the_gradient_term_is_exact():
    """The bias correction of the second moment comes from the counter of the group."""
    assert_exact("--bf16", "--two-bw-correction 1.5,2", factor=1.5, gradient=2)


def test_a_skipped_step_does_not_count():
    """The bias correction knows the step of its group alone."""
    prepare = functools.partial(poison, stage=1)
    run = assert_exact(FP16, prepare=prepare, changes=UNCLIPPED, poison=POISONED)
    assert run.skipped == SKIPPED


@pytest.mark.parametrize(
    "width, flags", [(1, "--bf16 --ckpt-format torch"), (2, SHARDED)]
)
def test_resumed_run_is_the_uninterrupted_one(width, flags, tmp_path):
    argv = command(2, 2, "2bw", flags, width=width, **DROPOUT)
    whole = run_saving(tmp_path, 2 * width, argv, program=train_with_apex)
    rest = run_loading(tmp_path, 2 * width, argv, program=train_with_apex)
    assert_goes_on(whole, rest)


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("flags", ["", f"{SHARDED} --ckpt-format torch"])
def test_a_resumed_run_may_move_to_the_host_and_back(flags, to_host, tmp_path):
    """Where the Adam of a host counts its steps, and Apex's. Both round alike in most
    elements, as the CPU has it."""
    argv = command(2, 2, "2bw", "--bf16", flags, width=2, **DROPOUT)
    whole, rest = moved(tmp_path, argv, to_host, program=train_with_apex)
    assert_close_losses(rest[-1].losses, whole[-1].losses[SAVED:], 1e-4)


def kernel(used: list[torch.dtype], *dtypes: torch.dtype):
    """A product of gradients that is added to a weight's main_grad of some types."""

    def accumulate(inputs, gradient, main_grad) -> None:
        assert main_grad.dtype in dtypes
        main_grad.add_((gradient.t() @ inputs).to(main_grad.dtype))
        used.append(main_grad.dtype)

    return accumulate


def train_fused(rank: int, argv: list[str]) -> Run:
    """With gradient accumulation fusion, on for every GPU user: the weight's gradient
    is added to the main_grad that Megatron's linear layer noted in the forward. The
    kernels' place is taken by a line of torch."""
    from megatron.core.tensor_parallel import layers
    from megatron.training import get_args

    from megatron_2bw.mcore.complete_gradients import Portion
    from megatron_2bw.run.flags import rehearsal

    used = []
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=kernel(used, torch.float32),
        wgrad_gemm_accum_fp16=kernel(used, torch.float16, torch.bfloat16),
    )
    layers._grad_accum_fusion_available = True
    del rehearsal.ON_CPU["gradient_accumulation_fusion"]
    # the next batch's first gradient must wait
    delayed(Portion, "take", functools.partial(time.sleep, 0.05))
    run = train(rank, argv)
    assert get_args().gradient_accumulation_fusion
    assert used
    return run


@pytest.mark.parametrize(
    "microbatches, width, flags",
    [
        (3, 1, FP16),  # 16-bit gradients: the other kernel
        (2, 2, f"--bf16 {SHARDED} --overlap-grad-reduce"),
    ],
)
def test_gradient_accumulation_fusion(microbatches, width, flags):
    argv = command(2, microbatches, "2bw", UNTIED, flags, width=width)
    fused = run_world(2 * width, train_fused, argv)
    plain = run_pipeline(argv, 2 * width)
    assert_same_runs(fused[::width], plain[::width])


def test_fused_gradients_wait_for_their_copies_to_the_host():
    """A tied head is first in a backward, and writes the embedding's gradient, which is
    copied last."""
    argv = command(1, 2, "2bw", "--bf16", **SGD)
    host = run_world(1, train_fused, argv + HOST.split())
    assert_same_runs(host, run_world(1, train_fused, argv))
