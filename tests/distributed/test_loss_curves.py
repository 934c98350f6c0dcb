"""Short trainings with a fixed seed: 2BW's loss stays in a band around its recorded curve, and the corrections pay.

Megatron's mock data are sequences that can be learned, so a hundred iterations take the loss from 4.9 to 0.1. Where
that is fast, late gradients cost much. Print the curves, to record them again, with

    python -m tests.distributed.test_loss_curves
"""

from __future__ import annotations

import pytest
import torch

from megatron_2bw.local_ranks import run_world
from tests.distributed.training import command, train
from tests.session import once_a_session

WINDOW = 20  # iterations that a number of a curve is the mean of
VARIANTS = {
    "vanilla": (1, "pipedream-flush", {}),
    "2bw": (2, "2bw", {}),
    "2bw+extrapolate": (2, "2bw", dict(two_bw_correction="extrapolate")),
    "2bw+auto": (2, "2bw", dict(two_bw_correction="auto", adam_beta1=0.9)),  # vanilla's beta1
    "2bw+both": (2, "2bw", dict(two_bw_correction="extrapolate", two_bw_sync_iterations=2 * WINDOW)),
}
RECORDED = {
    "vanilla": [4.5736, 2.6659, 1.0817, 0.4344, 0.2213],
    "2bw": [4.71, 3.2775, 1.8585, 1.0006, 0.528],
    "2bw+extrapolate": [4.6211, 2.9075, 1.3685, 0.6105, 0.3044],
    "2bw+auto": [4.552, 2.7355, 1.1505, 0.4643, 0.2354],
    "2bw+both": [4.5736, 2.6659, 1.1684, 0.5065, 0.2539],
}
BAND = 0.05  # of the recorded loss; one stage or two, which add in another order, agree to four digits


@once_a_session
def curve(variant: str) -> list[float]:
    stages, schedule, more = VARIANTS[variant]
    argv = command(
        stages,
        2,
        schedule,
        num_layers=2,
        hidden_size=64,
        seq_length=32,
        max_position_embeddings=32,
        train_iters=100,
        lr=3e-3,
        min_lr=3e-4,
        lr_decay_style="cosine",
        lr_warmup_iters=WINDOW,
        log_interval=50,
        **more,
    )
    losses = torch.stack(run_world(stages, train, argv)[-1].losses)
    return losses.view(-1, WINDOW).mean(dim=1).tolist()


def late(variant: str) -> float:
    """Mean loss after the first windows, by how much it is above vanilla's."""
    mean = {name: sum(curve(name)[2:]) / 3 for name in (variant, "vanilla")}
    return mean[variant] - mean["vanilla"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_stays_in_a_band_around_the_recorded_curve(variant):
    assert curve(variant) == pytest.approx(RECORDED[variant], rel=BAND)


def test_the_corrections_win_most_of_the_gap_back():
    plain = late("2bw")
    assert plain > 0.3, "late gradients cost nothing here: the comparison says nothing"
    assert late("2bw+extrapolate") < plain / 2
    assert late("2bw+both") < plain / 4
    assert late("2bw+auto") < plain / 10


if __name__ == "__main__":
    for name in VARIANTS:
        print(f'    "{name}": {[round(loss, 4) for loss in curve(name)]},', flush=True)
