"""Rebinding Megatron: complete or not at all, and one line when Megatron has
drifted."""

import argparse
from unittest import mock

import pytest

from megatron_2bw.mcore import patches, rebinding
from megatron_2bw.schedules import SCHEDULES

pytestmark = pytest.mark.usefixtures("cpu_layer")


@pytest.fixture
def runtime(monkeypatch):
    """The rows of a late step."""
    from megatron_2bw.mcore import runtime as module

    runtime = module.MegatronRuntime(SCHEDULES["2bw"], None)
    runtime.forward_backward = lambda: "ours"
    runtime.sync_weights = mock.Mock()
    runtime.args = argparse.Namespace(exit_signal_handler=True, exit_duration_in_mins=5)
    monkeypatch.setattr(module, "get_args", lambda: runtime.args)
    return runtime


def test_apply_and_undo(runtime):
    from megatron.training import training

    before = training.get_forward_backward_func, training.initialize_megatron
    undo = rebinding.apply(
        patches.repairs()
        + patches.for_cpu()
        + patches.for_schedule(runtime)
        + patches.for_checkpoints(runtime)
        + patches.for_log(runtime)
        + patches.for_late_step(runtime)
    )
    assert training.get_forward_backward_func()() == "ours"
    assert training.initialize_megatron.keywords == {"allow_no_cuda": True}
    undo()
    assert (training.get_forward_backward_func, training.initialize_megatron) == before


@pytest.mark.parametrize(
    "signature, words",
    [
        ("get_forward_backward_func(a)", "takes (pp_size, vp_size, schedule_pg_"),
        ("gone()", "training.gone is missing"),
    ],
)
def test_drift_is_one_line_and_nothing_is_rebound(signature, words):
    from megatron.training import training

    before = training.initialize_megatron
    drifted = {patches.LOOP: {signature: rebinding.constant(None)}}
    with pytest.raises(rebinding.DriftError) as error:
        rebinding.apply(patches.for_cpu() + rebinding.rows(drifted))
    line = str(error.value)
    assert words in line and "\n" not in line
    assert "needs megatron-core 0.19 as released, found 0.19." in line
    assert training.initialize_megatron is before


def test_another_version_is_refused(monkeypatch):
    import megatron.core.package_info

    monkeypatch.setattr(megatron.core.package_info, "VERSION", (0, 21, 0))
    with pytest.raises(
        rebinding.DriftError, match="0.21.0 is installed, .* needs 0.19"
    ):
        rebinding.apply([])


def test_ranks_are_not_asked_to_exit_until_one_wants_to_exit(runtime):
    """A checkpoint holds the flags as they were given."""
    seen = []

    def flags():
        seen.append(runtime.args.exit_signal_handler)
        seen.append(runtime.args.exit_duration_in_mins)

    save = runtime.save(flags)

    def decide():
        flags()
        save()
        flags()
        raise RuntimeError("in the save")

    with pytest.raises(RuntimeError):
        runtime.decide_exit(decide)()
    save()
    assert seen == [False, None, True, 5, False, None, True, 5]
    assert runtime.sync_weights.call_count == 2
    runtime.exit_requested = True
    runtime.decide_exit(flags)()
    assert seen[8:] == [True, 5]
    assert runtime.decide_exit(lambda: True)() is True
    assert runtime.sync_weights.call_count == 3, "a run that leaves finishes its step"


def test_a_patched_checkout_leaves_megatrons_own_schedule_alone(monkeypatch):
    """What this project's entry script or schedules cannot do is refused there only
    when a schedule is asked for."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_2bw.run import source_checkout
    from megatron_2bw.run.flags import stop

    refuse = mock.Mock(side_effect=SystemExit)
    monkeypatch.setattr(stop, "stop", refuse)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    source_checkout.add_flags(add_megatron_arguments(parser))
    flags = "--fp8-format hybrid --distributed-backend gloo --transformer-impl local"
    args = parser.parse_args(flags.split())
    args.world_size = 1
    source_checkout.check(args)
    assert not hasattr(args, "device")
    args.pipeline_schedule = "2bw"
    with pytest.raises(SystemExit):
        source_checkout.check(args)
    assert refuse.call_args.args[0].startswith("--fp8-format")
