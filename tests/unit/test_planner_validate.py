"""The planner's validation: what is read from logs, order and table, the commands, and that nothing stays alive."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import replace

import psutil
import pytest

from megatron_2bw.errors import UserError
from megatron_2bw.models.cluster import Cluster, Device, Link
from megatron_2bw.models.model import Model
from megatron_2bw.models.plan import Plan
from megatron_2bw.models.profile import BlockTime, Profile
from megatron_2bw.planner.cost.simulated import Cost
from megatron_2bw.planner.measure import place as places
from megatron_2bw.planner.measure import trials, validate
from megatron_2bw.planner.measure.place import Place, command, refusal, split
from megatron_2bw.planner.measure.trials import Trial

MIB, GIB = 2**20, 2**30
MODEL = Model("tiny", 2, 32, 4, vocab=127, sequence=32)
CPU = Device("cpu", 16, 0.1, 10, tflops_fp32=0.1, flash=False)
COST = Cost(MODEL, Cluster("cpu", 1, 2, CPU, Link(1, 100), Link(1, 100)), "fp32")
PLAN = Plan(1, 2, 1, 2, 4)
HERE = Place("cpu", 1, 8)


def lines(milliseconds: list[float], suffix: str = "") -> str:
    """A log as Megatron writes it."""
    return "training ...\n" + "".join(
        f" [2026-11-21 18:16:04.6] iteration {number:8d}/{len(milliseconds):8d} | consumed samples: {4 * number:12d} | "
        f"elapsed time per iteration (ms): {each:.1f} | learning rate: 1.0E-04 | lm loss: 4.8E+00 |{suffix}\n"
        for number, each in enumerate(milliseconds, 1)
    )


@pytest.mark.parametrize(
    "count, flushes, expected",
    [
        (8, True, [4, 5, 6, 7, 8]),
        (8, False, [4, 5, 6, 7]),
        (7, False, [4, 5, 6]),
        (6, True, [3, 4, 5, 6]),
        (5, False, [3, 4]),
        (4, True, [3, 4]),
        (4, False, [3]),
    ],
)
def test_the_iterations_that_count(count, flushes, expected):
    log = lines([1000.0 * number for number in range(1, count + 1)])
    assert trials.steady_seconds(log, count, flushes) == tuple(expected)
    assert trials.steady_seconds(log, count + 1, flushes) == ()  # it ended too early


def test_lines_that_another_rank_writes_into():
    log = lines([30, 20, 10.5, 11]).replace(" |\n", " |Number of parameters in billions:  0.00\n\n", 1)
    assert trials.iteration_seconds(log) == {1: 0.03, 2: 0.02, 3: 0.0105, 4: 0.011}
    assert trials.iteration_seconds("no iteration here") == {}


def test_memory_by_stage():
    log = lines([5, 5], " bubble: 1.0%/2.0% | peak memory by stage (GiB): 0.50 0.25 |")
    assert trials.stage_memory(log, PLAN) == (0.5 * GIB, 0.25 * GIB)
    assert trials.stage_memory(log, replace(PLAN, depth=3)) == ()
    report = "[Rank {}] (after {} iterations) memory (MB) | allocated: 1.00 | max allocated: {} | reserved: 2.00\n"
    log = "".join(report.format(*each) for each in ((0, 1, 10), (3, 1, 30), (2, 2, 25), (0, 2, 12), (1, 2, 14)))
    two = replace(PLAN, tensor=2, schedule="megatron")  # ranks 0 and 1 are the first stage
    assert trials.stage_memory(log, two) == (14 * MIB, 30 * MIB)
    assert trials.stage_memory(log, replace(two, tensor=1, width=2)) == (14 * MIB, 30 * MIB)
    assert trials.stage_memory(log, replace(two, tensor=1, width=2, pipeline_inside=True)) == (25 * MIB, 30 * MIB)
    assert trials.stage_memory(log.replace("[Rank 2]", "").replace("[Rank 3]", ""), two) == ()


@pytest.mark.parametrize(
    "log, expected",
    [
        (
            "Traceback (most recent call last):\n  File x\n[rank1]: ValueError: the cause\n[rank0]: RuntimeError: closed\n",  # noqa: E501
            ("failed", "ValueError: the cause"),
        ),
        (
            "pretrain_gpt_2bw.py: error: --hidden-size: too odd\nx.errors.ChildFailedError: \n====\n",
            ("failed", "pretrain_gpt_2bw.py: error: --hidden-size: too odd"),
        ),
        (
            "RuntimeError: NCCL\n[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n",
            ("out of memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        ),
        (
            "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried\n",
            ("out of memory", "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried"),
        ),
        (
            "x\n  traceback : Signal 9 (SIGKILL) received by PID 12\nlast\n",
            ("failed", "traceback : Signal 9 (SIGKILL) received by PID 12"),
        ),
        ("only\nwords\n\n", ("failed", "words")),
        ("", ("failed", "no output")),
    ],
)
def test_why_a_run_failed(log, expected):
    assert trials.failure(log) == expected


def test_spearman():
    assert trials.spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert trials.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert trials.spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert trials.spearman([1, 1, 2], [5, 5, 9]) == pytest.approx(1)  # ties
    assert trials.spearman([1, 1, 1], [1, 2, 3]) is None


def trial(schedule: str, predicted: float, measured: float | None, batch: int = 4, **changes) -> Trial:
    plan = replace(PLAN, schedule=schedule, microbatches=batch // 2)
    return Trial(plan, ("--flag",), predicted, (GIB, 2 * GIB), measured, **changes)


def test_order_is_by_samples_a_second():
    first, second, third = trial("2bw", 1, 1.1), trial("gpipe", 3, 2.4, batch=8), trial("megatron", 2, 1.6)
    assert trials.order([first, second, third]) == "order: as predicted (Spearman 1.00 of 3 plans)"
    worse = replace(second, measured=4.0)
    assert trials.order([first, worse, third]) == (
        "order: not as predicted, the fastest was predicted fastest (Spearman 0.50 of 3 plans)"
    )
    assert trials.order([replace(first, measured=9.0), second]) == (
        "order: not as predicted, the fastest was predicted slower"
    )
    assert trials.order([first, third]) == "order: as predicted"
    found = [replace(first, measured=first.predicted / ratio) for ratio in (0.79, 0.81, 1.19, 1.21)]
    line = trials.within([*found, trial("gpipe", 1, None, status="failed")], 0.2)
    assert line == "measured within the uncertainty of 20%: 2 of 4 plans"
    assert trials.order([first, trial("gpipe", 1, None, status="failed")]) == "order: unknown, fewer than two plans ran"


def test_the_table():
    rows = [
        trial("2bw", 0.1, 0.125, measured_memory=(GIB, 1.5 * GIB)),
        trial("gpipe", 0.2, None, status="out of memory", error="x"),
    ]
    head, first, second = trials.table(rows, memory=True).splitlines()
    assert head.split("  ")[0] == "plan" and head.endswith("GiB predicted  measured")
    assert first.split() == "2bw t1 d2 w1 b2 m2 100.0 125.0 0.80 32.0 2.00 1.50".split()
    assert second.split() == "gpipe t1 d2 w1 b2 m2 200.0 2.00 out of memory".split()
    assert "GiB" not in trials.table(rows, memory=False)


def test_labels_differ_where_plans_do():
    variants = [
        dict(),
        dict(recompute="full"),
        dict(gradient_slots=1),
        dict(first=1, last=2),
        dict(virtual=2),
        dict(distributed_optimizer=True),
        dict(pipeline_inside=True),
        dict(sequence_parallel=True),
        dict(microbatches=5),
    ]
    assert len({trials.label(replace(PLAN, **changes)) for changes in variants}) == len(variants)


def test_a_line_of_the_file():
    entries = json.loads(json.dumps(trial("2bw", 0.1, 0.2).entries()))
    assert entries["ratio"] == 0.5 and entries["name"] == "2bw t1 d2 w1 b2 m2" and entries["plan"]["depth"] == 2
    assert json.loads(json.dumps(trial("2bw", 0.1, None).entries()))["ratio"] is None


def test_a_picture(tmp_path):
    trials.draw([trial("2bw", 0.1, 0.125), trial("gpipe", 0.2, None), trial("megatron", 0.2, 0.2)], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


# --- where plans run -------------------------------------------------------------------------------------------------


def test_what_cannot_run_here():
    assert refusal(PLAN, 2, HERE) is None
    many = refusal(replace(PLAN, width=8), 16, HERE)
    assert many.startswith("--tensor-model-parallel-size 1 x --pipeline-model-parallel-size 2 x 8 pipelines are 16 ")
    line = refusal(replace(PLAN, tensor=2, sequence_parallel=True), 4, HERE)
    assert line.startswith("--sequence-parallel does not work on the CPU") and "--no-sequence-parallel" in line
    line = refusal(PLAN, 2, Place("cuda", 1, 1))
    assert line.startswith("--tensor-model-parallel-size 1 x ") and "need 2 GPUs, but there are 1: " in line
    wide = replace(PLAN, width=8)
    assert refusal(wide, 8, Place("cuda", 2, 8, "a")) is None
    assert "need 16 GPUs, but there are 2 servers with 4" in refusal(wide, 8, Place("cuda", 2, 4, "a"))
    assert refusal(replace(PLAN, width=6), 8, Place("cuda", 2, 8, "a")) is not None  # 12 on servers of 8


def test_the_device_is_the_clusters(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    assert places.find_place("auto", COST.cluster).device == "cpu"
    on_gpus = replace(COST.cluster, device=replace(CPU, name="H100"))
    assert places.find_place("auto", on_gpus).device == "cuda"
    assert places.find_place("cpu", on_gpus).ranks >= 4


def test_commands(monkeypatch):
    words, script = ["--lr", "1"], validate.script_path(MODEL)
    here = command(words, PLAN, 2, HERE, script, 1)
    assert here[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node", "2"] and "--standalone" in here
    assert here[-3:] == [str(script), "--lr", "1"] and script.exists()
    assert split(replace(PLAN, width=8), 8, HERE) == (1, 16)

    monkeypatch.setenv("SLURM_JOB_ID", "41234")
    there = command(words, replace(PLAN, width=8), 8, Place("cuda", 2, 8, "node1"), script, 3)
    assert there[:3] == ["srun", "--nodes", "2"] and "--nodelist" not in there
    for flag, expected in (
        ("--ntasks-per-node", "1"),
        ("--nnodes", "2"),
        ("--nproc-per-node", "8"),
        ("--rdzv-backend", "c10d"),
        ("--rdzv-endpoint", "node1:21237"),
        ("--rdzv-id", "41234-3"),
    ):
        assert there[there.index(flag) + 1] == expected
    one = command(words, PLAN, 8, Place("cuda", 2, 8, "node1"), script, 1)
    assert one[one.index("--nodelist") + 1] == "node1" and one[one.index("--nnodes") + 1] == "1"


def test_servers_of_a_slurm_allocation(monkeypatch, tmp_path):
    tool = tmp_path / "scontrol"
    tool.write_text('#!/bin/sh\n[ "$1 $2 $3" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, value in (("JOB_ID", "1"), ("NNODES", "2"), ("JOB_NODELIST", "node[7-8]"), ("GPUS_ON_NODE", "4")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert places.find_place("cuda", COST.cluster) == Place("cuda", 2, 4, "node7")
    tool.unlink()
    with pytest.raises(UserError, match="SLURM_JOB_NODELIST"):
        places.find_place("cuda", COST.cluster)


def test_ranks_on_the_cpu_have_one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert places.environment(PLAN, "cpu")["OMP_NUM_THREADS"] == "1"
    assert places.environment(PLAN, "cuda")["OMP_NUM_THREADS"] == "7"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in places.environment(PLAN, "cuda")  # the run chooses
    assert places.environment(replace(PLAN, tensor=2), "cuda")["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_flags():
    words = validate.flags(COST, PLAN, 5, "cpu")
    for flag, value in (
        ("--vocab-size", "127"),
        ("--train-iters", "5"),
        ("--log-interval", "1"),
        ("--device", "cpu"),
        ("--pipeline-schedule", "2bw"),
        ("--global-batch-size", "8"),
        ("--num-workers", "0"),
    ):
        assert words[words.index(flag) + 1] == value
    assert "--initial-loss-scale" in validate.flags(Cost(MODEL, COST.cluster, "fp16"), PLAN, 5, "cpu")
    assert "--num-workers" not in validate.flags(COST, PLAN, 5, "cuda")


def test_notes_on_predictions_of_something_else():
    assert validate.notes(COST, HERE) == []
    times = (BlockTime(1, 1.0, 2.0),)
    profile = Profile(
        "cpu", "fp32", "gpt", 32, 4, 128, 4, 8, 32, False, True, 127, times, times, 1e-9, "Adam", 2, "by hand"
    )
    (note,) = validate.notes(Cost(MODEL, replace(COST.cluster, profile=profile), "fp32"), HERE)
    assert note.startswith("the profile was measured with 2 threads")
    other = Cost(replace(MODEL, sequence=64), replace(COST.cluster, profile=replace(profile, threads=1)), "fp32")
    assert validate.notes(other, HERE) == ["--seq-length: the profile was measured with 32, and tiny has 64"]
    (note,) = validate.notes(Cost(MODEL, replace(COST.cluster, device=replace(CPU, name="H100")), "fp32"), HERE)
    assert note.startswith("--cluster cpu has GPUs")


@pytest.mark.parametrize(
    "device, flash, engine, expected",
    [("cuda", True, False, 1), ("cuda", True, True, 0), ("cuda", False, False, 0), ("cpu", True, False, 0)],
)
def test_a_note_where_the_attention_scores_are_kept_after_all(device, flash, engine, expected, monkeypatch):
    monkeypatch.setattr(validate, "installed", lambda name: engine)
    assert validate.notes(Cost(MODEL, COST.cluster, "fp32", flash), Place(device, 1, 8)) == expected * [
        "Transformer Engine is missing: the local layers keep the attention scores; plan with --attention core"
    ]


@pytest.mark.parametrize(
    "there, expected",
    [
        ((), {"--transformer-impl", "--no-gradient-accumulation-fusion"}),
        (("transformer_engine",), {"--no-gradient-accumulation-fusion"}),  # its output layer is Megatron's own
        (("fused_weight_gradient_mlp_cuda",), {"--transformer-impl"}),
        (("transformer_engine", "fused_weight_gradient_mlp_cuda"), set()),
    ],
)
def test_a_gpu_without_a_package_gets_the_flags_that_replace_it(there, expected, monkeypatch):
    monkeypatch.setattr(validate, "installed", lambda name: name in there)
    words = validate.flags(COST, Plan(1, 2, 1, 1, 2), 4, "cuda")
    assert expected == {"--transformer-impl", "--no-gradient-accumulation-fusion"} & set(words)


def test_the_entry_script_of_a_model(monkeypatch, tmp_path):
    assert validate.script_path(MODEL) == validate.ROOT / "pretrain_gpt_2bw.py"
    monkeypatch.setattr(validate, "ROOT", tmp_path)
    with pytest.raises(UserError, match="^--model tiny: no entry script here trains a gpt$"):
        validate.script_path(MODEL)
    (tmp_path / "pretrain_bert_2bw.py").touch()
    assert validate.script_path(replace(MODEL, kind="bert")) == tmp_path / "pretrain_bert_2bw.py"


# --- trials, with a stand-in for torchrun ----------------------------------------------------------------------------


def options(folder, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    validate.add_flags(parser)
    return parser.parse_args(["--out", str(folder), "--iterations", "5", *words])


@pytest.fixture
def pretend(monkeypatch):
    """Each plan's run is a line of a shell, by its schedule: a Python may need the whole time limit to start."""
    codes = {
        "2bw": f"echo {shlex.quote(lines([90, 80, 50, 60, 70]))}",
        "gpipe": "echo 'ValueError: of no use'; exit 1",
        "pipedream-flush": "echo waits; exec sleep 60",
        "no-pipelining": "echo nothing",
    }
    monkeypatch.setattr(validate, "find_place", lambda device, cluster: HERE)
    monkeypatch.setattr(validate, "command", lambda words, plan, *rest: ["sh", "-c", codes[plan.schedule]])


def test_a_plan_that_fails_stops_no_other(pretend, tmp_path, capsys):
    plans = [replace(PLAN, schedule=name) for name in ("gpipe", "pipedream-flush", "no-pipelining", "2bw")]
    plans.append(replace(PLAN, tensor=2, sequence_parallel=True))
    folder = tmp_path / "new"
    done = validate.run(COST, [COST.estimate(plan) for plan in plans], options(folder, "--timeout", "1.5"))
    assert [(trial.status, trial.error.split(":")[0]) for trial in done] == [
        ("failed", "ValueError"),
        ("timeout", "0 of 5 iterations in 1.5 s"),
        ("failed", "exit status 0, but the log lacks iterations"),
        ("ok", ""),
        ("refused", "--sequence-parallel does not work on the CPU, where tensor parallelism works only without it"),
    ]
    assert done[3].measured == pytest.approx(0.055) and done[3].steady == (0.05, 0.06) and 0 <= done[3].others <= 1
    assert validate.exit_status(done) == 0 and validate.exit_status(done[:3]) == 1
    written = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert written == json.loads(json.dumps([trial.entries() for trial in done]))
    assert json.loads((folder / "validate.json").read_text())["trials"] == written
    assert (folder / "validate.png").exists() and (folder / "trial-1.log").read_text().startswith("ValueError")
    printed = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(f"{number}/5  ") for number, line in enumerate(printed, 1)) == 5
    within = "measured within the uncertainty of 25%: 0 of 1 plans"
    assert printed[-2:] == ["order: unknown, fewer than two plans ran", within]


def test_what_is_refused_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(validate, "find_place", lambda device, cluster: HERE)
    monkeypatch.setattr(validate, "execute", None)
    estimate, many = COST.estimate(PLAN), COST.estimate(replace(PLAN, width=8))
    bert = Cost(replace(MODEL, kind="no such kind"), COST.cluster, "fp32")
    (tmp_path / "file").touch()
    for cost, estimates, words, message in (
        (COST, [estimate], ["--iterations", "3"], "--iterations 3: 4 at least"),
        (COST, [estimate], ["--timeout", "0"], "--timeout must be positive, not 0"),
        (COST, [], [], "--top: there is no plan to run"),
        (COST, [many, many], [], "--tensor-model-parallel-size 1 x "),
        (bert, [estimate], [], "--model tiny: no entry script here trains a no such kind"),
        (COST, [estimate], ["--out", str(tmp_path / "file")], f"--out {tmp_path}/file: "),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            validate.run(cost, estimates, options(tmp_path / "out", *words))
    assert not (tmp_path / "out").exists()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_time_limit_ends_what_was_started(stubborn, tmp_path, monkeypatch):
    """Ranks have sessions of their own under torchrun; here one that even ignores SIGTERM."""
    ignore = "trap '' TERM; " if stubborn else ""
    code = f"""setsid sh -c "{ignore}echo up; sleep 600" & echo $!; sleep 600"""
    if stubborn:
        monkeypatch.setattr(validate, "PATIENCE", 0.5)
    assert validate.execute(["sh", "-c", code], tmp_path / "log", {}, 1.5) is None
    words = (tmp_path / "log").read_text().split()
    assert "up" in words
    pid = next(int(word) for word in words if word.isdecimal())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
