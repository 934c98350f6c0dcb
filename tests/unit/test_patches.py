"""Rebinding Megatron: complete or not at all, and one line when Megatron has drifted."""

from __future__ import annotations

import argparse
import sys
import types

import pytest

from megatron_2bw import cpu, patches


@pytest.fixture(scope="module", autouse=True)
def megatron_on_cpu():
    cpu.install()
    import megatron.training.training  # noqa: F401

    yield
    cpu.uninstall()


class Runtime:
    adopted = None
    forward_backward = staticmethod(lambda: "ours")

    def adopt(self, model, optimizer):
        self.adopted = (model, optimizer)


def all_patches() -> list[patches.Patch]:
    return patches.repairs() + patches.for_cpu() + patches.for_schedule(Runtime())


@pytest.mark.parametrize("patch", all_patches(), ids=lambda patch: patch.name)
def test_the_installed_megatron_has_not_drifted(patch):
    assert callable(patch.original())
    assert patch.reason


def test_apply_and_undo():
    from megatron.training import training

    before = training.get_forward_backward_func, training.initialize_megatron
    undo = patches.apply(all_patches())
    assert training.get_forward_backward_func()() == "ours"
    assert training.initialize_megatron.keywords == {"allow_no_cuda": True}
    undo()
    assert (training.get_forward_backward_func, training.initialize_megatron) == before


def drifted(**changes) -> patches.Patch:
    good = dict(
        module="megatron.training.training", name="get_forward_backward_func",
        signature=("pp_size", "vp_size", "schedule_pg_collection"), reason="test", replace=lambda original: original,
    )
    return patches.Patch(**(good | changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(signature=("pp_size",)),
            "get_forward_backward_func takes (pp_size, vp_size, schedule_pg_collection), expected (pp_size)",
        ),
        (dict(name="gone"), "megatron.training.training.gone is missing"),
        (dict(module="megatron.gone"), "megatron.gone.get_forward_backward_func is missing"),
    ],
)
def test_drift_stops_before_anything_is_rebound(changes, message):
    from megatron.training import training

    before = training.initialize_megatron
    with pytest.raises(patches.DriftError) as error:
        patches.apply([*patches.for_cpu(), drifted(**changes)])
    assert message in str(error.value) and "\n" not in str(error.value) and "megatron-core 0.19" in str(error.value)
    assert training.initialize_megatron is before


def test_another_version_is_refused(monkeypatch):
    import megatron.core.package_info

    monkeypatch.setattr(megatron.core.package_info, "VERSION", (0, 20, 0))
    with pytest.raises(patches.DriftError, match="megatron-core 0.20.0 is installed, megatron_2bw needs 0.19"):
        patches.apply([])


def test_compile_helpers_does_nothing_when_the_wheel_has_compiled():
    calls = []
    patches._skip_when_compiled(lambda: calls.append("make"))()
    assert calls == []


def test_compile_helpers_compiles_in_a_source_checkout(monkeypatch):
    import sys

    calls = []
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)  # import raises ImportError
    patches._skip_when_compiled(lambda: calls.append("make"))()
    assert calls == ["make"]


def test_the_optimizer_is_adopted():
    runtime = Runtime()
    (patch,) = [p for p in patches.for_schedule(runtime) if p.name == "get_megatron_optimizer"]
    optimizer = types.SimpleNamespace()
    assert patch.replace(lambda config, chunks: optimizer)("config", ["chunk"]) is optimizer
    assert runtime.adopted == (["chunk"], optimizer)


def test_a_patched_checkout_leaves_megatrons_own_schedule_alone(monkeypatch):
    """What this project's entry script or schedules cannot do is refused there only when a schedule is asked for."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_2bw import native

    stopped = []
    monkeypatch.setattr(native, "stop", lambda message: stopped.append(message) or sys.exit(2))
    parser = native.add_flags(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    flags = "--num-layers-per-virtual-pipeline-stage 1 --distributed-backend gloo --transformer-impl local"
    args = parser.parse_args(flags.split())
    args.world_size = 1
    native.check(args)
    with pytest.raises(SystemExit):
        native.check(argparse.Namespace(**vars(args) | {"pipeline_schedule": "2bw"}))
    assert len(stopped) == 1 and stopped[0].startswith("--num-layers-per-virtual-pipeline-stage 1")
    assert not hasattr(args, "device")
