"""The check of a loss: the host looks at it when the next one is launched."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_2bw.run.tasks import common


@pytest.fixture
def losses(monkeypatch):
    """A check of losses of a GPU that computes each one when the host waits for it;
    `waited` lists these."""
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    machine = RerunStateMachine(mode=RerunMode.DISABLED)
    args = SimpleNamespace(
        check_for_nan_in_loss_and_grad=True,
        rerun_mode="disabled",
        curr_iteration=6,
    )
    waited = []
    numbers = itertools.count()

    class Event:
        def record(self) -> None:
            self.number = next(numbers)

        def synchronize(self) -> None:
            waited.append(self.number)

    def answer(module, name: str, value: object) -> None:
        monkeypatch.setattr(module, name, mock.Mock(return_value=value))

    answer(common, "get_args", args)
    answer(common, "get_num_microbatches", 3)
    answer(common, "get_rerun_state_machine", machine)
    answer(torch.cuda, "current_device", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return SimpleNamespace(check=common.LossCheck().check, waited=waited)


def a_loss(value: float = 1.0, training: bool = True) -> torch.Tensor:
    return torch.tensor(value, requires_grad=training) * 1


def test_the_host_waits_for_a_loss_when_the_next_one_is_launched(losses):
    """In an evaluation at once: no backward is launched after it."""
    counts = []
    for training in (True, True, True, False, False, True, True, True):
        losses.check(a_loss(training=training))
        counts.append(len(losses.waited))
    assert counts == [0, 1, 3, 4, 5, 5, 6, 8]
    assert losses.waited == list(range(8))


@pytest.mark.parametrize(
    "value, name, microbatch", [(float("nan"), "NaN", 0), (float("inf"), "Inf", 2)]
)
def test_a_loss_that_is_not_finite_ends_the_run_within_its_batch(
    microbatch, value, name, losses
):
    message = (
        rf"iteration 7: Unexpected result {str(value)}.*found {name} in local forward "
        r"loss calculation"
    )
    with pytest.raises(RuntimeError, match=message):
        for number in range(3):
            losses.check(a_loss(value if number == microbatch else 1.0))
    assert len(losses.waited) == microbatch + 1, "no later loss was looked at"
