"""Runs plans on CPU ranks, GPUs or a Slurm allocation, and compares them with their predictions.

Invariant: a plan that fails does not stop the others. Every started process ends, also after a time limit or an
interrupt. trials.jsonl has a line for each finished trial.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

from megatron_2bw.errors import UserError, file_errors
from megatron_2bw.files import write_json
from megatron_2bw.flags.rule import installed
from megatron_2bw.models.model import Model, command_line
from megatron_2bw.models.plan import Plan
from megatron_2bw.planner.cost.simulated import Cost, Estimate
from megatron_2bw.planner.measure import trials as reading
from megatron_2bw.planner.measure.place import Place, command, environment, find_place, refusal
from megatron_2bw.planner.measure.trials import FAILED, OK, REFUSED, TIMEOUT, Trial
from megatron_2bw.planner.tell.jobs import entry_script, mock_data
from megatron_2bw.processes import stop_tree
from megatron_2bw.start.torchrun import ROOT, start

PATIENCE = 10.0  # seconds between SIGTERM and SIGKILL
BUSY = 0.1  # share of the cores that others use, above which measured times are unreliable
FILES = ("trials.jsonl", "validate.json", "validate.png")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `megatron-2bw-plan validate`, without those of the planner."""
    out = dict(type=Path, default=Path("out/validate"), metavar="DIR")
    parser.add_argument("--iterations", type=int, default=8, help="of each plan (default: 8)")
    parser.add_argument("--out", **out, help=f"folder of {', '.join(FILES)} and logs (default: out/validate)")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="of each plan (default: 600)")
    devices = "auto: GPUs, or the CPU if the cluster's device has the name cpu"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=devices)


def run(cost: Cost, estimates: list[Estimate], options: argparse.Namespace) -> list[Trial]:
    """Run the plans one after the other. UserError if a flag is wrong or if no plan can run here."""
    place = find_place(options.device, cost.cluster)
    refusals = _check(cost, estimates, options, place)
    folder = _prepared(options.out)
    said = notes(cost, place)
    for note in said:
        print(f"note: {note}", flush=True)
    done: list[Trial] = []
    for number, (estimate, refused) in enumerate(zip(estimates, refusals), 1):
        trial = _try(cost, estimate, options, place, number, refused)
        done.append(trial)
        with open(folder / "trials.jsonl", "a") as file:
            file.write(json.dumps(trial.entries()) + "\n")
        print(f"{number}/{len(estimates)}  {_described(trial)}", flush=True)
    _summarize(cost, place, options, done, said, folder)
    print(f"\n{reading.table(done, memory=place.device == 'cuda')}\n{reading.order(done)}", flush=True)
    print(reading.within(done, cost.cluster.device.error), flush=True)
    return done


def exit_status(done: list[Trial]) -> int:
    """0 if at least one plan ran."""
    return 0 if any(trial.status == OK for trial in done) else 1


def _check(cost: Cost, estimates: list[Estimate], options: argparse.Namespace, place: Place) -> list[str | None]:
    """For each plan why it cannot run here, or None."""
    least = reading.MIN_ITERATIONS
    if options.iterations < least:
        raise UserError(f"--iterations {options.iterations}: {least} at least, the first ones do not count")
    if not options.timeout > 0:
        raise UserError(f"--timeout must be positive, not {options.timeout:g}")
    script_path(cost.model)
    if not estimates:
        raise UserError("--top: there is no plan to run")
    refusals = [refusal(estimate.plan, cost.cluster.gpus_per_server, place) for estimate in estimates]
    if all(refusals):
        raise UserError(str(refusals[0]))
    return refusals


def _prepared(folder: Path) -> Path:
    """The folder, without the results of an earlier run."""
    with file_errors(f"--out {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        (folder / FILES[0]).touch()
    return folder


# --- one plan --------------------------------------------------------------------------------------------------------


def script_path(model: Model) -> Path:
    """The model's entry script, in the package's parent folder (clone and wheel). UserError if there is none."""
    path = ROOT / entry_script(model)
    if path.exists():
        return path
    raise UserError(f"--model {model.name}: no entry script here trains a {model.kind}")


def flags(cost: Cost, plan: Plan, iterations: int, device: str) -> list[str]:
    """The command line of the entry script: the model, the plan, mock data, and a line for each iteration."""
    on_cpu = device == "cpu"
    engine, norm, scores, gradients = (
        on_cpu or installed(name)
        for name in ("transformer_engine", "amp_C", "scaled_masked_softmax_cuda", "fused_weight_gradient_mlp_cuda")
    )
    return [
        *cost.model.flags(),
        *plan.flags(cost.precision),
        *mock_data(cost.model),
        *command_line(
            # Verbose, so that `calibrate` finds the arguments in the log.
            (True, f"--device {device} --train-iters {iterations} --lr 0.0001 --lr-decay-style constant --verbose"),
            (True, f"--clip-grad 1.0 --eval-iters 0 --eval-interval {iterations + 1} --log-interval 1"),
            # With Megatron's initial scale of 2^32 the first steps would be skipped.
            (cost.precision == "fp16", "--initial-loss-scale 1024"),
            (on_cpu, "--num-workers 0"),  # workers would use the ranks' cores
            # Megatron requires these on a GPU without Transformer Engine or Apex; the last one without Apex.
            (not engine, "--transformer-impl local --no-rope-fusion"),
            (not engine and not norm, "--no-persist-layer-norm"),
            (not engine and not scores, "--no-masked-softmax-fusion"),
            (not gradients, "--no-gradient-accumulation-fusion"),
        ),
    ]


def _try(
    cost: Cost, estimate: Estimate, options: argparse.Namespace, place: Place, number: int, refused: str | None
) -> Trial:
    """Run one plan until it ends or reaches the time limit."""
    plan, iterations, log = estimate.plan, options.iterations, options.out / f"trial-{number}.log"
    words = flags(cost, plan, iterations, place.device)
    known = dict(
        plan=plan,
        flags=tuple(words),
        predicted=estimate.seconds,
        log=str(log),
        predicted_memory=tuple(stage.total for stage in estimate.memory),
    )
    if refused:
        return Trial(**known | {"log": ""}, status=REFUSED, error=refused)
    line = command(words, plan, cost.cluster.gpus_per_server, place, script_path(cost.model), number)
    begun, used = time.monotonic(), _seconds_of_others()
    try:
        code = execute(line, log, environment(plan, place.device), options.timeout)
    except OSError as error:
        return Trial(**known, status=FAILED, error=f"{line[0]}: {error.strerror}")
    took = time.monotonic() - begun
    known["took"] = round(took, 1)
    if place == Place("cpu", 1, place.ranks):
        known["others"] = round(min(max(_seconds_of_others() - used, 0.0) / (took * (os.cpu_count() or 1)), 1.0), 3)
    text = log.read_text(errors="replace")
    if code is None:
        seen = len(reading.iteration_seconds(text))
        return Trial(**known, status=TIMEOUT, error=f"{seen} of {iterations} iterations in {options.timeout:g} s")
    if code:
        status, error = reading.failure(text)
        return Trial(**known, status=status, error=error)
    steady = reading.steady_seconds(text, iterations, plan.pipeline.flushes)
    if not steady:
        return Trial(**known, status=FAILED, error="exit status 0, but the log lacks iterations")
    memory = reading.stage_memory(text, plan)
    return Trial(**known, measured=statistics.median(steady), steady=steady, measured_memory=memory)


def _seconds_of_others() -> float:
    """Core time since the host's start, without this process and its finished children."""
    import psutil

    times, mine = psutil.cpu_times(), os.times()
    idle = ("idle", "iowait", "guest", "guest_nice")  # user time includes guests
    busy = sum(getattr(times, name) for name in times._fields if name not in idle)
    return busy - mine.user - mine.system - mine.children_user - mine.children_system


def execute(line: list[str], log: Path, variables: dict[str, str], timeout: float) -> int | None:
    """Run a command with its output in `log`; its exit status, or None after `timeout` seconds. Raises OSError."""
    with open(log, "wb") as file:
        process = start(line, file, env=variables)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        stop_tree(process, PATIENCE)


def notes(cost: Cost, place: Place) -> list[str]:
    """The differences between what was predicted and what runs."""
    profile, on_cpu, found = cost.cluster.profile, place.device == "cpu", []
    if on_cpu and cost.cluster.device.name != "cpu":
        found.append(f"--cluster {cost.cluster.name} has GPUs, the plans run on the CPU: their order may differ")
    if not on_cpu and cost.memory.flash and not installed("transformer_engine"):
        remedy = "plan with --attention core"
        found.append(f"Transformer Engine is missing: the local layers keep the attention scores; {remedy}")
    if profile is not None:
        found += filter(None, [profile.fits(cost.model, cost.precision)])
    if profile is not None and on_cpu and profile.threads != 1:
        threads = f"the profile was measured with {profile.threads} threads, and each rank here has one"
        found.append(f"{threads}: measure it again with OMP_NUM_THREADS=1")
    return found


# --- results ---------------------------------------------------------------------------------------------------------


def _described(trial: Trial) -> str:
    name, predicted = reading.label(trial.plan), f"predicted {1e3 * trial.predicted:.1f} ms"
    if trial.status != OK:
        return f"{name}: {predicted}, {trial.status}: {trial.error}"
    measured = f"measured {1e3 * trial.measured:.1f} ms, ratio {trial.ratio:.2f}"
    busy = f", other processes used {trial.others:.0%} of the cores" if (trial.others or 0) > BUSY else ""
    return f"{name}: {predicted}, {measured} ({trial.took:.0f} s){busy}"


def _summarize(
    cost: Cost, place: Place, options: argparse.Namespace, done: list[Trial], said: list[str], folder: Path
) -> None:
    """Write validate.json and, if a plan ran, validate.png."""
    profile = cost.cluster.profile
    result = {
        "kind": "megatron-2bw validation",
        "model": asdict(cost.model),
        "cluster": cost.cluster.name,
        "precision": cost.precision,
        "times": f"MEASURED on {profile.device}, {profile.made_with}" if profile else "ESTIMATED",
        "place": asdict(place),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "iterations": options.iterations,
        "notes": said,
        "spearman": reading.rank_correlation(done),
        "order": reading.order(done),
        "uncertainty": reading.within(done, cost.cluster.device.error),
        "trials": [trial.entries() for trial in done],
    }
    write_json(folder / "validate.json", result)
    if any(trial.measured for trial in done):
        reading.draw(done, folder / "validate.png")
