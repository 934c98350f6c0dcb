"""Simulated times against closed forms; the lists are those that the runtime
executes."""

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
    [(4, 8, 4, 2), (4, 8, 3, 3), (2, 5, 1, 5)],
)
def test_gpipe_in_rounds(stages, microbatches, size, rounds):
    """Each round has the bubble of d - 1 microbatches: (m + ceil(m / N)(d - 1))(t_f +
    t_b)."""
    schedule = schedule_of("gpipe", gpipe_round=size)
    expected = (microbatches + rounds * (stages - 1)) * 3
    assert iteration_time(schedule, stages, microbatches) == expected


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_pipedream_in_megatrons_loop(stages):
    """The loop compares the stages' norms after each batch, which costs (d - 1)t_b;
    measured so by bench/schedule_efficiency.py."""
    times = Times(joint_step=True)
    expected = 3 * stages + 2 * (stages - 1)
    assert iteration_time(SCHEDULES["pipedream"], stages, stages, times) == expected


# --- times by stage
# --------------------------------------------------------------------------------------

GPIPE = SCHEDULES["gpipe"]


def own(events: list[Event], stage: int, kinds: str) -> list[tuple[float, float]]:
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
        ([1, 1, 2], [1, 3, 3]),
        ([2, 1, 4, 5], [1, 2, 2, 3]),
    ],
)
def test_flush_with_the_slowest_stage_last(name, forward, backward):
    """The first microbatch comes down, the last stage works without a pause, the last
    gradient goes up. Of equal times that is (m + d - 1)(t_f + t_b): the bubble of d - 1
    microbatches (paper, section 2)."""
    stages = len(forward)
    down_and_up = sum(forward[:-1]) + sum(backward[:-1])
    for m in (1, 4, 9):
        found = iteration_time(SCHEDULES[name], stages, m, Times(forward, backward))
        assert found == down_and_up + m * (forward[-1] + backward[-1])


@pytest.mark.parametrize(
    "forward, backward",
    [([1], [2]), ([1, 4, 2], [3, 1, 3]), ([2, 1, 3, 1], [1, 4, 1, 2])],
)
def test_no_pipelining_adds_everything_up(forward, backward):
    """m times all stages' work and both ways over each boundary; the last boundary,
    back to stage 0, is not used."""
    stages = len(forward)
    boundaries = [0.5 * (stage + 1) for stage in range(stages)]
    reduce = [2] + [0] * (stages - 1)
    times = Times(forward, backward, transfer=boundaries, reduce=reduce, step=4)
    each = sum(forward) + sum(backward) + 2 * sum(boundaries[:-1])
    found = iteration_time(SCHEDULES["no-pipelining"], stages, 3, times)
    assert found == 3 * each + 2 + 4


@pytest.mark.parametrize("name", ["2bw", "pipedream"])
@pytest.mark.parametrize(
    "forward, backward",
    [([1] * 8, [2] * 8), ([5, 1, 1], [1, 1, 3]), ([1, 2, 1, 1], [2, 4, 1, 3])],
)
def test_without_flush_the_busiest_stage_never_waits(name, forward, backward):
    stages = len(forward)
    busiest = max(map(sum, zip(forward, backward)))
    for m in (stages, 2 * stages + 1):
        found = iteration_time(SCHEDULES[name], stages, m, Times(forward, backward))
        assert found == m * busiest


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
    forwards = []
    for event in events:
        if event.action.kind == "F":
            forwards.append((event.action.chunk, event.stage, event.start))
    chunk_0 = [(0, 0, 0), (0, 0, 1), (0, 1, 11), (0, 1, 12)]
    # a backward stands between the last two
    chunk_1 = [(1, 0, 112), (1, 0, 113), (1, 1, 123), (1, 1, 125)]
    assert sorted(forwards) == chunk_0 + chunk_1


# --- reduce, step, overlap cost
# --------------------------------------------------------------------------------------


def test_pipedreams_stages_reduce_and_step_alone():
    times = Times(1, 2, reduce=0.5, step=0.25)
    assert iteration_time(SCHEDULES["pipedream"], 2, 4, times) == 4 * 3 + 0.75
    events = simulate(SCHEDULES["pipedream"], Shape(2, 4, 0, 1), times)
    # the last stage does not wait for the first
    assert own(events, 1, "S")[0][1] < own(events, 0, "S")[0][1]


@pytest.mark.parametrize(
    "stages, microbatches",
    [(1, 1), (2, 2), (2, 4), (3, 7), (4, 4), (8, 20)],
)
def test_a_late_step_costs_what_exceeds_its_window(stages, microbatches):
    """With t_f = 1, t_b = 2: max(m·3, reduce + step + max((d - 1)·3, d·2)).

    The reduction starts after the batch's last backward on stage 0. It has until the
    first forward of batch j + 2 there, d - 1 pairs before the end of batch j + 1, or
    until the last backward on the last stage, d - 1 of them before stage 0's.
    """
    iteration = microbatches * 3
    rest = max((stages - 1) * 3, stages * 2)
    window = iteration - rest
    for together in (0, 1, window, window + 1, iteration, 5 * iteration):
        for step in (0, together / 2, together):
            times = Times(1, 2, reduce=together - step, step=step)
            found = iteration_time(SCHEDULES["2bw"], stages, microbatches, times)
            assert found == pytest.approx(max(iteration, together + rest))


@pytest.mark.parametrize("stages, microbatches", [(2, 2), (2, 5), (3, 7), (4, 8)])
def test_one_gradient_slot_waits_for_reduce_and_step(stages, microbatches):
    """m(t_f + t_b) + (d - 1)t_b - t_f: the last stage waits for the first one's last
    backward, one forward later; and for all of both."""
    alone = microbatches * 3 + (stages - 1) * 2 - 1
    for reduce, step in [(0, 0), (1, 0), (0, 2), (3, 0.5)]:
        times = Times(1, 2, reduce=reduce, step=step)
        found = iteration_time(TwoBW(memory="one-slot"), stages, microbatches, times)
        assert found == alone + reduce + step


def test_the_overlap_cost_is_the_stages_own_time():
    def seconds(forward, cost) -> float:
        times = Times(forward, 2, overlap_cost=cost)
        return iteration_time(SCHEDULES["2bw"], 2, 4, times)

    for cost in (0.5, [0.5, 0.5], [0.5, 0]):
        assert seconds(1, cost) == 4 * 3 + 0.5
    # stage 1, the busiest, is ahead of stage 0 by one
    for cost, expected in [([0, 5], 5), ([1, 0], 0), ([5, 0], 4)]:
        assert seconds([1, 2], cost) == 4 * 4 + expected


# --- chunks
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("virtual", [2, 3, 4])
@pytest.mark.parametrize("stages, groups", [(2, 1), (2, 3), (3, 2), (4, 4)])
def test_interleaved(virtual, stages, groups):
    """(m·v + d - 1)(t_f + t_b)/v (arXiv 2104.04473, section 2.2)."""
    schedule = Interleaved(virtual)
    microbatches = groups * stages
    times = Times(virtual, 2 * virtual)
    expected = (microbatches * virtual + stages - 1) * 3
    for time in (iteration_time, long_iteration_time):
        assert time(schedule, stages, microbatches, times) == expected


# --- the time of one iteration, and of a long one
# --------------------------------------------------------------------------------------

EVERY = [
    TwoBW(),
    TwoBW(memory="one-slot"),
    *(SCHEDULES[n] for n in ("pipedream-flush", "gpipe", "no-pipelining", "pipedream")),
    *(schedule_of("gpipe", gpipe_round=size) for size in (1, 3, 16)),
    Interleaved(2),
    Interleaved(3),
]


def random_case(schedule: Schedule, number: int, most: int) -> tuple[int, int, Times]:
    """Stages, up to `most` microbatches a stage, and times that differ by stage."""
    pick = random.Random(number)
    stages = pick.choice([2, 3, 4, 5])
    if schedule.chunks > 1:
        microbatches = stages * pick.randint(1, most)
    else:
        microbatches = pick.randint(stages, most * stages)

    def each(least: float, greatest: float) -> list[float]:
        return [pick.uniform(least, greatest) for _ in range(stages)]

    transfer = each(0, pick.choice([0, 0.3, 1]))
    share = pick.choice([0, 0.5, 1])
    update = pick.choice([0, 1, 10, 40])  # of which 40 exceed most windows
    times = Times(
        each(0.3, 2),
        each(0.5, 4),
        transfer=transfer,
        occupied=[share * time for time in transfer],
        sending=each(0, pick.choice([0, 0.3])),
        reduce=pick.uniform(0, update),
        step=pick.uniform(0, update),
        overlap_cost=each(0, 1) if schedule.late_step else 0.0,
    )
    return stages, microbatches, times


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_iteration_time_is_the_rate_of_many(schedule):
    """Exactly, where every batch waits for the step of the last; without that messages
    of several batches can keep a rhythm of more than the iterations that are measured,
    which is small as long as messages are short."""
    exact = schedule.flushes or schedule.memory == "one-slot"
    for number in range(12):
        stages, microbatches, times = random_case(schedule, number, 3)
        events = simulate(schedule, Shape(stages, microbatches, 0, 40), times)
        steps = own(events, stages - 1, "S")
        rate = (steps[38][1] - steps[14][1]) / 24
        found = iteration_time(schedule, stages, microbatches, times)
        assert found == pytest.approx(rate, rel=1e-9 if exact else 0.02), number


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_a_long_iteration_is_extrapolated(schedule):
    for number in range(60):
        case = random_case(schedule, number, 9)
        expected = iteration_time(schedule, *case)
        found = long_iteration_time(schedule, *case)
        assert found == pytest.approx(expected, rel=0.01), number


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 1.0])
def test_messages_add_themselves_to_2bw_unless_more_forwards_run_ahead(stages, share):
    """t_c of a message, c of a microbatch's forward and backward: c + 2(d-1)/d t_c a
    microbatch as in 1F1B; with k more forwards ahead over each boundary just c, as long
    as 2 t_c <= k c."""
    microbatches = 4 * stages
    message = share * 3
    work = microbatches * 3

    def seconds(*extra_warmup: int) -> float:
        schedule = TwoBW(extra_warmup=extra_warmup)
        times = Times(1, 2, transfer=message, occupied=message)
        return iteration_time(schedule, stages, microbatches, times)

    assert seconds() == pytest.approx(work * (1 + 2 * (stages - 1) / stages * share))
    assert (seconds(1) == pytest.approx(work)) == (2 * share <= 1)
    assert seconds(2) == pytest.approx(work)
