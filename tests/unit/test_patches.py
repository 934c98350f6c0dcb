"""Rebinding Megatron: complete or not at all, and one line when Megatron has drifted."""

from __future__ import annotations

import argparse
import sys
import types

import pytest

from megatron_2bw import cpu, guard
from megatron_2bw.mcore import patches, repairs
from megatron_2bw.mcore.loop import Loop


@pytest.fixture(scope="module", autouse=True)
def megatron_on_cpu():
    cpu.install()
    import megatron.training.training  # noqa: F401

    yield
    cpu.uninstall()


class Runtime:
    attached = None
    forward_backward = staticmethod(lambda: "ours")

    finished = 0
    log = None
    exit_requested = False

    def attach(self, model, optimizer):
        self.attached = (model, optimizer)

    def attach_scheduler(self, scheduler):
        self.scheduler = scheduler

    def sync_weights(self):
        self.finished += 1


def all_patches() -> list[guard.Patch]:
    runtime = Runtime()
    return [
        *patches.repairs(),
        *patches.for_cpu(),
        *patches.for_schedule(Loop(runtime)),
        *patches.for_log(Loop(runtime)),
        *patches.for_late_step(Loop(runtime)),
        *patches.for_checkpoints(runtime),
    ]


@pytest.mark.parametrize("patch", all_patches(), ids=lambda patch: patch.name)
def test_the_installed_megatron_has_not_drifted(patch):
    assert callable(patch.original()) or patch.parameters is None
    assert patch.reason


def test_apply_and_undo():
    from megatron.training import training

    before = training.get_forward_backward_func, training.initialize_megatron
    undo = guard.apply(all_patches())
    assert training.get_forward_backward_func()() == "ours"
    assert training.initialize_megatron.keywords == {"allow_no_cuda": True}
    undo()
    assert (training.get_forward_backward_func, training.initialize_megatron) == before


def drifted(**changes) -> guard.Patch:
    good = dict(
        module="megatron.training.training",
        name="get_forward_backward_func",
        parameters="pp_size vp_size schedule_pg_collection",
        reason="test",
        replace=lambda original: original,
    )
    return guard.Patch(**(good | changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(parameters="pp_size"),
            "get_forward_backward_func takes (pp_size, vp_size, schedule_pg_collection), expected (pp_size)",
        ),
        (dict(name="gone"), "megatron.training.training.gone is missing"),
        (dict(module="megatron.gone"), "megatron.gone.get_forward_backward_func is missing"),
    ],
)
def test_drift_stops_before_anything_is_rebound(changes, message):
    from megatron.training import training

    before = training.initialize_megatron
    with pytest.raises(guard.DriftError) as error:
        guard.apply([*patches.for_cpu(), drifted(**changes)])
    assert message in str(error.value) and "\n" not in str(error.value) and "megatron-core 0.19" in str(error.value)
    assert training.initialize_megatron is before


def test_another_version_is_refused(monkeypatch):
    import megatron.core.package_info

    monkeypatch.setattr(megatron.core.package_info, "VERSION", (0, 20, 0))
    with pytest.raises(guard.DriftError, match="megatron-core 0.20.0 is installed, megatron_2bw needs 0.19"):
        guard.apply([])


def test_compile_helpers_does_nothing_when_the_wheel_has_compiled():
    calls = []
    repairs.skip_when_compiled(lambda: calls.append("make"))()
    assert calls == []


def test_compile_helpers_compiles_in_a_source_checkout(monkeypatch):
    import sys

    calls = []
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)  # import raises ImportError
    repairs.skip_when_compiled(lambda: calls.append("make"))()
    assert calls == ["make"]


def test_the_optimizer_is_attached():
    runtime = Runtime()
    (patch,) = [p for p in patches.for_schedule(Loop(runtime)) if p.name == "get_megatron_optimizer"]
    optimizer = types.SimpleNamespace()
    assert patch.replace(lambda config, chunks: optimizer)("config", ["chunk"]) is optimizer
    assert runtime.attached == (["chunk"], optimizer)


def late(runtime: Runtime, name: str):
    loop = Loop(runtime)
    (patch,) = [patch for patch in (*patches.for_log(loop), *patches.for_late_step(loop)) if patch.name == name]
    return patch.replace


def test_what_reads_the_newest_weights_finishes_the_step_first():
    runtime = Runtime()
    for name in ("calc_params_l2_norm", "check_param_hashes_across_dp_replicas", "save_checkpoint_and_time"):
        before = runtime.finished
        assert late(runtime, name)(lambda *args: runtime.finished)("model") == before + 1


def test_ranks_are_not_asked_to_exit_until_one_wants_to_exit(monkeypatch):
    import megatron.training

    runtime, args = Runtime(), argparse.Namespace(exit_signal_handler=True, exit_duration_in_mins=5)
    monkeypatch.setattr(megatron.training, "get_args", lambda: args)
    seen = []
    decide = late(runtime, "checkpoint_and_decide_exit")(
        lambda: seen.append((args.exit_signal_handler, args.exit_duration_in_mins))
    )
    decide()
    runtime.exit_requested = True
    decide()
    assert seen == [(False, None), (True, 5)]
    assert (args.exit_signal_handler, args.exit_duration_in_mins) == (True, 5)


def test_a_checkpoint_holds_the_exit_flags_as_they_were_given(monkeypatch):
    import megatron.training

    runtime, args = Runtime(), argparse.Namespace(exit_signal_handler=True, exit_duration_in_mins=5)
    monkeypatch.setattr(megatron.training, "get_args", lambda: args)
    seen = []

    def flags():
        seen.append((args.exit_signal_handler, args.exit_duration_in_mins))

    made = {patch.name: patch.replace for patch in patches.for_late_step(Loop(runtime))}
    save = made["save_checkpoint_and_time"](flags)

    def decide():
        flags()
        save()
        flags()
        raise RuntimeError("in the save")

    with pytest.raises(RuntimeError):
        made["checkpoint_and_decide_exit"](decide)()
    save()
    assert seen == [(False, None), (True, 5), (False, None), (True, 5)] and runtime.finished == 2


def test_a_run_that_leaves_finishes_its_step():
    runtime = Runtime()
    runtime.exit_requested = True
    assert late(runtime, "checkpoint_and_decide_exit")(lambda: False)() is False and runtime.finished == 0
    assert late(runtime, "checkpoint_and_decide_exit")(lambda: True)() is True and runtime.finished == 1


def test_no_reduction_over_the_stages_is_left_in_the_training_step():
    def reduced(*args, **kwargs):
        raise AssertionError("a collective")

    assert late(Runtime(), "logical_and_across_model_parallel_group")(reduced)(True, group="mp") is True
    assert late(Runtime(), "reduce_max_stat_across_model_parallel_group")(reduced)(1.5, group="mp") == 1.5


def test_the_scheduler_is_attached():
    runtime = Runtime()
    assert late(runtime, "get_optimizer_param_scheduler")(lambda optimizer: "scheduler")("optimizer") == "scheduler"
    assert runtime.scheduler == "scheduler"


def test_lines_of_the_log_are_kept_for_later():
    kept = []
    runtime = Runtime()
    runtime.log = types.SimpleNamespace(
        add=lambda write, values: kept.append(values) or "flag", line=lambda text: text + " more"
    )

    def training_log(loss_dict, iteration, report_memory_flag, is_first_iteration=False): ...

    assert late(runtime, "training_log")(training_log)({}, 3, report_memory_flag=True) == "flag"
    assert kept == [{"loss_dict": {}, "iteration": 3, "report_memory_flag": True, "is_first_iteration": False}]
    printed = []
    late(runtime, "print_rank_last")(printed.append)("line")
    assert printed == ["line more"]


def test_a_patched_checkout_leaves_megatrons_own_schedule_alone(monkeypatch):
    """What this project's entry script or schedules cannot do is refused there only when a schedule is asked for."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_2bw import native
    from megatron_2bw.start import exits

    stopped = []
    monkeypatch.setattr(exits, "stop", lambda message: stopped.append(message) or sys.exit(2))
    parser = native.add_flags(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    flags = "--num-layers-per-virtual-pipeline-stage 1 --distributed-backend gloo --transformer-impl local"
    args = parser.parse_args(flags.split())
    args.world_size = 1
    native.check(args)
    with pytest.raises(SystemExit):
        native.check(argparse.Namespace(**vars(args) | {"pipeline_schedule": "2bw"}))
    assert len(stopped) == 1 and stopped[0].startswith("--num-layers-per-virtual-pipeline-stage 1")
    assert not hasattr(args, "device")
