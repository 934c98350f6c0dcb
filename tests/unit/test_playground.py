"""The JSON of docs/playground: its figures are those of simulator and planner, and its causes explain all idle time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_2bw.flags.early import mistake
from megatron_2bw.models.model import preset
from megatron_2bw.models.plan import Plan
from megatron_2bw.planner.cost.memory import Memory
from megatron_2bw.playground import SCHEDULES, answer
from megatron_2bw.schedules import SCHEDULES as EXECUTED
from megatron_2bw.schedules import Shape, TwoBW, parse, schedule_of
from megatron_2bw.schedules.interleaved import Interleaved
from megatron_2bw.timelines.simulator import Times, by_stage, iteration_time, makespan, simulate
from scripts.playground import archive

pytestmark = pytest.mark.usefixtures("on_the_cpu")  # it makes the table of Megatron's flags

SLOW = {"stages": 4, "microbatches": 8, "forward": [1, 1, 3, 1], "transfer": [0.5, 2, 0.5], "reduce": 1, "step": 2}


def of(ask: str, name: str, **given) -> dict:
    found = answer({"ask": ask, "schedules": [name], **given})
    assert json.loads(json.dumps(found, allow_nan=False)) == found  # plain JSON, also after a round trip
    return found[ask][name]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_timeline_is_the_simulators(name):
    found = of("timelines", name, **SLOW)
    times = Times([1, 1, 3, 1], 2, transfer=[0.5, 2, 0.5, 2], occupied=[0.5, 2, 0.5, 2], reduce=1, step=2)
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
    found = of("figures", name, gpipe_round=8, microbatch=4, recompute="full", precision="fp16")
    plan = Plan(1, 4, 1, 4, 8, "full", schedule=name, gpipe_round=8 if name == "gpipe" else None)
    schedule, seconds = EXECUTED[name], iteration_time(EXECUTED[name], 4, 8)
    assert found["seconds"] == seconds and found["throughput"] == 8 / seconds
    assert found["bubble"] == pytest.approx(1 - 24 / seconds)
    assert found["in_flight"] == [schedule.max_in_flight(Shape(4, 8), stage) for stage in range(4)]
    assert found["bytes"] == [vars(stage) for stage in Memory(preset("gpt-2.2b"), "fp16", True).stages(plan)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_command_line_is_legal(name):
    command = of("figures", name, extra_warmup=[1, 0, 2], microbatches=8)["command"].split()
    assert command[:3] == ["megatron-2bw", "train", "gpt"]
    assert mistake(command[3:], "gpt", 4) is None


def test_no_command_line_is_shown_that_the_entry_script_refuses():
    """A round longer than the batch, and a loss scale for each stage."""
    for microbatches in (2, 8):
        found = of("figures", "gpipe", microbatches=microbatches, stages=2)
        words = found["command"].split()
        assert mistake(words[3:], "gpt", 2) is None
        assert int(words[words.index("--gpipe-round") + 1]) == min(4, microbatches)
        assert ("in rounds of 4" in found["summary"]) == (microbatches == 8)
    found = of("figures", "pipedream", precision="fp16")
    assert found["command"] is None and "choose bf16" in found["reason"] and found["bytes"]


def test_the_archive_needs_no_other_package(tmp_path):
    """In Pyodide there is nothing else."""
    path = tmp_path / "package.zip"
    archive(path)
    code = f"import sys; sys.path.insert(0, {str(path)!r}); from megatron_2bw.playground import answer"
    code += "; print(answer({'ask': 'figures'})['figures']['2bw']['seconds'])"
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == "24.0\n", run.stderr


def test_a_depth_that_does_not_divide_the_layers_has_a_timeline_and_no_bytes():
    found = of("figures", "2bw", stages=5)
    assert found["bytes"] is found["command"] is None and found["reason"] == "32 layers do not divide into 5 stages"
    assert found["bubble"] == pytest.approx(0)


times = st.sampled_from([0, 0.25, 0.5, 1, 1.7, 3])
some = st.fixed_dictionaries(
    {
        "schedules": st.sampled_from([[name] for name in SCHEDULES]),
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
    {"schedules": ["pipedream"], "microbatches": 12, "forward": [0.25, 0.25, 1.7, 3], "transfer": [0] * 3}
    | {"occupied": 0, "reduce": 0, "step": 1}  # (x + 1) - 1 is less than x
)
def test_causes_explain_all_idle_time(given):
    """A stage's idle time is in its waits; each ends as what it names arrives; the critical path has no gap."""
    (name,) = given["schedules"]
    found = answer({"iterations": 2, **given})["timelines"][name]
    starts, ends, small = found["starts"], found["ends"], 1e-6

    def transfer_of(stage: int, other: int) -> float:
        return given["transfer"][min(stage, other)] if abs(stage - other) == 1 else max(given["transfer"])

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
                assert starts[stage][place] == pytest.approx(ends[other][at] + queued + transfer_of(stage, other))
            else:
                done = starts[other][at] + given["reduce"] + given["step"]
                assert kinds[other][at] == "R" and ends[stage][place] == pytest.approx(done)
    path = found["critical"]
    assert starts[path[0][0]][path[0][1]] == 0 and max(map(max, ends)) == ends[path[-1][0]][path[-1][1]]
    for (stage, place), (after, at) in zip(path, path[1:]):
        gap = starts[after][at] - ends[stage][place]
        if kinds[after][at] == "S":
            assert stage == after or kinds[stage][place] == "R"
        elif stage == after:
            assert gap == pytest.approx(0, abs=small)
        else:
            transfer = transfer_of(stage, after)  # and after it the messages before it on its link
            before = (gap - transfer) / (given["occupied"] * transfer or 1)
            assert before == pytest.approx(round(before), abs=small) and before > -small


def test_an_edited_list_is_checked_and_simulated():
    lists = of("timelines", "2bw", iterations=2)["actions"]
    given = {"ask": "check", "schedules": ["2bw"], "iterations": 2}
    same = answer({**given, "lists": lists})["timeline"]
    assert same["starts"] == of("timelines", "2bw", iterations=2)["starts"]
    lists[1] = lists[1].replace("B0@0 F3@0", "F3@0 B0@0")
    fault = answer({**given, "lists": lists})
    assert (fault["stage"], fault["reason"]) == (1, "4 microbatches in flight, at most 3 allowed")
    assert f">{parse(lists[1])[fault['step']]}<" in fault["grid"].splitlines()[2]
    lists[1] = "F0@0 X"
    assert answer({**given, "lists": lists})["error"].startswith("not an action: 'X'")


def test_the_curve_has_the_simulated_rates():
    found = answer({"ask": "curve", "over": "microbatches", "schedules": ["2bw", "pipedream-flush"]})
    rates = dict(zip(found["x"], found["curves"]["pipedream-flush"]))
    assert rates[8] == 8 / iteration_time(EXECUTED["pipedream-flush"], 4, 8)
    one = answer({"ask": "curve", "at": 7, "schedules": ["pipedream-flush"]})
    assert one["x"] == found["x"] and one["curves"]["pipedream-flush"] == found["curves"]["pipedream-flush"][7:8]
    assert dict(zip(found["x"], found["curves"]["2bw"]))[3] is None  # 2bw needs as many microbatches as stages
    found = answer({"ask": "curve", "over": "transfer", "schedules": ["2bw"]})
    slow = Times(transfer=1.5, occupied=1.5)
    assert dict(zip(found["x"], found["curves"]["2bw"]))[1.5] == 8 / iteration_time(EXECUTED["2bw"], 4, 8, slow)


def test_the_trace_has_all_actions():
    events = answer({"ask": "trace", "schedules": ["gpipe"]})["traceEvents"]
    assert sum(event["ph"] == "X" and event["cat"] == "F" for event in events) == 4 * 8 * 3
    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last == pytest.approx(1e3 * of("timelines", "gpipe")["makespan"])


@pytest.mark.parametrize("given", [{"stages": 0}, {"forward": [1, 2]}, {"step": -1}, {"model": "gpt-5"}])
def test_a_wrong_request_is_answered_in_one_line(given):
    assert answer(given)["error"].startswith(*given) and "\n" not in answer(given)["error"]


def test_a_schedule_that_cannot_run_has_a_reason_and_the_others_an_answer():
    found = answer({"schedules": ["2bw", "gpipe", "megatron-interleaved"], "microbatches": 3})["timelines"]
    assert found["2bw"] == {"error": "2bw needs at least 4 microbatches with 4 stages"}
    assert found["megatron-interleaved"]["error"].endswith("needs a multiple of 4 microbatches")
    assert "starts" in found["gpipe"]
