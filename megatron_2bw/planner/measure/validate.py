"""Runs plans for real where it is, on CPU ranks, GPUs or a Slurm allocation, beside what was predicted of them.

Invariant: a plan that fails stops no other one; whatever was started is ended, also at a time limit or an interrupt;
a trial is in trials.jsonl as soon as it is over.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from megatron_2bw.planner.cost.simulated import Cost, Estimate
from megatron_2bw.planner.describe.model import Model
from megatron_2bw.planner.describe.plan import Plan
from megatron_2bw.planner.measure import trials as reading
from megatron_2bw.planner.measure.place import Place, ValidateError, command, environment, find_place, refusal
from megatron_2bw.planner.measure.trials import FAILED, OK, REFUSED, TIMEOUT, Trial
from megatron_2bw.planner.tell.jobs import entry_script

ROOT = Path(__file__).resolve().parents[3]
BUSY = 0.1  # share of the cores that others take, above which measured times say little
FILES = ("trials.jsonl", "validate.json", "validate.png")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `megatron-2bw-plan validate`, without those of the planner."""
    parser.add_argument("--iterations", type=int, default=8, help="of each plan (default: 8)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/validate"),
        metavar="DIR",
        help="folder of trials.jsonl, validate.json, validate.png and logs (default: out/validate)",
    )
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="of each plan (default: 600)")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: GPUs, or the CPU if the cluster's device is named cpu",
    )


def run(cost: Cost, estimates: list[Estimate], options: argparse.Namespace) -> list[Trial]:
    """Run the plans one after the other. ValidateError if a flag is wrong or none of them can run here."""
    place = find_place(options.device, cost.cluster)
    refusals = _check(cost, estimates, options, place)
    folder = _emptied(options.out)
    said = notes(cost, place)
    for note in said:
        print(f"note: {note}", flush=True)
    done: list[Trial] = []
    with _ended_by_signals():
        for number, (estimate, refused) in enumerate(zip(estimates, refusals), 1):
            trial = _try(cost, estimate, options, place, number, refused)
            done.append(trial)
            with open(folder / "trials.jsonl", "a") as file:
                file.write(json.dumps(trial.entries()) + "\n")
            print(f"{number}/{len(estimates)}  {_described(trial)}", flush=True)
    _summarize(cost, place, options, done, said, folder)
    print(f"\n{reading.table(done, memory=place.device == 'cuda')}\n{reading.order(done)}", flush=True)
    return done


def exit_status(done: list[Trial]) -> int:
    """0 if at least one plan ran."""
    return 0 if any(trial.status == OK for trial in done) else 1


def _check(cost: Cost, estimates: list[Estimate], options: argparse.Namespace, place: Place) -> list[str | None]:
    """Why each plan cannot run here, None for those that can."""
    if options.iterations < reading.LEAST:
        raise ValidateError(f"--iterations {options.iterations}: {reading.LEAST} at least, the first ones do not count")
    if not options.timeout > 0:
        raise ValidateError(f"--timeout must be positive, not {options.timeout:g}")
    script_path(cost.model)
    if not estimates:
        raise ValidateError("--top: there is no plan to run")
    refusals = [refusal(estimate.plan, cost.cluster.gpus_per_server, place) for estimate in estimates]
    if all(refusals):
        raise ValidateError(str(refusals[0]))
    return refusals


def _emptied(folder: Path) -> Path:
    """The folder, without the results of an earlier run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        (folder / FILES[0]).touch()
    except OSError as error:
        raise ValidateError(f"--out {folder}: {error.strerror}") from None
    return folder


# --- one plan --------------------------------------------------------------------------------------------------------


def script_path(model: Model) -> Path:
    """The model's entry script, which lies beside the package, in a clone as in a wheel. ValidateError without one."""
    path = ROOT / entry_script(model)
    if path.exists():
        return path
    raise ValidateError(f"--model {model.name}: no entry script here trains a {model.kind}")


def flags(cost: Cost, plan: Plan, iterations: int, device: str) -> list[str]:
    """The command line of the entry script: the model, the plan, mock data, and a line for each iteration."""
    words = [
        *cost.model.flags(),
        *plan.flags(cost.precision),
        "--device",
        device,
        "--mock-data",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        cost.model.vocab,
        "--train-iters",
        iterations,
        "--lr",
        1e-4,
        "--lr-decay-style",
        "constant",
        "--clip-grad",
        1.0,
        "--eval-iters",
        0,
        "--eval-interval",
        iterations + 1,
        "--log-interval",
        1,
    ]
    if cost.precision == "fp16":  # from Megatron's 2^32 on the first steps would all be skipped
        words += ["--initial-loss-scale", 1024]
    if device == "cpu":
        words += ["--num-workers", 0]  # they would take the ranks' cores
    else:
        words += _without_libraries()
    return [str(word) for word in words]


def _without_libraries() -> list[str]:
    """What Megatron must be told on a GPU where Transformer Engine or Apex is missing."""
    engine, norm, scores, gradients = map(
        _installed, ("transformer_engine", "apex", "scaled_masked_softmax_cuda", "fused_weight_gradient_mlp_cuda")
    )
    words = [] if engine else ["--transformer-impl", "local", "--no-rope-fusion"]
    words += [] if engine or norm else ["--no-persist-layer-norm"]
    words += [] if engine or scores else ["--no-masked-softmax-fusion"]
    return words if engine or gradients else [*words, "--no-gradient-accumulation-fusion"]


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _try(
    cost: Cost, estimate: Estimate, options: argparse.Namespace, place: Place, number: int, refused: str | None
) -> Trial:
    """One plan, run to its end or to its time limit."""
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
        known["others"] = round(max(_seconds_of_others() - used, 0.0) / (took * (os.cpu_count() or 1)), 3)
    text = log.read_text(errors="replace")
    if code is None:
        seen = len(reading.iteration_seconds(text))
        return Trial(**known, status=TIMEOUT, error=f"{seen} of {iterations} iterations in {options.timeout:g} s")
    if code:
        status, error = reading.failure(text)
        return Trial(**known, status=status, error=error)
    steady = reading.steady_seconds(text, iterations, plan.pipeline.flushes)
    if not steady:
        return Trial(**known, status=FAILED, error="it ended well, but its log lacks iterations")
    memory = reading.stage_memory(text, plan)
    return Trial(**known, measured=statistics.median(steady), steady=steady, measured_memory=memory)


def _seconds_of_others() -> float:
    """Core time since the host's start without this process and what it has started and seen end."""
    import psutil

    times, mine = psutil.cpu_times(), os.times()
    idle = ("idle", "iowait", "guest", "guest_nice")  # guests are counted as user already
    busy = sum(getattr(times, name) for name in times._fields if name not in idle)
    return busy - mine.user - mine.system - mine.children_user - mine.children_system


def execute(line: list[str], log: Path, variables: dict[str, str], timeout: float) -> int | None:
    """Run a command, its output in `log`; its exit code, or None if it outlasts `timeout` seconds. OSError."""
    with open(log, "wb") as file:
        process = subprocess.Popen(
            line, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            stop(process)


def stop(process: subprocess.Popen) -> None:
    """End a command and all that it started, by the ids of their groups: torchrun's ranks have groups of their own."""
    import psutil

    members = []
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(process.pid)
        members = [leader, *leader.children(recursive=True)]
    for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
        for member in members:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if member.is_running() and os.getpgid(member.pid) != os.getpgrp():
                    os.killpg(os.getpgid(member.pid), number)
        _, members = psutil.wait_procs(members, timeout=patience)
    process.wait()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP leave by an exception, as an interrupt does, so that `execute` ends what it started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def notes(cost: Cost, place: Place) -> list[str]:
    """What makes the prediction one of something else than what runs."""
    profile, found = cost.cluster.profile, []
    if place.device == "cpu" and cost.cluster.device.name != "cpu":
        found.append(f"--cluster {cost.cluster.name} has GPUs, the plans run on the CPU: their order may be another")
    if place.device == "cuda" and cost.memory.flash and not _installed("transformer_engine"):
        found.append(
            "Transformer Engine is missing: its local layers keep the attention scores; plan with --attention core"
        )
    if profile is None:
        return found
    found.append(profile.fits(cost.model, cost.precision))
    if place.device == "cpu" and profile.threads != 1:
        found.append(
            f"the profile was measured with {profile.threads} threads, and each rank here has one: measure it "
            "again with OMP_NUM_THREADS=1"
        )
    return [note for note in found if note]


# --- what is written -------------------------------------------------------------------------------------------------


def _described(trial: Trial) -> str:
    name, predicted = reading.label(trial.plan), f"predicted {1e3 * trial.predicted:.1f} ms"
    if trial.status != OK:
        return f"{name}: {predicted}, {trial.status}: {trial.error}"
    measured = f"measured {1e3 * trial.measured:.1f} ms, ratio {trial.ratio:.2f}"
    busy = f", other processes took {trial.others:.0%} of the cores" if (trial.others or 0) > BUSY else ""
    return f"{name}: {predicted}, {measured} ({trial.took:.0f} s){busy}"


def _summarize(
    cost: Cost, place: Place, options: argparse.Namespace, done: list[Trial], said: list[str], folder: Path
) -> None:
    """validate.json and, if a plan ran, validate.png."""
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
        "trials": [trial.entries() for trial in done],
    }
    part = folder / "validate.json.part"
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(folder / "validate.json")
    if any(trial.measured for trial in done):
        reading.draw(done, folder / "validate.png")
