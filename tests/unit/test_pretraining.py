"""The check of a loss: the host looks at it when the next one is launched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_2bw.tasks import common as pretraining


@pytest.fixture
def losses(monkeypatch):
    """A check of losses of a GPU that computes each one when the host waits for it; `waited` lists these."""
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    machine = RerunStateMachine(mode=RerunMode.DISABLED)
    machine.current_iteration = 7  # as Megatron's loop has it, after 6 iterations
    args = SimpleNamespace(
        check_for_nan_in_loss_and_grad=True, rerun_mode="disabled", check_for_spiky_loss=False, curr_iteration=6
    )
    waited: list[int] = []

    class Event:
        made = 0

        def record(self) -> None:
            self.number, Event.made = Event.made, Event.made + 1

        def synchronize(self) -> None:
            waited.append(self.number)

    for name, value in (
        ("get_args", lambda: args),
        ("get_num_microbatches", lambda: 3),
        ("get_rerun_state_machine", lambda: machine),
    ):
        monkeypatch.setattr(pretraining, name, value)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return SimpleNamespace(check=pretraining.LossCheck().check, waited=waited, args=args)


def a_loss(value: float = 1.0, training: bool = True) -> torch.Tensor:
    return torch.tensor(value, requires_grad=training) * 1


def test_the_host_waits_for_a_loss_when_the_next_one_is_launched(losses):
    counts = []
    for _ in range(6):
        losses.check(a_loss())
        counts.append(len(losses.waited))
    assert counts == [0, 1, 3, 3, 4, 6] and losses.waited == list(range(6))


def test_an_evaluation_does_not_move_the_ends_of_the_batches(losses):
    for _ in range(3):
        losses.check(a_loss())
    with torch.no_grad():
        for number in range(4):
            losses.check(a_loss())
            assert len(losses.waited) == 4 + number, "at once: no backward is launched after it"
    for seen in (7, 8, 10):
        losses.check(a_loss())
        assert len(losses.waited) == seen


@pytest.mark.parametrize("value, name", [(float("nan"), "NaN"), (float("inf"), "Inf")])
@pytest.mark.parametrize("microbatch", [0, 1, 2])
def test_a_loss_that_is_not_finite_ends_the_run_within_its_batch(microbatch, value, name, losses):
    message = rf"iteration 7: Unexpected result {str(value)}.*found {name} in local forward loss calculation"
    with pytest.raises(RuntimeError, match=message):
        for number in range(3):
            losses.check(a_loss(value if number == microbatch else 1.0))
    assert len(losses.waited) == microbatch + 1, "no later loss was looked at"


def test_losses_are_not_looked_at_without_the_flag(losses):
    losses.args.check_for_nan_in_loss_and_grad = False
    for _ in range(3):
        losses.check(a_loss(float("nan")))
    assert losses.waited == []


def test_what_is_kept_of_a_loss_holds_no_graph(losses):
    total = a_loss()
    losses.check(total)
    (kept, *_) = losses.check.__self__._unread
    assert kept.grad_fn is None and total.grad_fn is not None
