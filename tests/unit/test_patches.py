"""Rebinding Megatron: complete or not at all, and one line when Megatron has
drifted."""

from __future__ import annotations

import argparse
import sys

import pytest

from megatron_2bw.mcore import patches, rebinding
from megatron_2bw.schedules import SCHEDULES

pytestmark = pytest.mark.usefixtures("cpu_layer")


@pytest.fixture
def runtime(monkeypatch):
    """Of a late step. `finished` counts how often it completes a pending one."""
    from megatron_2bw.mcore import runtime

    class Runtime(runtime.MegatronRuntime):
        forward_backward = staticmethod(lambda: "ours")
        finished = 0

        def sync_weights(self):
            self.finished += 1

    made = Runtime(SCHEDULES["2bw"], None)
    made.args = argparse.Namespace(exit_signal_handler=True, exit_duration_in_mins=5)
    monkeypatch.setattr(runtime, "get_args", lambda: made.args)
    return made


def test_apply_and_undo(runtime):
    from megatron.training import training

    before = training.get_forward_backward_func, training.initialize_megatron
    rows = (
        patches.repairs(),
        patches.for_cpu(),
        patches.for_schedule(runtime),
        patches.for_checkpoints(runtime),
    )
    late = (patches.for_log(runtime), patches.for_late_step(runtime))
    undo = rebinding.apply([row for some in (*rows, *late) for row in some])
    assert training.get_forward_backward_func()() == "ours"
    assert training.initialize_megatron.keywords == {"allow_no_cuda": True}
    undo()
    assert (training.get_forward_backward_func, training.initialize_megatron) == before


@pytest.mark.parametrize(
    "name, parameters, line",
    [
        (
            "get_forward_backward_func",
            "a",
            "takes (pp_size, vp_size, schedule_pg_collection), expected (a)",
        ),
        ("gone", "", "megatron.training.training.gone is missing"),
    ],
)
def test_drift_is_one_line_and_nothing_is_rebound(name, parameters, line):
    from megatron.training import training

    before = training.initialize_megatron
    drifted = rebinding.Patch(
        "megatron.training.training",
        name,
        parameters,
        "test",
        lambda original: original,
    )
    with pytest.raises(rebinding.DriftError) as error:
        rebinding.apply([*patches.for_cpu(), drifted])
    assert line in str(error.value) and "\n" not in str(error.value)
    assert "needs megatron-core 0.19 as released, found 0.19." in str(error.value)
    assert training.initialize_megatron is before


def test_another_version_is_refused(monkeypatch):
    import megatron.core.package_info

    monkeypatch.setattr(megatron.core.package_info, "VERSION", (0, 21, 0))
    with pytest.raises(
        rebinding.DriftError,
        match="megatron-core 0.21.0 is installed, megatron_2bw needs 0.19",
    ):
        rebinding.apply([])


def test_ranks_are_not_asked_to_exit_until_one_wants_to_exit(runtime):
    """A checkpoint holds the flags as they were given."""
    seen = []

    def flags():
        seen.append(
            (runtime.args.exit_signal_handler, runtime.args.exit_duration_in_mins)
        )

    save = runtime.save(flags)

    def decide():
        flags()
        save()
        flags()
        raise RuntimeError("in the save")

    with pytest.raises(RuntimeError):
        runtime.decide_exit(decide)()
    save()
    assert (
        seen == [(False, None), (True, 5), (False, None), (True, 5)]
        and runtime.finished == 2
    )
    runtime.exit_requested = True
    runtime.decide_exit(flags)()
    assert seen[4:] == [(True, 5)]
    assert runtime.decide_exit(lambda: True)() is True and runtime.finished == 3, (
        "a run that leaves finishes its step"
    )


def test_a_patched_checkout_leaves_megatrons_own_schedule_alone(monkeypatch):
    """What this project's entry script or schedules cannot do is refused there only
    when a schedule is asked for."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_2bw.run import source_checkout
    from megatron_2bw.run.flags import stop

    stopped = []
    monkeypatch.setattr(
        stop, "stop", lambda message: stopped.append(message) or sys.exit(2)
    )
    parser = source_checkout.add_flags(
        add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    )
    flags = "--fp8-format hybrid --distributed-backend gloo --transformer-impl local"
    args = parser.parse_args(flags.split())
    args.world_size = 1
    source_checkout.check(args)
    with pytest.raises(SystemExit):
        source_checkout.check(
            argparse.Namespace(**vars(args) | {"pipeline_schedule": "2bw"})
        )
    assert len(stopped) == 1 and stopped[0].startswith("--fp8-format")
    assert not hasattr(args, "device")
