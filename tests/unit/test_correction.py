"""Extrapolated weights by hand: what a step writes to the weight store, and that main parameters stay the true ones."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from megatron_2bw.core.weights import WeightStores
from megatron_2bw.flags.own import sync_iterations
from megatron_2bw.mcore.extrapolation import Extrapolation, resume_note, uncorrected, warning


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


def step(stores, part, correction, extrapolate: bool, update: float = 0.5) -> list[torch.Tensor]:
    """Both parameters change by -update; returns what is in the store then."""
    part.target = stores.reserve({stores.newest})
    views = stores.views(part.target)
    correction.before_step(views, extrapolate)
    for main in correction.main.values():  # as Megatron's optimizer would, in place
        main.sub_(update)
    part.step(update)
    correction.after_step(views)
    stores.commit(part.target, True)
    return views


@pytest.mark.parametrize(
    "factor, low, full", [(1.0, [0.0, 1.0], [3.0]), (0.5, [0.25, 1.25], [3.25]), (0.0, [0.5, 1.5], [3.5])]
)
def test_the_store_is_ahead_by_the_factor_of_the_update_and_the_main_parameters_are_not(factor, low, full):
    stores, part, _, _ = stage()
    correction = Extrapolation([part], stores, factor)
    views = step(stores, part, correction, extrapolate=True)
    assert views[0].tolist() == low and views[1].tolist() == full
    (main,) = part.fp32_from_float16_groups[0]
    assert main.tolist() == [0.5, 1.5] and correction.main[stores.params[1]].tolist() == [3.5]


def test_without_extrapolation_the_step_writes_the_true_weights():
    stores, part, _, _ = stage()
    correction = Extrapolation([part], stores, 1.0)
    views = step(stores, part, correction, extrapolate=False)
    assert views[0].tolist() == [0.5, 1.5] and views[1].tolist() == [3.5]


def test_the_next_update_starts_from_the_true_weights():
    stores, part, _, _ = stage()
    correction = Extrapolation([part], stores, 1.0)
    step(stores, part, correction, extrapolate=True)
    views = step(stores, part, correction, extrapolate=True, update=-1.0)
    assert views[0].tolist() == [2.5, 3.5] and views[1].tolist() == [5.5]


def test_a_skipped_step_leaves_the_true_weights_in_the_store():
    stores, part, _, _ = stage()
    correction = Extrapolation([part], stores, 1.0)
    step(stores, part, correction, extrapolate=True)
    part.target = stores.reserve({stores.newest})
    views = stores.views(part.target)
    correction.before_step(views, True)
    correction.write_true(views)
    assert views[0].tolist() == [0.5, 1.5] and views[1].tolist() == [3.5]
    stores.commit(part.target, True)
    views = step(stores, part, correction, extrapolate=True)
    assert views[0].tolist() == [-0.5, 0.5], "nothing is left of the skipped one"


def test_the_update_is_taken_in_fp32():
    """An update that bf16 weights do not show is there twice over."""
    stores, part, _, _ = stage()
    correction = Extrapolation([part], stores, 1.0)
    views = step(stores, part, correction, extrapolate=True, update=2.0**-9 * 1.5)
    assert views[0][0] == torch.tensor(1 - 2.0**-8 * 1.5).bfloat16() != torch.tensor(1 - 2.0**-9 * 1.5).bfloat16()


@pytest.mark.parametrize(
    "then, now, text",
    [
        (None, None, ""),
        (0.5, 0.5, ""),
        (None, 1.0, ": not extrapolated at first, extrapolated by 1 of an update from then on"),
        (1.0, None, ": extrapolated by 1 of an update at first, not extrapolated from then on"),
        (1.0, 0.5, ": extrapolated by 1 of an update at first, extrapolated by 0.5 of an update from then on"),
    ],
)
def test_the_log_tells_a_resumed_run_whose_first_weights_differ(then, now, text):
    assert resume_note(then, now) == text


@pytest.mark.parametrize(
    "named, expected",
    [
        (dict(optimizer="adam", adam_beta1=0.49), "--adam-beta1 0.49"),
        (dict(optimizer="sgd", sgd_momentum=0.0), "--sgd-momentum 0"),
        (dict(optimizer="muon", muon_momentum=0.3), "--two-bw-correction-factor 0.3"),
        (dict(optimizer="sgd", sgd_momentum=0.0, adam_beta1=0.9), "--sgd-momentum 0"),  # Adam's has no say in it
        (dict(optimizer="adam", adam_beta1=0.5), None),
        (dict(optimizer="adam", adam_beta1=0.3, two_bw_correction_factor=0.6), None),
        (dict(optimizer="adam", adam_beta1=0.3, two_bw_correction="none"), None),
        (dict(optimizer="soap", adam_beta1=0.1), "--adam-beta1 0.1"),
        (dict(optimizer="lion", adam_beta1=0.1), None),  # its update is a sign, and another mean's
    ],
)
def test_too_little_momentum_is_told(named, expected):
    line = warning(Namespace(**(dict(two_bw_correction="extrapolate", two_bw_correction_factor=1.0) | named)))
    assert (line is None) if expected is None else (expected in line and "\n" not in line)


@pytest.mark.parametrize(
    "schedule, correction, start, noted",
    [
        ("2bw", "none", 0, True),
        ("2bw", "extrapolate", 0, False),
        ("2bw", "none", 3, False),
        ("2bw", "none", "20%", False),
        ("pipedream-flush", "none", 0, False),
        ("megatron", "none", 0, False),
    ],
)
def test_a_run_without_an_option_against_the_delay_has_a_line_with_the_flags(schedule, correction, start, noted):
    line = uncorrected(
        Namespace(pipeline_schedule=schedule, two_bw_correction=correction, two_bw_sync_iterations=start)
    )
    assert (line is not None) == noted
    assert not noted or "--two-bw-correction extrapolate --two-bw-sync-iterations 20%" in line and "\n" not in line


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
