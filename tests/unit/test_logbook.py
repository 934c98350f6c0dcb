"""Log lines that wait for their step."""

from __future__ import annotations

import types

import pytest

from megatron_2bw import cpu


@pytest.fixture
def book(monkeypatch):
    cpu.install()
    from megatron_2bw import logbook

    args = types.SimpleNamespace(consumed_train_samples=0, skipped_train_samples=0, log_interval=2)
    timer = types.SimpleNamespace(elapsed=lambda: 1.5)
    monkeypatch.setattr(logbook, "get_args", lambda: args)
    monkeypatch.setattr(logbook, "get_timers", lambda: lambda name, log_level: timer)
    scalars = {}
    writer = types.SimpleNamespace(
        add_scalar=lambda name, value, step: scalars.setdefault(step, {}).update({name: value})
    )
    wandb = types.SimpleNamespace(log=lambda values, step: scalars.setdefault(("wandb", step), {}).update(values))
    monkeypatch.setattr(logbook, "get_tensorboard_writer", lambda: writer)
    monkeypatch.setattr(logbook, "get_wandb_writer", lambda: wandb)
    made = logbook.Logbook()
    yield types.SimpleNamespace(book=made, args=args, timer=timer, scalars=scalars)
    cpu.uninstall()


def outcome(batch: int, **changes):
    from megatron_2bw.optimizer import Outcome, StageReport

    stages = tuple(StageReport(waited, 10.0, memory * 2**30) for waited, memory in ((1.0, 2), (3.0, 4)))
    values = dict(stepped=True, grad_norm=0.5 + batch, zeros=None, loss_scale=8.0, learning_rate=0.1 * batch)
    return Outcome(batch, stages=stages, alarm=False, written=False, **values | changes)


def call(iteration: int) -> dict:
    return {"iteration": iteration, "is_first_iteration": iteration == 1, "loss_dict": {"lm loss": iteration}}


def test_a_line_waits_for_its_step_and_shows_its_values(book):
    lines = []

    def write(**values):
        lines.append((values, book.args.consumed_train_samples, book.book.line("")))
        return False

    book.args.consumed_train_samples = 8
    assert book.book.add(write, call(1)) is True and lines == []
    book.book.settled(outcome(0))
    book.args.consumed_train_samples = 16
    assert book.book.add(write, call(2)) is False
    ((values, samples, suffix),) = lines
    assert values["iteration"] == 1 and values["grad_norm"] == 0.5 and values["skipped_iter"] == 0 and samples == 8
    assert suffix == " bubble: 20.0%/30.0% | peak memory by stage (GiB): 2.00 4.00 |"
    book.book.settled(outcome(1, stepped=False, grad_norm=None, loss_scale=4.0))
    book.book.flush()
    values, samples, _ = lines[1]
    assert (values["iteration"], values["skipped_iter"], values["grad_norm"]) == (2, 1, None)
    assert (values["loss_scale"], samples) == (4.0, 16) and book.args.consumed_train_samples == 16
    assert book.book.line("other") == "other", "only Megatron's line gets the suffix"


def test_the_interval_timer_counts_the_iterations_of_the_line(book):
    """Two lines written at once: each shows the time of its own interval."""
    read = []

    def write(**values):
        if values["iteration"] % 2 == 0:
            read.append(book.timer.elapsed(barrier=True, reset=True))
        return True

    for iteration in range(1, 5):
        book.book.add(write, call(iteration))
        book.book.settled(outcome(iteration - 1))
    book.book.flush()
    assert read == [3.0, 3.0]


def test_shares_go_to_tensorboard_and_wandb(book):
    book.book.add(lambda **values: True, call(1))
    book.book.settled(outcome(0))
    book.book.flush()
    expected = {
        "bubble/mean": 0.2, "bubble/max": 0.3, "bubble/stage 0": 0.1, "bubble/stage 1": 0.3,
        "peak memory (GiB)/stage 0": 2.0, "peak memory (GiB)/stage 1": 4.0,
    }
    assert book.scalars[1] == pytest.approx(expected) and book.scalars["wandb", 1] == pytest.approx(expected)
