"""Every name of Megatron that is touched has a row, and a row that does not fit stops the program with one line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_2bw import cpu, guard
from megatron_2bw.mcore import patches, required

PACKAGE = Path(__file__).parents[2] / "megatron_2bw"


@pytest.fixture(scope="module", autouse=True)
def megatron_on_cpu():
    cpu.install()
    yield
    cpu.uninstall()


@pytest.mark.parametrize("row", required.REQUIRED, ids=lambda row: row.owner or row.module)
def test_the_installed_megatron_has_not_drifted(row):
    row.check()
    assert row.reason and row.parsed()


def row(owner: str) -> guard.Required:
    (found,) = [each for each in required.REQUIRED if each.owner == owner]
    return found


@pytest.mark.parametrize(
    "drifted, line",
    [
        (replace(row("Timer"), names="_elapsed _gone"), "megatron.core.timers.Timer._gone is missing"),
        (replace(row("Timer"), names="gone()"), "megatron.core.timers.Timer.gone is missing"),
        (replace(row("Timer"), names="start()"), "Timer.start takes (self, barrier), expected (self)"),
        (replace(row("Timer"), owner="Gone"), "megatron.core.timers.Gone is missing"),
        (replace(row("Timer"), module="megatron.gone"), "megatron.gone.Timer is missing"),
        (replace(row("DistributedDataParallel"), names="gone"), "DistributedDataParallel.gone is missing"),
    ],
)
def test_drift_is_one_line_with_both_versions_and_nothing_is_rebound(drifted, line):
    from megatron.training import training

    before = training.initialize_megatron
    with pytest.raises(guard.DriftError) as error:
        guard.apply(patches.for_cpu(), [drifted])
    text = str(error.value)
    assert line in text and "\n" not in text
    assert "needs megatron-core 0.19 as released, found 0.19." in text
    assert training.initialize_megatron is before


# --- places without a row ------------------------------------------------------------------------------------------

# Variables that hold no object of Megatron: this project's own, torch's, Python's. (A parameter has both's attributes.)
OURS = {"self", "cls", "neighbours", "sender", "receiver", "write", "self.working", "runtime", "batch", "super()"}
TORCH = {"warnings", "torch", "torch._dynamo", "torch._dynamo.trace_rules", "named"}
# Objects of Megatron that this project makes itself, for itself.
COPIES = {"self.megatron", "part.optimizer.pg_collection", "self.model", "self.config", "other", "entry"}
# Checked elsewhere: the arguments by the parser, what tests and benchmarks preload by their run.
ELSEWHERE = {"args", "MockGPTLowLevelDataset", "ArgumentGroupFactory"}


def touched(path: Path) -> Iterator[tuple[str, str, int]]:
    """(object, attribute, line) of each attribute that is set, or private and read, on a foreign object."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            if isinstance(node.ctx, (ast.Store, ast.Del)) or private:
                yield ast.unparse(node.value), node.attr, node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            yield ast.unparse(node.args[0]), ast.unparse(node.args[1]), node.lineno


def rows() -> set[str]:
    # "name": of `use_group`, a loop over two names that have rows; data and grad: of torch's parameters.
    return {name for each in required.REQUIRED for name, _ in each.parsed()} | {"name", "data", "grad"}


def unguarded(paths) -> list[str]:
    known = rows()
    return [
        f"{path.name}:{line}: {owner}.{name}"
        for path in paths
        for owner, name, line in touched(path)
        if owner not in OURS | TORCH | COPIES | ELSEWHERE and name not in known
    ]


def test_every_touched_name_of_megatron_has_a_row():
    rooms = ("core", "mcore", "checkpoints", "start")
    paths = [path for room in rooms for path in sorted((PACKAGE / room).glob("*.py")) if path.name != "guard.py"]
    assert unguarded(paths) == []


@pytest.mark.parametrize(
    "line",
    ["optimizer.new_name = 1", "del ddp.new_name", "setattr(ddp, 'new_name', 1)", "bucket._private()", "a, b.c = 1, 2"],
)
def test_a_place_without_a_row_is_found(line, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(line)
    assert len(unguarded([path])) == 1
