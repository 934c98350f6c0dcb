"""The six schedules as data: their lists, their limits, and the validator that holds
them to both."""

from __future__ import annotations

import pytest

from megatron_2bw.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    ScheduleError,
    Shape,
    TwoBW,
    check_actions,
    parse,
    schedule_of,
    validate,
)

TWO_BW = SCHEDULES["2bw"]


def lists(schedule: Schedule, shape: Shape) -> list[list[Action]]:
    return [
        [
            action
            for j in range(shape.first, shape.end)
            for action in schedule.actions(shape, s, j)
        ]
        for s in range(shape.stages)
    ]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_all_shapes_are_valid(name, first, iterations):
    schedule = SCHEDULES[name]
    for stages in (1, 2, 3, 4, 8):
        for microbatches in (1, 2, 3, 4, 6, 8, 11):
            if microbatches >= schedule.min_microbatches(stages):
                validate(
                    schedule, Shape(stages, microbatches, first, first + iterations)
                )


SMALL, LONG = Shape(2, 3, 0, 3), Shape(4, 4, 0, 3)
SYNC, ROUNDS = (
    (TwoBW(sync_iterations=3), Shape(2, 2, 0, 5)),
    (schedule_of("gpipe", gpipe_round=2), Shape(2, 5, 0, 2)),
)
PIPEDREAM = SCHEDULES["pipedream"], Shape(4, 1, 0, 6)
BY_HAND = [  # schedule, shape, stage, iteration
    # 2BW is figure 2 of the paper, written out from its rule.
    (TWO_BW, LONG, 0, 0, "F0@0 F1@0 F2@0 F3@0 B0@0 F4@0 B1@0 F5@0 B2@0 F6@0 B3@0 R0@0"),
    (TWO_BW, LONG, 0, 1, "F7@0 B4@0 S0@1 F8@1 B5@0 F9@1 B6@0 F10@1 B7@0 R1@1"),
    (TWO_BW, LONG, 0, 2, "F11@1 B8@1 B9@1 B10@1 S1@2 B11@1 R2@2 S2@3"),
    (TWO_BW, LONG, 2, 1, "F5@0 B4@0 F6@0 B5@0 F7@0 B6@0 S0@1 F8@1 B7@0 R1@1"),
    (TWO_BW, LONG, 3, 1, "F4@0 B4@0 F5@0 B5@0 F6@0 B6@0 F7@0 S0@1 B7@0 R1@1"),
    # With one gradient slot the step comes before the next gradients.
    (TwoBW(1), LONG, 0, 1, "F7@0 S0@1 B4@0 F8@1 B5@0 F9@1 B6@0 F10@1 B7@0 R1@1"),
    (TwoBW(1), LONG, 3, 1, "F4@0 S0@1 B4@0 F5@0 B5@0 F6@0 B6@0 F7@0 B7@0 R1@1"),
    # A resumed run starts with a warm-up.
    (TWO_BW, Shape(2, 2, 7, 9), 0, 7, "F14@6 F15@6 B14@6 F16@7 B15@6 R7@7"),
    # One more forward ahead over the boundary: the early forwards begin one earlier, on
    # the same W.
    (
        TwoBW(extra_warmup=(1,)),
        SMALL,
        0,
        0,
        "F0@0 F1@0 F2@0 B0@0 F3@0 B1@0 F4@0 B2@0 R0@0",
    ),
    (TwoBW(extra_warmup=(1,)), SMALL, 0, 1, "F5@0 B3@0 S0@1 F6@1 B4@0 F7@1 B5@0 R1@1"),
    (TwoBW(extra_warmup=(1,)), SMALL, 0, 2, "F8@1 B6@1 B7@1 S1@2 B8@1 R2@2 S2@3"),
    # Batches 0, 1 and 2 run on their newest weights; batch 3 begins on W(2) while batch
    # 2 runs backward.
    (*SYNC, 0, 1, "F2@1 F3@1 B2@1 B3@1 R1@1 S1@2"),
    (*SYNC, 0, 2, "F4@2 F5@2 B4@2 F6@2 B5@2 R2@2"),
    (*SYNC, 0, 3, "F7@2 B6@2 S2@3 F8@3 B7@2 R3@3"),
    (*SYNC, 1, 2, "F4@2 B4@2 F5@2 B5@2 R2@2"),
    (SCHEDULES["gpipe"], SMALL, 0, 1, "F3@1 F4@1 F5@1 B3@1 B4@1 B5@1 R1@1 S1@2"),
    (
        SCHEDULES["no-pipelining"],
        SMALL,
        1,
        0,
        "F0@0 B0@0 F1@0 B1@0 F2@0 B2@0 R0@0 S0@1",
    ),
    (
        SCHEDULES["pipedream-flush"],
        SMALL,
        0,
        0,
        "F0@0 F1@0 B0@0 F2@0 B1@0 B2@0 R0@0 S0@1",
    ),
    # Two microbatches at a time, five a batch: three rounds, the last of one; one
    # reduction and one step.
    (*ROUNDS, 0, 0, "F0@0 F1@0 B0@0 B1@0 F2@0 F3@0 B2@0 B3@0 F4@0 B4@0 R0@0 S0@1"),
    (*ROUNDS, 1, 1, "F5@1 F6@1 B5@1 B6@1 F7@1 F8@1 B7@1 B8@1 F9@1 B9@1 R1@1 S1@2"),
    # With m = 1 PipeDream is the paper's: each microbatch runs backward on the weights
    # of its forward.
    (*PIPEDREAM, 0, 0, "F0@0 F1@0 F2@0 F3@0 B0@0 R0@0 S0@1"),
    (*PIPEDREAM, 0, 1, "F4@1 B1@0 R1@1 S1@2"),
    (*PIPEDREAM, 3, 4, "F4@4 B4@4 R4@4 S4@5"),
]


@pytest.mark.parametrize("schedule, shape, stage, iteration, expected", BY_HAND)
def test_lists_by_hand(schedule, shape, stage, iteration, expected):
    assert " ".join(map(str, schedule.actions(shape, stage, iteration))) == expected


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 4, 7])
def test_gpipe_in_rounds_is_valid_and_holds_a_round(stages, microbatches):
    """For every N up to m, N activations on each stage; with N = m the lists of gpipe
    without rounds, with N = 1 those of no-pipelining."""
    shape = Shape(stages, microbatches, 2, 5)
    for size in range(1, microbatches + 1):
        schedule = schedule_of("gpipe", gpipe_round=size)
        validate(schedule, shape)
        assert [schedule.max_in_flight(shape, stage) for stage in range(stages)] == [
            size
        ] * stages
    assert lists(schedule, shape) == lists(SCHEDULES["gpipe"], shape)
    assert lists(schedule_of("gpipe", gpipe_round=1), shape) == lists(
        SCHEDULES["no-pipelining"], shape
    )


@pytest.mark.parametrize(
    "name, versions, in_flight",
    [
        ("2bw", [2] * 4, [4, 3, 2, 1]),
        ("pipedream-flush", [1] * 4, [4, 3, 2, 1]),
        ("gpipe", [1] * 4, [6] * 4),
        ("no-pipelining", [1] * 4, [1] * 4),
    ],
)
def test_limits_are_reached(name, versions, in_flight):
    """One less and the validator objects."""
    shape, schedule = Shape(4, 6, 0, 3), SCHEDULES[name]
    assert [schedule.max_versions(shape, stage) for stage in range(4)] == versions
    assert [schedule.max_in_flight(shape, stage) for stage in range(4)] == in_flight
    assert [
        SCHEDULES["pipedream"].max_versions(Shape(4, 1, 0, 6), stage)
        for stage in range(4)
    ] == [4, 3, 2, 1]

    class Tighter(type(schedule)):
        def max_in_flight(self, shape, stage):
            return super().max_in_flight(shape, stage) - 1

    with pytest.raises(ScheduleError, match="in flight"):
        validate(Tighter(), shape)


GOOD = ("F0@0 F1@0 B0@0 B1@0 R0@0 S0@1", "F0@0 B0@0 F1@0 B1@0 R0@0 S0@1")
FAULTS = {
    "deadlock": (
        ("F0@0 B0@0 F1@0 B1@0 R0@0 S0@1", "F0@0 F1@0 B0@0 B1@0 R0@0 S0@1"),
        "deadlock: B0@0 waits",
    ),
    "step before the last backward": (
        ("F0@0 F1@0 B0@0 R0@0 S0@1 B1@0", GOOD[1]),
        "R0@0 before the backward of",
    ),
    "step without a reduction": (
        ("F0@0 F1@0 B0@0 B1@0 S0@1 R0@0", GOOD[1]),
        "deadlock: S0@1 waits",
    ),
    "messages out of order": (
        (GOOD[0], "F1@0 B1@0 F0@0 B0@0 R0@0 S0@1"),
        "activations of microbatch 0",
    ),
    "gradients out of order": (
        ("F0@0 F1@0 B1@0 B0@0 R0@0 S0@1", GOOD[1]),
        "gradient of microbatch 0",
    ),
    "another version backward": (
        ("F0@0 F1@0 B0@1 B1@0 R0@0 S0@1", GOOD[1]),
        "its forward read W\\(0\\)",
    ),
    "a version that is not there": (
        ("F0@1 F1@0 B0@1 B1@0 R0@0 S0@1", GOOD[1]),
        "does not hold",
    ),
    "a microbatch twice": (("F0@0 F0@0 B0@0 B1@0 R0@0 S0@1", GOOD[1]), "forward twice"),
    "backward without forward": (
        (GOOD[0], "B0@0 F0@0 F1@0 B1@0 R0@0 S0@1"),
        "backward without its forward",
    ),
    "a microbatch left out": (("F0@0 B0@0", "F0@0 B0@0"), "microbatch 1 is not run"),
    "two reductions": (
        (GOOD[0].replace("R0@0", "R0@0 R0@0"), GOOD[1]),
        r"each batch is reduced once, .* not \[0, 0\]",
    ),
    "no step": (
        (GOOD[0].removesuffix(" S0@1"), GOOD[1]),
        r"each batch is stepped once, in order, not \[\]",
    ),
    "another chunk": (("F0@0.1 F1@0 B0@0 B1@0 R0@0 S0@1", GOOD[1]), "does not hold"),
    "a version skipped": (
        ("F0@0 F1@0 B0@0 B1@0 R0@0 S0@2", GOOD[1]),
        "skips a version",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_validator_finds(fault):
    """Each fault is one edit of lists that pass; the error shows the grid with the
    fault marked."""
    check_actions(
        [parse(row) for row in GOOD], SCHEDULES["pipedream-flush"], Shape(2, 2, 0, 1)
    )
    rows, message = FAULTS[fault]
    with pytest.raises(ScheduleError, match=message) as error:
        check_actions(
            [parse(row) for row in rows],
            SCHEDULES["pipedream-flush"],
            Shape(2, 2, 0, 1),
        )
    assert (
        "stage 0  " in str(error.value)
        and ">" in str(error.value)
        and "<" in str(error.value)
    )


def test_validator_counts_versions_and_compares_them_between_stages():
    """Stale weights: on all stages under a schedule that holds one version only, and on
    one of two stages."""
    shape = Shape(2, 2, 0, 3)
    rows = lists(TWO_BW, shape)
    stale = [
        [a._replace(version=0) if a.kind in "FB" else a for a in row] for row in rows
    ]
    with pytest.raises(
        ScheduleError, match=r"2 weight versions \[0, 1\], at most 1 allowed"
    ):
        check_actions(stale, SCHEDULES["pipedream-flush"], shape)
    with pytest.raises(ScheduleError, match=r"F4@0 reads W\(0\), stage 0 read W\(1\)"):
        check_actions([rows[0], stale[1]], TWO_BW, shape)


def test_a_late_step_needs_a_free_store_from_its_reduction_on():
    """A forward of the batch's own weights after its REDUCE: nothing could be written
    yet."""
    shape = Shape(1, 2, 3, 5)
    rows = [parse("F6@2 F7@3 B6@2 F8@2 B7@3 R3@3 S3@4 F9@3 B8@2 B9@3 R4@4 S4@5")]

    class Wide(TwoBW):
        def max_in_flight(self, shape, stage):
            return 2

    with pytest.raises(
        ScheduleError, match=r"R3@3: versions \[2, 3\] leave no free weight store"
    ):
        check_actions(rows, Wide(), shape)


@pytest.mark.parametrize("extra", [(1,), (2,), (0, 2, 0), (1, 0, 3), (0,)], ids=str)
@pytest.mark.parametrize("gradient_slots", [1, 2])
def test_2bw_with_extra_warmup_is_valid_with_the_fewest_microbatches(
    extra, gradient_slots
):
    schedule, per_boundary = (
        TwoBW(gradient_slots, extra),
        extra * 3 if len(extra) == 1 else extra,
    )
    fewest = 4 + sum(per_boundary)
    assert schedule.min_microbatches(4) == fewest
    for microbatches in (fewest, fewest + 1, 2 * fewest):
        shape = Shape(4, microbatches, 2, 7)
        validate(schedule, shape)
        in_flight = [3 - stage + sum(per_boundary[stage:]) + 1 for stage in range(4)]
        assert [schedule.max_in_flight(shape, stage) for stage in range(4)] == in_flight
        assert [schedule.max_versions(shape, stage) for stage in range(4)] == [2] * 4


@pytest.mark.parametrize("first", [0, 2, 3, 4])
@pytest.mark.parametrize("sync", [0, 1, 3, 4, 7, 8])
@pytest.mark.parametrize("gradient_slots, extra", [(1, ()), (2, ()), (2, (1,))])
def test_2bw_with_a_synchronous_start_is_valid_wherever_it_is_resumed(
    first, sync, gradient_slots, extra
):
    schedule = TwoBW(gradient_slots, extra, sync)
    for stages, microbatches in ((1, 1), (2, 3), (4, 7)):
        shape = Shape(stages, microbatches, first, 7)
        validate(schedule, shape)
        for row in lists(schedule, shape):
            for action in row:
                if action.kind in "FB":
                    batch = shape.batch(action.microbatch)
                    assert action.version == (
                        batch if batch < max(sync, 1) else batch - 1
                    )


def test_2bw_that_is_synchronous_to_its_end_is_1f1b_with_a_flush():
    shape = Shape(3, 4, 0, 5)
    assert lists(TwoBW(sync_iterations=6), shape) == lists(
        SCHEDULES["pipedream-flush"], shape
    )
    assert lists(TwoBW(sync_iterations=1), shape) == lists(TwoBW(), shape)
