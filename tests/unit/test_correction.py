"""Extrapolated weights by hand: what a step writes to the weight store, and that main parameters stay the true ones."""

from __future__ import annotations

import argparse
from argparse import Namespace

import pytest
import torch

from megatron_2bw.core.weights import WeightStores
from megatron_2bw.flags.correction import Correction, Factor, correction, factor, note, warning
from megatron_2bw.flags.own import short_warmup, sync_iterations
from megatron_2bw.mcore.extrapolation import Extrapolation, Lead, add_gradients, resume_note
from megatron_2bw.portions import portions


class MixedPrecision:
    """As much of Megatron's Float16OptimizerWithFloat16Params as the correction meets, with a step of its own."""

    optimizer = object()

    def __init__(self, stores: WeightStores):
        self.stores, self.target = stores, 0
        self.fp32_from_float16_groups = [[p.detach().float() for p in stores.params if p.dtype != torch.float32]]

    def _copy_main_params_to_model_params(self) -> None:
        low = [view for view in self.stores.views(self.target) if view.dtype != torch.float32]
        for view, main in zip(low, self.fp32_from_float16_groups[0]):
            view.copy_(main)

    def step(self, *updates: float) -> None:
        for main, update in zip(self.fp32_from_float16_groups[0], updates):
            main.sub_(update)
        self._copy_main_params_to_model_params()


def stage() -> tuple[WeightStores, MixedPrecision, torch.nn.Parameter, torch.nn.Parameter]:
    low, full = torch.nn.Parameter(torch.tensor([1.0, 2.0]).bfloat16()), torch.nn.Parameter(torch.tensor([4.0]))
    stores = WeightStores([low, full], 2)
    stores.start(0)
    return stores, MixedPrecision(stores), low, full


class Unstepped:
    """Proxies of parameters whose optimizer is not in the test."""

    def of(self, param: torch.nn.Parameter) -> torch.Tensor:
        return param


def step(stores, part, correction, lead: Lead, update: float = 0.5) -> list[torch.Tensor]:
    """Both parameters change by -update; returns what is in the store then."""
    part.target = stores.reserve({stores.newest})
    views = stores.views(part.target)
    correction.before_step(views, lead)
    for main in correction.main.values():  # as Megatron's optimizer would, in place
        main.sub_(update)
    part.step(update)
    correction.after_step(views, Unstepped())
    stores.commit(part.target, True)
    return views


@pytest.mark.parametrize(
    "factor, low, full", [(1.0, [0.0, 1.0], [3.0]), (0.5, [0.25, 1.25], [3.25]), (0.0, [0.5, 1.5], [3.5])]
)
def test_the_store_is_ahead_by_the_factor_of_the_update_and_the_main_parameters_are_not(factor, low, full):
    stores, part, _, _ = stage()
    correction = Extrapolation([part], stores, takes_gradients=False)
    views = step(stores, part, correction, Lead(factor))
    assert views[0].tolist() == low and views[1].tolist() == full
    (main,) = part.fp32_from_float16_groups[0]
    assert main.tolist() == [0.5, 1.5] and correction.main[stores.params[1]].tolist() == [3.5]


def test_without_extrapolation_the_step_writes_the_true_weights():
    stores, part, _, _ = stage()
    correction = Extrapolation([part], stores, takes_gradients=False)
    views = step(stores, part, correction, Lead())
    assert views[0].tolist() == [0.5, 1.5] and views[1].tolist() == [3.5]


def test_the_next_update_starts_from_the_true_weights():
    stores, part, _, _ = stage()
    correction = Extrapolation([part], stores, takes_gradients=False)
    step(stores, part, correction, Lead(1.0))
    views = step(stores, part, correction, Lead(1.0), update=-1.0)
    assert views[0].tolist() == [2.5, 3.5] and views[1].tolist() == [5.5]


def test_a_skipped_step_leaves_the_true_weights_in_the_store():
    stores, part, _, _ = stage()
    correction = Extrapolation([part], stores, takes_gradients=False)
    step(stores, part, correction, Lead(1.0))
    part.target = stores.reserve({stores.newest})
    views = stores.views(part.target)
    correction.before_step(views, Lead(1.0))
    correction.write_true(views)
    assert views[0].tolist() == [0.5, 1.5] and views[1].tolist() == [3.5]
    stores.commit(part.target, True)
    views = step(stores, part, correction, Lead(1.0))
    assert views[0].tolist() == [-0.5, 0.5], "nothing is left of the skipped one"


def test_the_update_is_taken_in_fp32():
    """An update that bf16 weights do not show is there twice over."""
    stores, part, _, _ = stage()
    correction = Extrapolation([part], stores, takes_gradients=False)
    views = step(stores, part, correction, Lead(1.0), update=2.0**-9 * 1.5)
    assert views[0][0] == torch.tensor(1 - 2.0**-8 * 1.5).bfloat16() != torch.tensor(1 - 2.0**-9 * 1.5).bfloat16()


@pytest.mark.parametrize(
    "then, now, text",
    [
        (None, None, ""),
        ("0.5", Correction(Factor(0.5)), ""),
        (0.5, Correction(Factor(0.5)), ""),  # as earlier versions saved it
        (None, Correction(Factor(1.0)), ": not extrapolated at first, extrapolated by 1 from then on"),
        ("1", None, ": extrapolated by 1 at first, not extrapolated from then on"),
        (
            1.0,
            Correction(Factor(1.0), 2),
            ": extrapolated by 1 at first, extrapolated by 1 and gradient 2 from then on",
        ),
    ],
)
def test_the_log_tells_a_resumed_run_whose_first_weights_differ(then, now, text):
    assert resume_note(then, now) == text


@pytest.mark.parametrize(
    "named, expected",
    [
        (dict(optimizer="adam", adam_beta1=0.49), "--adam-beta1 0.49"),
        (dict(optimizer="sgd", sgd_momentum=0.0), "--sgd-momentum 0"),
        (dict(optimizer="muon", muon_momentum=0.3), "Give --two-bw-correction auto"),
        (dict(optimizer="sgd", sgd_momentum=0.0, adam_beta1=0.9), "--sgd-momentum 0"),  # Adam's has no say in it
        (dict(optimizer="adam", adam_beta1=0.5), None),
        (dict(optimizer="adam", adam_beta1=0.3, two_bw_correction_factor="0.6"), None),
        (dict(optimizer="adam", adam_beta1=0.3, two_bw_correction_factor="0.6:linear:1"), "--adam-beta1 0.3"),
        (dict(optimizer="adam", adam_beta1=0.3, two_bw_correction="auto"), None),
        (dict(optimizer="adam", adam_beta1=0.3, two_bw_correction="none"), None),
        (dict(optimizer="soap", adam_beta1=0.1), "--adam-beta1 0.1"),
        (dict(optimizer="lion", adam_beta1=0.1), None),  # its update is a sign, and another mean's
    ],
)
def test_too_little_momentum_is_told(named, expected):
    line = warning(Namespace(**(dict(two_bw_correction="extrapolate", two_bw_correction_factor="1") | named)))
    assert (line is None) if expected is None else (expected in line and "\n" not in line)


@pytest.mark.parametrize(
    "schedule, given, start, words",
    [
        ("2bw", "none", 0, "--two-bw-correction auto recovers"),
        ("2bw", "auto", 0, "auto: factor 1.5 and gradient 2, --adam-beta1 0.9 (0.95 bears higher learning rates)"),
        ("2bw", "extrapolate", 0, None),
        ("2bw", "none", 3, None),
        ("2bw", "none", "20%", None),
        ("pipedream-flush", "none", 0, None),
        ("megatron", "none", 0, None),
    ],
)
def test_a_run_has_a_line_on_what_it_does_against_the_delay(schedule, given, start, words):
    named = dict(pipeline_schedule=schedule, two_bw_correction=given, two_bw_sync_iterations=start)
    line = note(Namespace(**named, optimizer="adam", adam_beta1=0.9))
    assert (line is None) if words is None else (words in line and "\n" not in line)


@pytest.mark.parametrize(
    "given, said",
    [
        ({}, "--lr-warmup-iters 20"),
        (dict(lr_warmup_iters=0), "--lr-warmup-iters 0"),
        (dict(lr_warmup_iters=99), "--lr-warmup-iters 99"),
        (dict(lr_warmup_iters=100), None),
        (dict(lr_warmup_iters=0, lr_warmup_fraction=0.01), "--lr-warmup-fraction 0.01"),
        (dict(lr_warmup_iters=0, lr_warmup_fraction=0.2), None),
        (dict(lr_warmup_iters=0, lr_warmup_fraction=0.2, lr_decay_iters=100), "--lr-warmup-fraction 0.2"),
        (dict(lr_warmup_iters=0, lr_warmup_fraction=0.01, lr_decay_samples=80000), None),
        (dict(lr_warmup_iters=0, lr_warmup_samples=792), "--lr-warmup-samples 792"),
        (dict(lr_warmup_iters=0, lr_warmup_samples=800), None),
        (dict(train_iters=None, train_samples=4000), "--lr-warmup-iters 20"),
        (dict(train_iters=None, train_samples=1592), None),  # 199 iterations
        (dict(two_bw_sync_iterations="20%"), None),
        (dict(two_bw_sync_iterations=25), "--lr-warmup-iters 20"),
        (dict(lr=1e-4), None),
        (dict(load="checkpoints"), None),
        (dict(pretrained_checkpoint="bert"), None),
        (dict(pipeline_schedule="pipedream-flush"), None),
    ],
)
def test_a_short_warmup_has_a_line(given, said):
    named = dict(pipeline_schedule="2bw", lr=1e-3, train_iters=500, train_samples=None, global_batch_size=8)
    named |= dict(micro_batch_size=1, two_bw_sync_iterations=0, load=None, pretrained_checkpoint=None)
    named |= dict(lr_warmup_iters=20, lr_warmup_samples=0, lr_warmup_fraction=None)
    line = short_warmup(Namespace(**named | dict(lr_decay_iters=None, lr_decay_samples=None) | given))
    assert (line is None) if said is None else (line.startswith(f"WARNING: {said}: ") and "\n" not in line)


@pytest.mark.parametrize(
    "given, expected",
    [
        (dict(two_bw_correction="none"), None),
        (dict(two_bw_correction="auto"), Correction(Factor(1.5), 2.0)),
        (dict(two_bw_correction="auto", adam_beta1=0.5), Correction(Factor(0.5))),
        (dict(two_bw_correction="auto", optimizer="sgd", sgd_momentum=0.0), Correction(Factor(0.0))),
        (dict(two_bw_correction="auto", optimizer="muon", muon_scalar_optimizer="adam"), Correction(Factor(1.5), 2.0)),
        (dict(two_bw_correction="auto", optimizer="muon", muon_scalar_optimizer="lion"), Correction(Factor(1.5))),
        (dict(two_bw_correction="extrapolate"), Correction(Factor(1.0))),
        (
            dict(two_bw_correction="extrapolate", two_bw_correction_factor="1.5:cosine:0.9"),
            Correction(Factor(1.5, "cosine", 0.9)),
        ),
        (
            dict(two_bw_correction="extrapolate", two_bw_correction_factor="0.5", two_bw_correction_gradient=3.0),
            Correction(Factor(0.5), 3.0),
        ),
    ],
)
def test_what_the_flags_stand_for(given, expected):
    named = dict(two_bw_correction_factor="1", two_bw_correction_gradient=0.0, optimizer="adam", adam_beta1=0.9)
    named["muon_momentum"] = 0.95
    assert correction(Namespace(**named | given)) == expected


def test_schedules_of_the_factor():
    assert [Factor(0.7).at(share) for share in (0, 0.3, 1)] == [0.7] * 3
    assert [Factor(1.5, "linear", 0.5).at(share) for share in (0, 0.25, 1)] == [1.5, 1.25, 0.5]
    assert [Factor(0.5, "cosine", 1.5).at(share) for share in (0, 0.5, 1)] == pytest.approx([0.5, 1, 1.5])


@pytest.mark.parametrize(
    "text", ["x", "", "2.1", "-1", "nan", "inf", "1:cosine", "1:sine:0.5", "1:cosine:3", "1:2", "1:"]
)
def test_a_wrong_factor_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be"):
        factor(text)


@pytest.mark.parametrize("make, part", [(torch.optim.AdamW, 0.1), (torch.optim.SGD, 1.0)])
def test_the_gradient_term_is_the_last_gradients_part_of_the_update(make, part):
    options = dict(betas=(0.9, 0.95), weight_decay=0.0) if part < 1 else dict(momentum=0.9)
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(2, 2))]
    optimizer = make(params, lr=0.5, **options)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    group = optimizer.param_groups[0]
    working = [torch.zeros_like(param) for param in params]
    add_gradients(optimizer, group, params, working, 1.0)
    for param, found in zip(params, working):
        below = 1.0
        if part < 1:
            state = optimizer.state[param]
            below = (state["exp_avg_sq"] / (1 - 0.95**3)).sqrt() + 1e-8
        torch.testing.assert_close(found, -0.5 * part * param.grad / below)


def test_denominators_exist_for_a_few_elements_at_a_time():
    tensors = [torch.zeros(size) for size in (3, 1, 2, 9, 1)]
    cut = portions(tensors, torch.Tensor.numel, 4)
    assert [[tensor.numel() for tensor in some] for some in cut] == [[3, 1], [2], [9], [1]]
    assert list(portions([], torch.Tensor.numel, 4)) == []


@pytest.mark.parametrize(
    "given, expected",
    [
        (dict(two_bw_sync_iterations=7), 7),
        (dict(two_bw_sync_iterations="20%"), 201),  # of 1009
        (dict(two_bw_sync_iterations="0%"), 0),
        (dict(two_bw_sync_iterations="100%"), 1009),
        (dict(two_bw_sync_iterations="20%", train_iters=None, train_samples=4000), 100),  # of 500 batches
        (dict(two_bw_sync_iterations="50%", train_iters=None, train_samples=8, global_batch_size=None), 2),
    ],
)
def test_a_synchronous_start_as_a_share_of_the_run(given, expected):
    sizes = dict(train_iters=1009, train_samples=None, micro_batch_size=2, global_batch_size=8)
    assert sync_iterations(Namespace(**sizes | given)) == expected
