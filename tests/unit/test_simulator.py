"""Simulated times against closed forms; the lists are those that the runtime
executes."""

from __future__ import annotations

import random

import pytest

from megatron_2bw.schedules import SCHEDULES, Schedule, Shape, TwoBW, schedule_of
from megatron_2bw.schedules.interleaved import Interleaved
from megatron_2bw.tools.timelines.simulator import (
    Event,
    Times,
    iteration_time,
    long_iteration_time,
    simulate,
)


@pytest.mark.parametrize(
    "stages, microbatches, size, rounds",
    [(4, 8, 4, 2), (4, 8, 3, 3), (2, 5, 1, 5), (8, 64, 16, 4)],
)
def test_gpipe_in_rounds(stages, microbatches, size, rounds):
    """Each round has the bubble of d - 1 microbatches: (m + ceil(m / N)(d - 1))(t_f +
    t_b)."""
    found = iteration_time(schedule_of("gpipe", gpipe_round=size), stages, microbatches)
    assert found == (microbatches + rounds * (stages - 1)) * 3


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_pipedream_in_megatrons_loop(stages):
    """The loop compares the stages' norms after each batch, which costs (d - 1)t_b;
    measured so by bench/planner_accuracy.py."""
    times = Times(joint_step=True)
    assert iteration_time(
        SCHEDULES["pipedream"], stages, stages, times
    ) == 3 * stages + 2 * (stages - 1)


# --- times by stage
# --------------------------------------------------------------------------------------

FLUSH, GPIPE = SCHEDULES["pipedream-flush"], SCHEDULES["gpipe"]


def own(
    events: list[Event], stage: int, kinds: str = "FB"
) -> list[tuple[float, float]]:
    """(start, end) of a stage's actions of these kinds."""
    return [
        (event.start, event.end)
        for event in events
        if event.stage == stage and event.action.kind in kinds
    ]


@pytest.mark.parametrize("name", ["pipedream-flush", "gpipe"])
@pytest.mark.parametrize(
    "forward, backward",
    [
        ([1], [2]),
        ([1] * 8, [2] * 8),
        ([1, 3], [2, 4]),
        ([1, 1, 2], [1, 3, 3]),
        ([2, 1, 4, 5], [1, 2, 2, 3]),
    ],
)
def test_flush_with_the_slowest_stage_last(name, forward, backward):
    """The first microbatch comes down, the last stage works without a pause, the last
    gradient goes up. Of equal times that is (m + d - 1)(t_f + t_b): the bubble of d - 1
    microbatches (paper, section 2)."""
    down_and_up = sum(forward[:-1]) + sum(backward[:-1])
    for microbatches in (1, 4, 9):
        expected = down_and_up + microbatches * (forward[-1] + backward[-1])
        assert (
            iteration_time(
                SCHEDULES[name], len(forward), microbatches, Times(forward, backward)
            )
            == expected
        )


@pytest.mark.parametrize(
    "forward, backward",
    [([1], [2]), ([1, 4, 2], [3, 1, 3]), ([2, 1, 3, 1], [1, 4, 1, 2])],
)
def test_no_pipelining_adds_everything_up(forward, backward):
    """m times all stages' work and both ways over each boundary; the last boundary,
    back to stage 0, is not used."""
    boundaries = [0.5 * (stage + 1) for stage in range(len(forward))]
    times = Times(
        forward,
        backward,
        transfer=boundaries,
        reduce=[2] + [0] * (len(forward) - 1),
        step=4,
    )
    each = sum(forward) + sum(backward) + 2 * sum(boundaries[:-1])
    assert (
        iteration_time(SCHEDULES["no-pipelining"], len(forward), 3, times)
        == 3 * each + 2 + 4
    )


@pytest.mark.parametrize("name", ["2bw", "pipedream"])
@pytest.mark.parametrize(
    "forward, backward",
    [([1] * 8, [2] * 8), ([5, 1, 1], [1, 1, 3]), ([1, 2, 1, 1], [2, 4, 1, 3])],
)
def test_without_flush_the_busiest_stage_never_waits(name, forward, backward):
    for microbatches in (len(forward), 2 * len(forward) + 1):
        busiest = max(f + b for f, b in zip(forward, backward))
        times = Times(forward, backward)
        assert (
            iteration_time(SCHEDULES[name], len(forward), microbatches, times)
            == microbatches * busiest
        )


# --- messages
# --------------------------------------------------------------------------------------


def test_a_boundary_carries_one_message_at_a_time():
    """Outputs are there at 1, 2, 3; the boundary takes them at 1, 3, 5 and delivers at
    4, 6, 8."""
    events = simulate(GPIPE, Shape(2, 3, 0, 1), Times(1, 1, transfer=3, occupied=2))
    assert own(events, 1, "F") == [(4, 5), (6, 7), (8, 9)]
    assert own(events, 0, "B") == [(13, 14), (15, 16), (17, 18)]  # sent at 10, 12, 14


def test_the_last_boundary_leads_from_the_last_stage_to_the_first():
    """Chunk 1 of stage 0 follows chunk 0 of stage 1, over boundary 1."""
    events = simulate(
        Interleaved(2), Shape(2, 2, 0, 1), Times(2, 2, transfer=[10, 100])
    )
    forwards = [
        (event.action[3], event.stage, event.start)
        for event in events
        if event.action.kind == "F"
    ]
    expected = [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 11),
        (0, 1, 12),
        (1, 0, 112),
        (1, 0, 113),
        (1, 1, 123),
        (1, 1, 125),
    ]
    assert sorted(forwards) == expected  # a backward stands between the last two


def test_sending_takes_the_senders_time():
    """The message leaves when its action ends, and the sender is busy with it for a
    while."""
    events = simulate(
        GPIPE, Shape(2, 2, 0, 1), Times(1, 2, transfer=1, sending=[0.5, 0])
    )
    assert own(events, 0, "F") == [(0, 1), (1.5, 2.5)]
    # a gradient pays the same at the boundary
    assert own(events, 1) == [(2, 3), (3.5, 4.5), (4.5, 6.5), (7, 9)]


# --- reduce, step, overlap cost
# --------------------------------------------------------------------------------------


def test_the_step_waits_for_the_slowest_reduction():
    """Stage 1 is done at 5, stage 0 at 7."""
    by_stage = [
        ((0, 0), 7),
        ((0, 1), 7),
        ((0, 2), 7),
        ((0, 5), 10),
        ((3, 5), 10),
        ((4, 5), 11),
    ]
    for reduce, ready in by_stage:
        assert (
            iteration_time(GPIPE, 2, 1, Times([1, 2], [2, 2], reduce=reduce, step=0.5))
            == ready + 0.5
        )


def test_pipedreams_stages_reduce_and_step_alone():
    times = Times(1, 2, reduce=0.5, step=0.25)
    assert iteration_time(SCHEDULES["pipedream"], 2, 4, times) == 4 * 3 + 0.75
    steps = [
        event
        for event in simulate(SCHEDULES["pipedream"], Shape(2, 4, 0, 1), times)
        if event.action.kind == "S"
    ]
    assert steps[0].end < steps[1].end  # the last stage does not wait for the first


@pytest.mark.parametrize(
    "stages, microbatches",
    [(1, 1), (2, 2), (2, 4), (2, 5), (3, 7), (4, 4), (4, 8), (8, 20)],
)
def test_a_late_step_costs_what_exceeds_its_window(stages, microbatches):
    """With t_f = 1, t_b = 2: max(m·3, reduce + step + max((d - 1)·3, d·2)).

    The reduction starts after the batch's last backward on stage 0. It has until the
    first forward of batch j + 2 there, d - 1 pairs before the end of batch j + 1, or
    until the last backward on the last stage, d - 1 of them before stage 0's.
    """
    iteration, rest = microbatches * 3, max((stages - 1) * 3, stages * 2)
    for together in (
        0,
        1,
        iteration - rest,
        iteration - rest + 1,
        iteration,
        5 * iteration,
    ):
        for step in (0, together / 2, together):
            times = Times(1, 2, reduce=together - step, step=step)
            expected = max(iteration, together + rest)
            assert iteration_time(
                SCHEDULES["2bw"], stages, microbatches, times
            ) == pytest.approx(expected)


@pytest.mark.parametrize("stages, microbatches", [(2, 2), (2, 5), (3, 7), (4, 8)])
def test_one_gradient_slot_waits_for_reduce_and_step(stages, microbatches):
    """m(t_f + t_b) + (d - 1)t_b - t_f: the last stage waits for the first one's last
    backward, one forward later; and for all of both."""
    alone = microbatches * 3 + (stages - 1) * 2 - 1
    for reduce, step in [(0, 0), (1, 0), (0, 2), (3, 0.5)]:
        times = Times(1, 2, reduce=reduce, step=step)
        assert (
            iteration_time(TwoBW(1), stages, microbatches, times)
            == alone + reduce + step
        )


def test_the_overlap_cost_is_the_stages_own_time():
    for cost in (0.5, [0.5, 0.5], [0.5, 0]):
        assert (
            iteration_time(SCHEDULES["2bw"], 2, 4, Times(1, 2, overlap_cost=cost))
            == 4 * 3 + 0.5
        )
    # stage 1, the busiest, is ahead of stage 0 by one
    for cost, expected in [([0, 5], 5), ([1, 0], 0), ([5, 0], 4)]:
        assert (
            iteration_time(SCHEDULES["2bw"], 2, 4, Times([1, 2], 2, overlap_cost=cost))
            == 4 * 4 + expected
        )


# --- chunks
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("virtual", [2, 3, 4])
@pytest.mark.parametrize("stages, groups", [(2, 1), (2, 3), (3, 2), (4, 1), (4, 4)])
def test_interleaved(virtual, stages, groups):
    """(m·v + d - 1)(t_f + t_b)/v (arXiv 2104.04473, section 2.2)."""
    times, microbatches = Times(virtual, 2 * virtual), groups * stages
    expected = (microbatches * virtual + stages - 1) * 3
    assert iteration_time(Interleaved(virtual), stages, microbatches, times) == expected
    assert (
        long_iteration_time(Interleaved(virtual), stages, microbatches, times)
        == expected
    )


# --- the time of one iteration, and of a long one
# --------------------------------------------------------------------------------------

EVERY = [
    TwoBW(2),
    TwoBW(1),
    *(SCHEDULES[n] for n in ("pipedream-flush", "gpipe", "no-pipelining", "pipedream")),
    *(schedule_of("gpipe", gpipe_round=size) for size in (1, 3, 16)),
    Interleaved(2),
    Interleaved(3),
]


def label(schedule: Schedule) -> str:
    chunks = schedule.chunks if schedule.chunks > 1 else ""
    return f"{schedule.name}{getattr(schedule, 'gradient_slots', '')}{schedule.round or ''}{chunks}"


def random_case(
    schedule: Schedule, number: int, most: int
) -> tuple[Schedule, int, int, Times]:
    """A schedule, stages, up to `most` microbatches a stage, and times that differ by
    stage."""
    pick = random.Random(number)
    stages = pick.choice([2, 3, 4, 5])
    microbatches = (
        stages * pick.randint(1, most)
        if schedule.chunks > 1
        else pick.randint(stages, most * stages)
    )

    def each(least: float, greatest: float) -> list[float]:
        return [pick.uniform(least, greatest) for _ in range(stages)]

    transfer = each(0, pick.choice([0, 0.3, 1]))
    share = pick.choice([0, 0.5, 1])
    update = pick.choice([0, 1, 10, 40])  # of which 40 exceed most windows
    return (
        schedule,
        stages,
        microbatches,
        Times(
            each(0.3, 2),
            each(0.5, 4),
            transfer=transfer,
            occupied=[share * time for time in transfer],
            sending=each(0, pick.choice([0, 0.3])),
            reduce=pick.uniform(0, update),
            step=pick.uniform(0, update),
            overlap_cost=each(0, 1) if schedule.late_step else 0.0,
        ),
    )


@pytest.mark.parametrize("schedule", EVERY, ids=label)
def test_iteration_time_is_the_rate_of_many(schedule):
    """Exactly, where every batch waits for the step of the last; without that messages
    of several batches can keep a rhythm of more than the iterations that are measured,
    which is small as long as messages are short."""
    exact = schedule.flushes or getattr(schedule, "gradient_slots", 2) == 1
    for number in range(12):
        case = random_case(schedule, number, 3)
        events = simulate(schedule, Shape(*case[1:3], 0, 40), case[3])
        ends = [
            event.end
            for event in events
            if event.stage == case[1] - 1 and event.action.kind == "S"
        ]
        rate = (ends[38] - ends[14]) / 24
        assert iteration_time(*case) == pytest.approx(
            rate, rel=1e-9 if exact else 0.02
        ), case


@pytest.mark.parametrize("schedule", EVERY, ids=label)
def test_a_long_iteration_is_extrapolated(schedule):
    for number in range(60):
        case = random_case(schedule, number, 9)
        assert long_iteration_time(*case) == pytest.approx(
            iteration_time(*case), rel=0.01
        ), case


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 1.0])
def test_messages_add_themselves_to_2bw_unless_more_forwards_run_ahead(stages, share):
    """t_c of a message, c of a microbatch's forward and backward: c + 2(d-1)/d t_c a
    microbatch as in 1F1B; with k more forwards ahead over each boundary just c, as long
    as 2 t_c <= k c."""
    microbatches, cycle = 4 * stages, 3.0
    times = Times(1, 2, transfer=share * cycle, occupied=share * cycle)
    plain = iteration_time(TwoBW(), stages, microbatches, times)
    assert plain == pytest.approx(
        microbatches * cycle * (1 + 2 * (stages - 1) / stages * share)
    )
    hidden = [
        iteration_time(TwoBW(2, (k,)), stages, microbatches, times) for k in (1, 2)
    ]
    assert hidden[1] == pytest.approx(microbatches * cycle)
    assert (hidden[0] == pytest.approx(microbatches * cycle)) == (2 * share <= 1)
