"""The wheel alone in a fresh environment and an empty folder: plan, preprocess, train,
evaluate, sample; a wrong flag.

The environment sees the dependencies of this one, but not this clone, and not Triton,
which torch's builds for CPUs come without.
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.unit.test_wheel import build_wheel

SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--vocab-size 300"
)
CLUSTER = (
    "--cluster p3.16xlarge --gpus-per-server 2 --pipeline-model-parallel-size 2 "
    "--precision fp32 --max-global-batch-size 8 --schedules 2bw"
)
TRAIN = "--train-iters 10 --lr 1e-3 --eval-iters 2 --split 80,10,10 --log-interval 5"
TEXT = (
    "The pipeline has two stages. Each stage computes a part of the model. No stage "
    "waits for the flush.\n"
)
TEST_LOSS = re.compile(r"on test set \| lm loss value: (\S+)")


def run(command: Path, *words: str, cwd: Path, status: int = 0) -> str:
    """Standard output and standard error of the command, which must end with the
    status."""
    variables = dict(os.environ)
    variables.pop("PYTHONPATH", None)
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


@pytest.fixture
def environment(tmp_path) -> Path:
    path = tmp_path / "environment"
    venv = [sys.executable, "-m", "venv", "--without-pip", path]
    subprocess.run(venv, check=True)
    packages = next(path.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    (packages / "sitecustomize.py").write_text(
        "import sys\n\nsys.modules['triton'] = None\n"
    )
    python = path / "bin" / "python"
    words = f"-m pip --python {python} install -qI --no-deps --no-index".split()
    subprocess.run([sys.executable, *words, build_wheel(tmp_path)], check=True)
    return path


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_from_an_empty_folder_to_a_sample(environment, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    code = "import megatron_2bw; print(megatron_2bw.__file__)"
    here = run(environment / "bin" / "python", "-c", code, cwd=folder)
    assert Path(here.strip()).is_relative_to(environment)

    def command(words: str, status: int = 0) -> str:
        program = environment / "bin" / "megatron-2bw"
        return run(program, *shlex.split(words), cwd=folder, status=status)

    job = Path(command("slurm script gpt").strip())
    assert job.is_relative_to(environment)
    assert job.with_name("job.sh").is_file() and job.with_name("node.sh").is_file()
    command(f"plan {SIZES} {CLUSTER} --json plan.json")
    (folder / "text.txt").write_text((TEXT * 20 + "\n") * 40)
    command(
        "preprocess --task gpt --input text.txt --output-prefix text --train-tokenizer "
        "bpe --vocab-size 300 --text-documents blank-lines"
    )
    data = (
        "--data-path text --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
        f"{folder / 'text-tokenizer'}"
    )
    train = f"train gpt plan.json {TRAIN} {data}"
    checked = command(f"{train} --dry-run")  # not on the CPU
    line = "> --dry-run: the run would start; GPUs: 2, stages: 2, pipelines: 1"
    assert line in checked, checked
    rehearsed = command(f"{train} --device cpu --save none --rehearse")
    assert "exiting program at iteration 2]" in rehearsed, rehearsed
    assert not (folder / "none").exists()
    log = command(f"{train} --device cpu --save model")
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", log)]
    assert losses[-1] < losses[0] and len(log.splitlines()) <= 60, log
    (trained,) = TEST_LOSS.findall(log)

    batch = re.search(r"global batch size: +(\d+)", log)[1]
    log = command(
        "evaluate gpt model --data-path text --split 80,10,10 --device cpu "
        f"--global-batch-size {batch} --micro-batch-size 1 --train-iters 10 "
        "--eval-iters 2"
    )
    (evaluated,) = TEST_LOSS.findall(log)
    assert len(log.splitlines()) <= 10, log
    # the log's digits, and other microbatches
    assert float(evaluated) == pytest.approx(float(trained), rel=1e-5)
    sample = command(
        "sample model --prompt 'The pipeline' --tokens 5 --temperature 0 --device cpu"
    )
    assert sample.startswith("The pipeline") and len(sample) > len("The pipeline\n")
    wrong = command("train gpt plan.json --hidden-size x", status=2)
    assert wrong.splitlines()[-1] == (
        "megatron-2bw train: error: argument --hidden-size: invalid int value: 'x'"
    )
