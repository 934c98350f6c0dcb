"""The six schedules as data: their lists, their limits, and the validator that holds
them to both."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_2bw.base.files import read_yaml
from megatron_2bw.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    ScheduleError,
    Shape,
    TwoBW,
    check_actions,
    parse_actions,
    schedule_of,
    validate,
)
from megatron_2bw.tools.timelines.simulator import Times, iteration_time

TWO_BW = SCHEDULES["2bw"]
FLUSH = SCHEDULES["pipedream-flush"]
BY_HAND = read_yaml(Path(__file__).with_name("schedules.yaml"))


def lists(schedule: Schedule, shape: Shape) -> list[list[Action]]:
    rows = []
    for stage in range(shape.stages):
        row = []
        for iteration in range(shape.first, shape.end):
            row += schedule.actions(shape, stage, iteration)
        rows.append(row)
    return rows


def by_stage(limit, shape: Shape) -> list[int]:
    return [limit(shape, stage) for stage in range(shape.stages)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_all_shapes_are_valid(name, first, iterations):
    schedule = SCHEDULES[name]
    end = first + iterations
    for stages in (1, 2, 3, 4, 8):
        for microbatches in (1, 2, 3, 4, 6, 8, 11):
            validate(schedule, Shape(stages, microbatches, first, end))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 6, 7, 8])
def test_each_late_microbatch_removes_a_slot_of_the_bubble(stages, microbatches):
    """The time of a batch is max(m, m + d - 1 - K + s) forwards and backwards, if a step
    takes s of them; of 1F1B with a flush m + d - 1 + s."""
    shape = Shape(stages, microbatches, 0, 6)
    for late in range(microbatches + 1):
        for memory, extra in (("two-slots", (1,)), ("one-slot", ()), ("two-slots", ())):
            schedule = TwoBW(late, memory, extra)
            validate(schedule, shape)
            validate(replace(schedule, sync_iterations=2), replace(shape, first=1))
        if late == microbatches:
            for lead in (0, 1, 2):
                predicting = TwoBW("all", memory, extra, predicts=True, lead=lead)
                validate(predicting, shape)
        for step in (0, 1, 8):
            # the last backward waits for the step, too
            if stages <= 2 and late == microbatches <= 3:
                continue
            slots = max(microbatches, microbatches + stages - 1 - late + step / 3)
            time = iteration_time(
                schedule, stages, microbatches, Times(1, 2, step=step)
            )
            assert time == pytest.approx(3 * slots)
    flush = SCHEDULES["pipedream-flush"]
    for stage in range(stages):
        none_late = TwoBW(late=0).order(shape, stage, 2)
        assert none_late == flush.order(shape, stage, 2)


@pytest.mark.parametrize("case", BY_HAND["lists"], ids=str)
def test_lists_by_hand(case):
    schedule = schedule_of(**case["schedule"])
    for place, expected in case["actions"].items():
        stage, iteration = map(int, re.findall(r"\d+", place))
        actions = schedule.actions(Shape(*case["shape"]), stage, iteration)
        assert " ".join(map(str, actions)) == expected


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 4, 7])
def test_gpipe_in_rounds_is_valid_and_holds_a_round(stages, microbatches):
    """For every N up to m, N activations on each stage; with N = m the lists of gpipe
    without rounds, with N = 1 those of no-pipelining."""
    shape = Shape(stages, microbatches, 2, 5)
    for size in range(1, microbatches + 1):
        schedule = schedule_of("gpipe", gpipe_round=size)
        validate(schedule, shape)
        assert by_stage(schedule.max_in_flight, shape) == [size] * stages
    assert lists(schedule, shape) == lists(SCHEDULES["gpipe"], shape)
    one = schedule_of("gpipe", gpipe_round=1)
    assert lists(one, shape) == lists(SCHEDULES["no-pipelining"], shape)


@pytest.mark.parametrize("case", BY_HAND["limits"], ids=str)
def test_limits_are_reached(case):
    """One less and the validator objects."""
    shape = Shape(4, 6, 0, 3)
    schedule = SCHEDULES[case["name"]]
    assert by_stage(schedule.max_versions, shape) == case["versions"]
    assert by_stage(schedule.max_in_flight, shape) == case["in flight"]

    class Tighter(type(schedule)):
        def max_in_flight(self, shape, stage):
            return super().max_in_flight(shape, stage) - 1

    with pytest.raises(ScheduleError, match="in flight"):
        validate(Tighter(), shape)


def test_versions_of_pipedream():
    limit = SCHEDULES["pipedream"].max_versions
    assert by_stage(limit, Shape(4, 1, 0, 6)) == [4, 3, 2, 1]


GOOD = ("F0@0 F1@0 B0@0 B1@0 R0@0 S0@1", "F0@0 B0@0 F1@0 B1@0 R0@0 S0@1")


def check_flush(*rows: str) -> None:
    check_actions([parse_actions(row) for row in rows], FLUSH, Shape(2, 2, 0, 1))


@pytest.mark.parametrize("fault", BY_HAND["faults"].values(), ids=BY_HAND["faults"])
def test_validator_finds(fault):
    """The error shows the grid with the fault marked."""
    check_flush(*GOOD)
    with pytest.raises(ScheduleError, match=fault["error"]) as error:
        check_flush(fault["stage 0"], fault["stage 1"])
    assert re.search(r"stage 0  (.|\n)*>.*<", str(error.value))


def test_validator_counts_versions_and_compares_them_between_stages():
    """Stale weights: on all stages under a schedule that holds one version only, and on
    one of two stages."""
    shape = Shape(2, 2, 0, 3)
    rows = lists(TWO_BW, shape)
    stale = []
    for row in rows:
        stale.append([a._replace(version=0) if a.kind in "FB" else a for a in row])
    line = r"2 weight versions \[0, 1\], at most 1 allowed"
    with pytest.raises(ScheduleError, match=line):
        check_actions(stale, FLUSH, shape)
    with pytest.raises(ScheduleError, match=r"F4@0 reads W\(0\), stage 0 read W\(1\)"):
        check_actions([rows[0], stale[1]], TWO_BW, shape)


class Wide(TwoBW):
    def max_in_flight(self, shape, stage):
        return 2


def test_a_late_step_needs_a_free_store_from_its_reduction_on():
    """A forward of the batch's own weights after its REDUCE: nothing could be written
    yet."""
    row = parse_actions("F6@2 F7@3 B6@2 F8@2 B7@3 R3@3 S3@4 F9@3 B8@2 B9@3 R4@4 S4@5")
    line = r"R3@3: versions \[2, 3\] leave no free weight store"
    with pytest.raises(ScheduleError, match=line):
        check_actions([row], Wide(), Shape(1, 2, 3, 5))


@pytest.mark.parametrize(
    "row, error",
    [
        ("F2@0 B2@0 F3@0 P2@1 S0@1 B3@0", r"P2@1: the newest weights are W\(0\)"),
        ("F2@0 B2@0 S0@1 F3@0 B3@0", r"F4@1 before P2"),
        ("F2@0 B2@0 F3@0 B3@0 S0@1 R1@1 P2@1", r"P2@1 while the step .* may run"),
        ("F2@0 B2@0 F3@0 S0@1 B3@0 P2@1 R1@1 F4@1 P2@1", r"P2@1 overwrites weights"),
        ("S0@1 P2@1 F2@0 B2@0 F3@0 B3@0", r"P2@1 before the first backward"),
        ("F2@0 B2@0 F3@0 S0@1 B3@0 P2@1 P2@1", r"P2@1 for the second time"),
    ],
)
def test_validator_finds_a_prediction_that_is_early_late_or_missing(row, error):
    schedule = TwoBW(predicts=True)
    shape = Shape(1, 2, 0, 3)
    good = lists(schedule, shape)[0]
    assert " ".join(map(str, good[:6])) == "F0@0 B0@0 F1@0 B1@0 R0@0 F2@0"
    rest = parse_actions("R1@1 F4@1 B4@1 F5@1 S1@2 B5@1 R2@2 S2@3")
    with pytest.raises(ScheduleError, match=error):
        check_actions([good[:5] + parse_actions(row) + rest], schedule, shape)


@pytest.mark.parametrize("extra", BY_HAND["extra warm-up"], ids=str)
@pytest.mark.parametrize("memory", ["one-slot", "two-slots"])
def test_extra_warmup_holds_more_microbatches(extra, memory):
    schedule = TwoBW(memory=memory, extra_warmup=tuple(extra))
    per_boundary = extra if len(extra) == 3 else extra * 3
    fewest = 4 + sum(per_boundary)
    in_flight = [4 - stage + sum(per_boundary[stage:]) for stage in range(4)]
    for microbatches in (fewest, fewest + 1, 2 * fewest):
        shape = Shape(4, microbatches, 2, 7)
        validate(schedule, shape)
        assert by_stage(schedule.max_in_flight, shape) == in_flight
        assert by_stage(schedule.max_versions, shape) == [2] * 4


@pytest.mark.parametrize("first", [0, 2, 4])
@pytest.mark.parametrize("sync", [0, 3, 8])
def test_a_synchronous_start_has_no_late_microbatches_wherever_it_is_resumed(
    first, sync
):
    schedule = TwoBW(sync_iterations=sync)
    shape = Shape(2, 3, first, 7)
    for action in itertools.chain(*lists(schedule, shape)):
        if action.kind in "FB":
            batch = shape.batch(action.microbatch)
            assert action.version == batch - (batch >= max(sync, 1))
