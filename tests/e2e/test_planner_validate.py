"""The planner's validation with the real entry script: two plans on two CPU ranks."""

from __future__ import annotations

import argparse
import json

from megatron_2bw.models.cluster import Cluster, Device, Link
from megatron_2bw.models.model import Model
from megatron_2bw.models.plan import Plan
from megatron_2bw.planner.cost.simulated import Cost
from megatron_2bw.planner.measure import validate


def test_two_plans_run(tmp_path, capsys):
    device = Device("cpu", 16, 0.1, 10, tflops_fp32=0.1, flash=False)
    cluster = Cluster("cpu", 1, 2, device, Link(1, 100), Link(1, 100))
    cost = Cost(Model("tiny", 2, 32, 4, vocab=127, sequence=32), cluster, "fp32")
    plans = [Plan(1, 2, 1, 1, 4), Plan(1, 1, 2, 1, 4, schedule="megatron")]
    parser = argparse.ArgumentParser()
    validate.add_flags(parser)
    options = parser.parse_args(["--iterations", "5", "--out", str(tmp_path), "--timeout", "120"])
    done = validate.run(cost, [cost.estimate(plan) for plan in plans], options)
    logs = "".join((tmp_path / f"trial-{number}.log").read_text()[-3000:] for number in (1, 2))
    assert [trial.status for trial in done] == ["ok", "ok"], logs
    for line, plan in zip((tmp_path / "trials.jsonl").read_text().splitlines(), plans, strict=True):
        entries = json.loads(line)
        assert entries["measured"] > 0 and entries["predicted"] > 0 and entries["ratio"] > 0
        assert len(entries["measured_memory"]) == plan.depth and min(entries["measured_memory"]) > 1e8
    assert validate.exit_status(done) == 0
    *_, order, within = capsys.readouterr().out.splitlines()
    assert order.startswith("order: ") and within.startswith("measured within the uncertainty")
