"""Apex under the late step, by stand-ins for its kernels: FusedAdam, and gradients
fused into the weights' main_grad.

The stand-ins have Apex's arguments, state and arithmetic
(apex/optimizers/fused_adam.py, csrc/multi_tensor_adam.cu) in torch's operations. Apex
itself needs a GPU and has not been run.
"""

from __future__ import annotations

import functools
import time
import types

import pytest
import torch

from megatron_2bw.base.local_ranks import run_world
from tests.distributed.compare import (
    SGD,
    UNTIED,
    assert_same,
    assert_same_runs,
    run_pipeline,
)
from tests.distributed.reference import Rule, reference
from tests.distributed.test_checkpoint import DROPOUT, SAVED, assert_goes_on
from tests.distributed.test_late_step import FP16, UNCLIPPED
from tests.distributed.test_update_rule import POISONED, poison
from tests.distributed.training import Run, command, train

pytestmark = pytest.mark.cpu

SHARDED, HOST = "--use-distributed-optimizer", ("--two-bw-optimizer", "host")


class FusedAdam(torch.optim.Optimizer):
    """One step counter for each group, in the group; a parameter's state is its
    moments, made at its first step."""

    def __init__(
        self,
        params,
        lr,
        betas,
        eps,
        weight_decay=0.0,
        adam_w_mode=True,
        capturable=False,
    ):
        assert not capturable, "not of this stand-in"
        super().__init__(
            params,
            dict(
                lr=lr,
                bias_correction=True,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
            ),
        )
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
                    state["exp_avg"], state["exp_avg_sq"] = (
                        torch.zeros_like(param) for _ in range(2)
                    )
                self._update(
                    param.data, param.grad, state["exp_avg"], state["exp_avg_sq"], group
                )

    def _update(self, weight, gradient, mean, square, group) -> None:
        """The kernel: a parameter is written once, in place."""
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        if not self.adam_w_mode:
            gradient = gradient + decay * weight
        mean.copy_(beta1 * mean + (1 - beta1) * gradient)
        square.copy_(beta2 * square + (1 - beta2) * gradient * gradient)
        corrections = (
            1 - beta ** group["step"] if group["bias_correction"] else 1.0
            for beta in (beta1, beta2)
        )
        mean_correction, square_correction = corrections
        update = (
            mean
            / mean_correction
            / ((square / square_correction).sqrt() + group["eps"])
        )
        weight.copy_(
            weight
            - group["lr"] * (update + decay * weight if self.adam_w_mode else update)
        )


def use_apex() -> None:
    """What Megatron's two modules hold after `from apex.optimizers import FusedAdam as
    Adam`."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam, distrib_optimizer.USING_APEX_OPTIMIZER = FusedAdam, True
    distrib_optimizer.HAVE_APEX_OR_TE = True


def is_fused(then, model, optimizer) -> None:
    assert {type(part.optimizer) for part in optimizer.chained_optimizers} == {
        FusedAdam
    }
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


def assert_exact(ours: list[str], plain: list[str], prepare=None, **rule) -> list[Run]:
    """Two stages with three microbatches, and the reference."""
    runs = run_world(2, train_with_apex, ours, prepare)
    rule = Rule(3, norm_order=[run.names for run in runs], **rule)
    (expected,) = run_world(1, reference_with_apex, plain, rule)
    assert [run.skipped for run in runs] == [expected.skipped] * 2
    assert_same(runs, expected, exact=True)
    return runs


@pytest.mark.proof("fp32")
@pytest.mark.parametrize(
    "flags", [(), ("--bf16", SHARDED)], ids=["fp32", "bf16, distributed optimizer"]
)
def test_late_step_is_exact(flags):
    runs = assert_exact(
        command(2, 3, "2bw", UNTIED, *flags),
        command(1, 3, "2bw", UNTIED, *set(flags) - {SHARDED}),
    )
    assert max(runs[0].grad_norms) > 1.0, "clipping must bite"


def test_the_gradient_term_is_exact():
    """The bias correction of the second moment comes from the counter of the group."""
    plain = command(1, 3, "2bw", UNTIED, "--bf16", adam_beta1=0.95)
    assert_exact(
        command(2, 3, "2bw", UNTIED, "--bf16", two_bw_correction="auto"),
        plain,
        factor=1.5,
        gradient=2,
    )


def test_a_skipped_step_does_not_count():
    """The bias correction knows the step of its group alone."""
    ours, plain = (
        command(stages, 3, "2bw", UNTIED, *FP16, **UNCLIPPED) for stages in (2, 1)
    )
    runs = assert_exact(
        ours, plain, functools.partial(poison, stage=1), poison=POISONED
    )
    assert runs[0].skipped == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    "width, flags", [(1, ("--bf16", "--ckpt-format", "torch")), (2, (SHARDED,))]
)
def test_resumed_run_is_the_uninterrupted_one(width, flags, tmp_path):
    argv = command(2, 2, "2bw", *flags, width=width, **DROPOUT)
    whole = run_world(
        2 * width,
        train_with_apex,
        [*argv, "--save", str(tmp_path), "--save-interval", str(SAVED)],
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    assert_goes_on(
        whole, run_world(2 * width, train_with_apex, [*argv, "--load", str(tmp_path)])
    )


@pytest.mark.parametrize(
    "flags", [("--bf16",), ("--bf16", SHARDED, "--ckpt-format", "torch")]
)
def test_a_resumed_run_may_move_to_the_host_and_back(flags, tmp_path):
    """Where the Adam of a host counts its steps, and Apex's. Both round alike in most
    elements, as the CPU has it."""
    argv = command(2, 2, "2bw", *flags, width=2, **DROPOUT)
    for first, second in (((), HOST), (HOST, ())):
        folder = tmp_path / str(len(first))
        saves = ["--save", str(folder), "--save-interval", str(SAVED)]
        whole = run_world(
            4, train_with_apex if not first else train, [*argv, *first, *saves]
        )
        (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
        rest = run_world(
            4,
            train_with_apex if not second else train,
            [*argv, *second, "--load", str(folder)],
        )
        assert torch.stack(rest[-1].losses).tolist() == pytest.approx(
            torch.stack(whole[-1].losses[SAVED:]).tolist(), abs=5e-4
        )


def train_fused(rank: int, argv: list[str]) -> Run:
    """With gradient accumulation fusion, on for every GPU user: the weight's gradient
    is added to the main_grad that Megatron's linear layer noted in the forward. The
    kernels' place is taken by a line of torch."""
    from megatron.core.tensor_parallel import layers
    from megatron.training import get_args

    from megatron_2bw.mcore.complete_gradients import Portion
    from megatron_2bw.run.flags import rehearsal

    used: list[torch.dtype] = []

    def kernel(*dtypes: torch.dtype):
        def accumulate(inputs, gradient, main_grad) -> None:
            assert main_grad.dtype in dtypes
            main_grad.add_((gradient.t() @ inputs).to(main_grad.dtype))
            used.append(main_grad.dtype)

        return accumulate

    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=kernel(torch.float32),
        wgrad_gemm_accum_fp16=kernel(torch.float16, torch.bfloat16),
    )
    layers._grad_accum_fusion_available = True
    del rehearsal.ON_CPU["gradient_accumulation_fusion"]
    take = Portion.take
    # the next batch's first gradient must wait
    Portion.take = lambda self: (time.sleep(0.05), take(self))
    run = train(rank, argv)
    assert get_args().gradient_accumulation_fusion and used
    return run


@pytest.mark.parametrize(
    "microbatches, width, flags",
    [
        (3, 1, FP16),  # 16-bit gradients: the other kernel
        (2, 2, ("--bf16", SHARDED, "--overlap-grad-reduce")),
    ],
)
def test_gradient_accumulation_fusion(microbatches, width, flags):
    argv = command(2, microbatches, "2bw", UNTIED, *flags, width=width)
    fused, plain = (
        run_world(2 * width, train_fused, argv),
        run_pipeline(argv, 2 * width),
    )
    assert_same_runs(fused[::width], plain[::width], exact=True)


def test_fused_gradients_wait_for_their_copies_to_the_host():
    """A tied head is first in a backward, and writes the embedding's gradient, which is
    copied last."""
    argv = command(1, 2, "2bw", "--bf16", **SGD)
    host, device = (run_world(1, train_fused, [*argv, *more]) for more in (HOST, ()))
    assert_same_runs(host, device, exact=True)
