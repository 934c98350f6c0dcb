"""The JSON of docs/playground: its figures are those of simulator and planner, and its
causes explain all idle time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_2bw.run.flags.quick_check import mistake
from megatron_2bw.schedules import SCHEDULES as EXECUTED
from megatron_2bw.schedules import Shape, TwoBW, parse, schedule_of
from megatron_2bw.schedules.interleaved import Interleaved
from megatron_2bw.tools.planner.cost.memory import Memory
from megatron_2bw.tools.planner.descriptions.model import preset
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.timelines.simulator import (
    Times,
    by_stage,
    iteration_time,
    makespan,
    simulate,
)
from scripts.playground import answers, archive

# it makes the table of Megatron's flags
pytestmark = pytest.mark.usefixtures("on_the_cpu")

SLOW = {
    "stages": 4,
    "microbatches": 8,
    "forward": [1, 1, 3, 1],
    "transfer": [0.5, 2, 0.5],
    "reduce": 1,
    "step": 2,
}


def of(ask: str, name: str, **given) -> dict:
    found = answers.answer({"ask": ask, "schedules": [name], **given})
    # plain JSON, also after a round trip
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found[ask][name]


@pytest.mark.parametrize("name", answers.SCHEDULES)
def test_a_timeline_is_the_simulators(name):
    found = of("timelines", name, **SLOW)
    times = Times(
        [1, 1, 3, 1],
        2,
        transfer=[0.5, 2, 0.5, 2],
        occupied=[0.5, 2, 0.5, 2],
        reduce=1,
        step=2,
    )
    options = {
        "gpipe": schedule_of("gpipe", gpipe_round=4),
        "2bw-one-slot": TwoBW(1),
        "2bw-extra-warmup": TwoBW(extra_warmup=(1,)),
        "2bw-sync-start": TwoBW(sync_iterations=2),
        "megatron-interleaved": Interleaved(2),
    }
    events = simulate((EXECUTED | options)[name], Shape(4, 8, 0, 3), times)
    for stage, mine in enumerate(by_stage(events, 4)):
        assert parse(found["actions"][stage]) == [event.action for event in mine]
        assert found["starts"][stage] == [event.start for event in mine]
        assert found["ends"][stage] == [event.end for event in mine]
    assert found["makespan"] == makespan(events)


@pytest.mark.parametrize("name", EXECUTED)
def test_figures_are_those_of_simulator_and_planner(name):
    found = of(
        "figures", name, gpipe_round=8, microbatch=4, recompute="full", precision="fp16"
    )
    plan = Plan(
        1, 4, 1, 4, 8, "full", schedule=name, gpipe_round=8 if name == "gpipe" else None
    )
    schedule, seconds = EXECUTED[name], iteration_time(EXECUTED[name], 4, 8)
    assert found["seconds"] == seconds and found["throughput"] == 8 / seconds
    assert found["bubble"] == pytest.approx(1 - 24 / seconds)
    assert found["in_flight"] == [
        schedule.max_in_flight(Shape(4, 8), stage) for stage in range(4)
    ]
    assert found["bytes"] == [
        vars(stage) for stage in Memory(preset("gpt-2.2b"), "fp16", True).stages(plan)
    ]


@pytest.mark.parametrize("name", answers.SCHEDULES)
def test_the_command_line_is_legal(name):
    command = of("figures", name, extra_warmup=[1, 0, 2], microbatches=8)[
        "command"
    ].split()
    assert command[:3] == ["megatron-2bw", "train", "gpt"]
    assert mistake(command[3:], "gpt", 4) is None


def test_the_archive_needs_no_other_package(tmp_path):
    """In Pyodide there is nothing else."""
    path = tmp_path / "package.zip"
    archive(path)
    code = f"import sys; sys.path.insert(0, {str(path)!r}); from answers import answer"
    code += "; print(answer({'ask': 'figures'})['figures']['2bw']['seconds'])"
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "24.0\n", run.stderr


times = st.sampled_from([0, 0.25, 0.5, 1, 1.7, 3])
some = st.fixed_dictionaries(
    {
        "schedules": st.sampled_from([[name] for name in answers.SCHEDULES]),
        "microbatches": st.sampled_from([8, 12]),
        "forward": st.lists(times.filter(bool), min_size=4, max_size=4),
        "transfer": st.lists(times, min_size=3, max_size=3),
        "occupied": st.sampled_from([0, 0.5, 1]),
        "reduce": times,
        "step": times,
    }
)


@settings(max_examples=60, deadline=None)
@given(some)
@example(
    {
        "schedules": ["pipedream"],
        "microbatches": 12,
        "forward": [0.25, 0.25, 1.7, 3],
        "transfer": [0] * 3,
    }
    | {"occupied": 0, "reduce": 0, "step": 1}  # (x + 1) - 1 is less than x
)
def test_causes_explain_all_idle_time(given):
    """A stage's idle time is in its waits; each ends as what it names arrives; the
    critical path has no gap."""
    (name,) = given["schedules"]
    found = answers.answer({"iterations": 2, **given})["timelines"][name]
    starts, ends, small = found["starts"], found["ends"], 1e-6

    def transfer_of(stage: int, other: int) -> float:
        return (
            given["transfer"][min(stage, other)]
            if abs(stage - other) == 1
            else max(given["transfer"])
        )

    kinds = [[word[0] for word in own.split()] for own in found["actions"]]
    for stage, waits in enumerate(found["waits"]):
        idle = {place: seconds for place, seconds, *_ in waits}
        free = 0.0
        for place, (start, end) in enumerate(zip(starts[stage], ends[stage])):
            if not (kinds[stage][place] == "S" and found["late"]):
                assert start - free == pytest.approx(idle.get(place, 0), abs=small)
            free = end
        for place, _, other, at, queued in waits:
            if kinds[stage][place] in "FB":
                assert starts[stage][place] == pytest.approx(
                    ends[other][at] + queued + transfer_of(stage, other)
                )
            else:
                done = starts[other][at] + given["reduce"] + given["step"]
                assert kinds[other][at] == "R" and ends[stage][place] == pytest.approx(
                    done
                )
    path = found["critical"]
    assert (
        starts[path[0][0]][path[0][1]] == 0
        and max(map(max, ends)) == ends[path[-1][0]][path[-1][1]]
    )
    for (stage, place), (after, at) in zip(path, path[1:]):
        gap = starts[after][at] - ends[stage][place]
        if kinds[after][at] == "S":
            assert stage == after or kinds[stage][place] == "R"
        elif stage == after:
            assert gap == pytest.approx(0, abs=small)
        else:
            # and after it the messages before it on its link
            transfer = transfer_of(stage, after)
            before = (gap - transfer) / (given["occupied"] * transfer or 1)
            assert before == pytest.approx(round(before), abs=small) and before > -small
