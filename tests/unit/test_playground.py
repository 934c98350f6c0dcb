"""The JSON of docs/playground: its figures are those of simulator and planner, and its
causes explain all idle time."""

import functools
import itertools
import json
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_2bw.run.flags.quick_check import mistake
from megatron_2bw.schedules import SCHEDULES as EXECUTED
from megatron_2bw.schedules import Shape, TwoBW, parse_actions, schedule_of
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


def ask(question: str, name: str, **given) -> dict:
    found = answers.answer({"ask": question, "schedules": [name], **given})
    # plain JSON, also after a round trip
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found[question][name]


MORE = {
    "gpipe": schedule_of("gpipe", gpipe_round=4),
    "2bw-one-slot": TwoBW(memory="one-slot"),
    "2bw-extra-warmup": TwoBW(extra_warmup=(1,)),
    "2bw-sync-start": TwoBW(sync_iterations=2),
    "megatron-interleaved": Interleaved(2),
}


@pytest.mark.parametrize("name", answers.SCHEDULES)
def test_a_timeline_is_the_simulators(name):
    forward = [1, 1, 3, 1]
    given = {"forward": forward, "transfer": [0.5, 2, 0.5], "reduce": 1, "step": 2}
    found = ask("timelines", name, **given)
    messages = [0.5, 2, 0.5, 2]
    times = Times(forward, 2, transfer=messages, occupied=messages, reduce=1, step=2)
    events = simulate((EXECUTED | MORE)[name], Shape(4, 8, 0, 3), times)
    for stage, mine in enumerate(by_stage(events, 4)):
        assert parse_actions(found["actions"][stage]) == [
            event.action for event in mine
        ]
        assert found["starts"][stage] == [event.start for event in mine]
        assert found["ends"][stage] == [event.end for event in mine]
    assert found["makespan"] == makespan(events)


@pytest.mark.parametrize("name", EXECUTED)
def test_figures_are_those_of_simulator_and_planner(name):
    chosen = {"gpipe_round": 8, "microbatch": 4, "recompute": "full"}
    found = ask("figures", name, precision="fp16", **chosen)
    schedule = EXECUTED[name]
    seconds = iteration_time(schedule, 4, 8)
    assert (found["seconds"], found["throughput"]) == (seconds, 8 / seconds)
    assert found["bubble"] == pytest.approx(1 - 24 / seconds)
    shape = Shape(4, 8)
    in_flight = [schedule.max_in_flight(shape, stage) for stage in range(4)]
    assert found["in_flight"] == in_flight
    plan = Plan(1, 4, 1, 4, 8, "full", name)
    stages = Memory(preset("gpt-2.2b"), "fp16", True).stages(plan)
    assert found["bytes"] == [vars(stage) for stage in stages]


@pytest.mark.parametrize("name", answers.SCHEDULES)
def test_the_command_line_is_legal(name):
    found = ask("figures", name, extra_warmup=[1, 0, 2])
    program, command, kind, *flags = found["command"].split()
    assert (program, command, kind) == ("megatron-2bw", "train", "gpt")
    assert mistake(flags, "gpt", 4) is None


def test_the_archive_needs_no_other_package(tmp_path):
    """In Pyodide there is nothing else."""
    path = tmp_path / "package.zip"
    archive(path)
    code = f"import sys; sys.path.insert(0, {str(path)!r}); from answers import answer"
    code += "; print(answer({'ask': 'figures'})['figures']['2bw']['seconds'])"
    command = [sys.executable, "-I", "-S", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stdout == "24.0\n", run.stderr


times = st.sampled_from([0, 0.25, 0.5, 1, 1.7, 3])
requests = st.fixed_dictionaries(
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
@given(requests)
@example(
    {
        "schedules": ["pipedream"],
        "microbatches": 12,
        "forward": [0.25, 0.25, 1.7, 3],
        "transfer": [0] * 3,
        "occupied": 0,
        "reduce": 0,
        "step": 1,  # (x + 1) - 1 is less than x
    }
)
def test_causes_explain_all_idle_time(given):
    """A stage's idle time is in its waits; each ends as what it names arrives; the
    critical path has no gap."""
    (name,) = given["schedules"]
    found = answers.answer({"iterations": 2, **given})["timelines"][name]
    starts, ends = found["starts"], found["ends"]
    near = functools.partial(pytest.approx, abs=1e-6)
    kinds = [[word[0] for word in own.split()] for own in found["actions"]]

    def transfer_of(stage: int, other: int) -> float:
        if abs(stage - other) == 1:
            return given["transfer"][min(stage, other)]
        return max(given["transfer"])

    for stage, waits in enumerate(found["waits"]):
        idle = {place: seconds for place, seconds, *_ in waits}
        free = 0.0
        for place, start in enumerate(starts[stage]):
            if kinds[stage][place] != "S" or not found["late"]:
                assert start - free == near(idle.get(place, 0))
            free = ends[stage][place]
        for place, _, other, at, queued in waits:
            if kinds[stage][place] in "FB":
                arrives = ends[other][at] + queued + transfer_of(stage, other)
                assert starts[stage][place] == pytest.approx(arrives)
            else:
                done = starts[other][at] + given["reduce"] + given["step"]
                assert kinds[other][at] == "R"
                assert ends[stage][place] == pytest.approx(done)
    path = found["critical"]
    (first, first_place), *_, (last, last_place) = path
    assert starts[first][first_place] == 0
    assert ends[last][last_place] == max(map(max, ends))
    for (stage, place), (after, at) in itertools.pairwise(path):
        gap = starts[after][at] - ends[stage][place]
        if kinds[after][at] == "S":
            assert stage == after or kinds[stage][place] == "R"
        elif stage == after:
            assert gap == near(0)
        else:
            # and after it the messages before it on its link
            transfer = transfer_of(stage, after)
            before = (gap - transfer) / (given["occupied"] * transfer or 1)
            assert before == near(round(before)) and before > -1e-6
