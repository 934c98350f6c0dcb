"""The wheel alone in a fresh environment and an empty folder: plan, preprocess, train,
evaluate, sample; a wrong flag.

The environment sees the dependencies of this one, but not this clone, and not Triton,
which torch's builds for CPUs come without.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.unit.test_wheel import build_wheel

SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--vocab-size 300"
).split()
CLUSTER = (
    "--cluster p3.16xlarge --gpus-per-server 2 --pipeline-model-parallel-size 2 "
    "--precision fp32"
).split()
TRAIN = (
    "--device cpu --train-iters 10 --lr 1e-3 --eval-iters 2 --split 80,10,10 "
    "--log-interval 5"
).split()
TEXT = (
    "The pipeline has two stages. Each stage computes a part of the model. No stage "
    "waits for the flush.\n"
)


def run(command: Path, *words: str, cwd: Path, status: int = 0) -> str:
    """Standard output and standard error of the command, which must end with the
    status."""
    variables = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }
    ran = subprocess.run(
        [command, *words],
        cwd=cwd,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert ran.returncode == status, ran.stdout[-4000:]
    return ran.stdout


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_from_an_empty_folder_to_a_sample(tmp_path):
    environment, folder = tmp_path / "environment", tmp_path / "empty"
    folder.mkdir()
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", environment], check=True
    )
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    (packages / "sitecustomize.py").write_text(
        "import sys\n\nsys.modules['triton'] = None\n"
    )
    python = environment / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-qI",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*pip, build_wheel(tmp_path)], check=True)
    here = run(
        python, "-c", "import megatron_2bw; print(megatron_2bw.__file__)", cwd=folder
    )
    assert Path(here.strip()).is_relative_to(environment)

    command = environment / "bin" / "megatron-2bw"
    job = Path(run(command, "slurm", "script", "gpt", cwd=folder).strip())
    assert (
        job.is_relative_to(environment)
        and job.with_name("job.sh").is_file()
        and job.with_name("node.sh").is_file()
    )
    plan = [
        *SIZES,
        *CLUSTER,
        "--max-global-batch-size",
        "8",
        "--schedules",
        "2bw",
        "--json",
        "plan.json",
    ]
    run(command, "plan", *plan, cwd=folder)
    (folder / "text.txt").write_text((TEXT * 20 + "\n") * 40)
    bpe = "--train-tokenizer bpe --vocab-size 300 --text-documents blank-lines".split()
    run(
        command,
        "preprocess",
        "--task",
        "gpt",
        "--input",
        "text.txt",
        "--output-prefix",
        "text",
        *bpe,
        cwd=folder,
    )
    tokenizer = [
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(folder / "text-tokenizer"),
    ]
    data = ["--data-path", "text", *tokenizer]
    # not on the CPU
    check = run(
        command, "train", "gpt", "plan.json", *TRAIN[2:], *data, "--dry-run", cwd=folder
    )
    assert (
        "> --dry-run: the run would start; GPUs: 2, stages: 2, pipelines: 1" in check
    ), check
    words = [*TRAIN, *data, "--save", "none", "--rehearse"]
    rehearsed = run(command, "train", "gpt", "plan.json", *words, cwd=folder)
    assert (
        "exiting program at iteration 2]" in rehearsed
        and not (folder / "none").exists()
    ), rehearsed
    log = run(
        command,
        "train",
        "gpt",
        "plan.json",
        *TRAIN,
        *data,
        "--save",
        "model",
        cwd=folder,
    )
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", log)]
    assert losses[-1] < losses[0] and len(log.splitlines()) <= 60, log
    (trained,) = re.findall(r"on test set \| lm loss value: (\S+)", log)

    sizes = re.search(r"global batch size: +(\d+)", log)
    batch = [
        "--global-batch-size",
        sizes[1],
        "--micro-batch-size",
        "1",
        "--train-iters",
        "10",
        "--eval-iters",
        "2",
    ]
    same = ["--data-path", "text", "--split", "80,10,10", "--device", "cpu", *batch]
    log = run(command, "evaluate", "gpt", "model", *same, cwd=folder)
    (evaluated,) = re.findall(r"on test set \| lm loss value: (\S+)", log)
    assert len(log.splitlines()) <= 10, log
    # the log's digits, and other microbatches
    assert float(evaluated) == pytest.approx(float(trained), rel=1e-5)
    few = [
        "--prompt",
        "The pipeline",
        "--tokens",
        "5",
        "--temperature",
        "0",
        "--device",
        "cpu",
    ]
    sample = run(command, "sample", "model", *few, cwd=folder)
    assert sample.startswith("The pipeline") and len(sample) > len("The pipeline\n")
    wrong = run(
        command, "train", "gpt", "plan.json", "--hidden-size", "x", cwd=folder, status=2
    )
    assert (
        wrong.splitlines()[-1]
        == "megatron-2bw train: error: argument --hidden-size: invalid int value: 'x'"
    )
