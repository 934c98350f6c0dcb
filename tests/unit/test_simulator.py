"""Simulated times against closed forms; the lists are those that the runtime executes."""

from __future__ import annotations

import pytest

from megatron_2bw.schedules import SCHEDULES, Action, Schedule, Shape, TwoBW, parse
from megatron_2bw.simulator import Times, iteration_time, makespan, simulate
from megatron_2bw.timeline import draw

SHAPES = [(1, 1), (2, 2), (2, 5), (4, 4), (4, 9), (8, 8)]


@pytest.mark.parametrize("stages, microbatches", SHAPES)
@pytest.mark.parametrize("name", ["pipedream-flush", "gpipe"])
def test_flush(name, stages, microbatches):
    """(m + d - 1)(t_f + t_b): the bubble of d - 1 microbatches (paper, section 2)."""
    assert iteration_time(SCHEDULES[name], stages, microbatches) == (microbatches + stages - 1) * 3


@pytest.mark.parametrize("stages, microbatches", SHAPES)
def test_no_pipelining(stages, microbatches):
    assert iteration_time(SCHEDULES["no-pipelining"], stages, microbatches) == microbatches * stages * 3


@pytest.mark.parametrize("stages, microbatches", SHAPES)
def test_2bw_has_no_bubble(stages, microbatches):
    """m(t_f + t_b), with m = d too: the step's quantities are there before it is due (design, rule 5)."""
    assert iteration_time(SCHEDULES["2bw"], stages, microbatches) == microbatches * 3


@pytest.mark.parametrize("stages, microbatches", [(2, 2), (2, 5), (4, 4), (4, 9), (8, 8)])
def test_one_gradient_slot_waits(stages, microbatches):
    """m(t_f + t_b) + (d - 1)t_b - t_f: the last stage waits for the first one's last backward, one forward later."""
    assert iteration_time(TwoBW(1), stages, microbatches) == microbatches * 3 + (stages - 1) * 2 - 1


@pytest.mark.parametrize("stages, microbatches", [(2, 2), (4, 4), (8, 8)])
def test_a_step_at_the_batch_boundary_would_wait(stages, microbatches):
    """m(t_f + t_b) + (d - 1)t_b: two thirds of the flush's bubble, which the late step takes away."""

    class Blocking(TwoBW):
        def actions(self, shape, stage, iteration):
            rest = [action for action in super().actions(shape, stage, iteration) if action.kind != "S"]
            return [*rest, Action("S", iteration, iteration + 1)]

    assert iteration_time(Blocking(), stages, microbatches) == microbatches * 3 + (stages - 1) * 2


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_pipedream_has_no_bubble(stages):
    """Its stages step alone, so nothing waits once the pipeline is full."""
    assert iteration_time(SCHEDULES["pipedream"], stages, 2 * stages) == 2 * stages * 3


def test_transfers_and_steps_take_time():
    schedule, times = SCHEDULES["pipedream-flush"], Times(1, 2, transfer=0.5, step=4)
    assert iteration_time(schedule, 2, 1, times) == 2 * 3 + 2 * 0.5 + 4


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_happens_once_and_stages_do_one_thing_at_a_time(name):
    shape = Shape(3, 4, 0, 3)
    events = simulate(SCHEDULES[name], shape)
    for stage in range(3):
        own = [event for event in events if event.stage == stage]
        lists = [action for j in range(3) for action in SCHEDULES[name].actions(shape, stage, j)]
        assert sorted(event.action for event in own) == sorted(lists)
        busy = sorted((event.start, event.end) for event in own)
        assert all(before[1] <= after[0] for before, after in zip(busy, busy[1:]))
    assert makespan(events) == max(event.end for event in events)


def test_deadlock_is_reported():
    class Crossed(Schedule):
        name, flushes = "crossed", True

        def actions(self, shape, stage, iteration):
            return parse("B0@0 F0@0") if stage == 0 else parse("F0@0 B0@0")

    with pytest.raises(ValueError, match=r"crossed deadlocks: stages \[0, 1\]"):
        simulate(Crossed(), Shape(2, 1, 0, 1))


def test_draw(tmp_path):
    draw([SCHEDULES["2bw"], SCHEDULES["gpipe"]], 3, 3, 2, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes()[:4] == b"\x89PNG"
