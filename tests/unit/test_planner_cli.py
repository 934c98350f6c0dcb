"""megatron-2bw plan in this process: what it prints and writes, and one line with
status 2 for what is wrong."""

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import yaml

from megatron_2bw.mcore.log_lines import TFLOPS
from megatron_2bw.tools.planner.descriptions import cluster as clusters
from megatron_2bw.tools.planner.descriptions.cluster import Cluster, Device, Link
from megatron_2bw.tools.planner.descriptions.cluster_file import from_yaml, to_yaml
from megatron_2bw.tools.planner.plan_command import main

TINY = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 1000"
FOUR = "--cluster dgx-a100-80 --gpus-per-server 4 --max-global-batch-size 16"
DESCRIBED = {
    "name": "my cluster",
    "servers": 2,
    "gpus_per_server": 4,
    "gpu": {
        "name": "mine",
        "memory_gib": 40,
        "tflops": 100,
        "memory_gb_s": 1000,
        "bf16": False,
        "units": 64,
    },
    "inside": {
        "gb_s": 100,
        "latency_us": 5,
    },
    "between": {
        "gb_s": 10,
        "latency_us": 20,
        "rails": 4,
    },
}


@dataclass
class Ended:
    """A call's status, and the lines that it has printed."""

    status: int
    out: str
    errors: list[str]


@pytest.fixture
def call(capsys):
    """Run words: texts are split at blanks, paths are not."""

    def run(*words: str | Path) -> Ended:
        capsys.readouterr()
        argv = [
            part
            for word in words
            for part in ([str(word)] if isinstance(word, Path) else word.split())
        ]
        try:
            status = main(argv)
        except SystemExit as end:  # argparse's
            status = end.code
        out, errors = capsys.readouterr()
        progress = ("searching the plans of ", "wrote ")
        return Ended(
            status,
            out,
            [line for line in errors.splitlines() if not line.startswith(progress)],
        )

    return run


@pytest.fixture
def plans(call, tmp_path):
    """The plans of a search, as JSON."""

    def found(*words: str | Path) -> list[dict]:
        assert call(*words, "--json", tmp_path / "plan.json").status == 0
        return json.loads((tmp_path / "plan.json").read_text())["plans"]

    return found


@pytest.fixture
def write(tmp_path):
    """Write a file of the test; its path."""

    def made(content, name: str = "cluster.yaml") -> Path:
        path = tmp_path / name
        path.write_text(
            content if isinstance(content, str) else yaml.safe_dump(content)
        )
        return path

    return made


def refused(ended: Ended, *words: str, command: str = "") -> None:
    """The call has ended with status 2 and one line that has the words."""
    assert ended.status == 2, ended
    assert len(ended.errors) == 1, ended
    assert ended.errors[0].startswith(f"megatron-2bw plan{command}: error: ")
    assert all(word in ended.errors[0] for word in words), ended.errors[0]


# --- plans
# --------------------------------------------------------------------------------------


def test_a_plan_is_printed_and_files_that_are_asked_for_appear(call, tmp_path):
    paths = {
        name: tmp_path / f"plan.{name}"
        for name in ("json", "script", "sbatch", "report")
    }
    ended = call(
        TINY,
        FOUR,
        "--top 3 --verbose",
        *[word for name, path in paths.items() for word in (f"--{name}", path)],
    )
    assert ended.status == 0
    assert ended.errors == []
    table = ended.out.split("\n\n")[1].splitlines()
    # The three are a tie.
    assert [line.split()[0] for line in table if re.match(r"\s*(1=|[123])\s+\S", line)][
        :3
    ] == ["1="] * 3
    assert {*tmp_path.iterdir()} == {*paths.values()}
    written = json.loads(paths["json"].read_text())
    flags = ended.out.split("Flags of the first plan:\n")[1].split()
    assert flags == [*written["run"]["model"], *written["plans"][0]["flags"]]
    assert len(written["plans"]) == 3
    assert written["model"]["layers"] == 4
    assert "torchrun" in paths["script"].read_text()
    assert os.access(paths["script"], os.X_OK)
    assert "#SBATCH" in paths["sbatch"].read_text()
    assert [path.name for path in paths["report"].iterdir()] == ["index.html"]


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--schedules gpipe,1F1B", dict(schedule={"gpipe", "pipedream-flush"})),
        (
            "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
            "--micro-batch-size 2 --recompute full "
            "--no-sequence-parallel --no-uneven-stages",
            dict(
                depth={2},
                tensor={2},
                microbatch={2},
                recompute={"full"},
                sequence_parallel={False},
                first={0},
            ),
        ),
        ("--no-distributed-optimizer", dict(distributed_optimizer={False})),
        (
            "--schedules 2bw --max-gap 100 --two-bw-memory one-slot",
            dict(corrected={True}, memory={"one-slot"}),
        ),
        ("--max-global-batch-size 8 --micro-batch-size 1", dict(global_batch={8})),
    ],
)
def test_choices_are_kept_to(words, expected, plans):
    found = plans(TINY, FOUR, "--top 20", words)
    assert {field: {plan[field] for plan in found} for field in expected} == expected
    assert len(found) > 1


def test_gpus_stay_idle_where_fewer_are_faster(call):
    """A batch of five fills five GPUs; six run only three samples of it, since three do
    not divide the layers."""
    words = (
        f"{TINY} --num-layers 20 --cluster p3.16xlarge --gpus-per-server 6 "
        "--max-global-batch-size 5"
    )
    ended = call(words, "--tensor-model-parallel-size 1 --no-uneven-stages --top 1")
    assert ended.status == 0
    assert ended.errors[0].startswith(
        "1 of 6 GPUs stay idle: 5 are faster (--servers 1 --gpus-per-server 5)"
    )
    assert "on 5 GPUs" in ended.out
    alone = call(
        f"{TINY} {FOUR}",
        "--max-global-batch-size 3 --context-parallel-size 1",
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --top 1",
    )
    assert alone.errors[0].startswith("1 of 4 GPUs stay idle: 3 have a plan (")


@pytest.mark.parametrize("flag", ["--script", "--json", "--report"])
def test_files_that_cannot_be_written(flag, call, write):
    path = write("mine", "file")
    refused(call(TINY, FOUR, "--top 1", flag, path / "inside a file"), f"{flag} {path}")
    if flag == "--script":
        refused(call(TINY, FOUR, "--top 1", flag, path), f"{flag} {path} exists")
    assert path.read_text() == "mine"


def test_the_network_by_its_rate():
    """A preset has the link that its network's rate means."""
    rates = {
        "25gbe": clusters.PRESETS["p3.16xlarge"].between,
        "8xib-hdr": clusters.PRESETS["dgx-a100-80"].between,
    }
    for rate, expected in rates.items():
        assert asdict(clusters.network(rate)) == pytest.approx(asdict(expected))


@pytest.mark.parametrize(
    "name, gpu",
    [("Tesla V100-SXM2-16GB", "V100-16GB"), ("NVIDIA H100 80GB HBM3", "H100-80GB")],
)
def test_the_peak_that_a_run_logs_is_the_planners(name, gpu):
    peaks = [peak for pattern, peak in TFLOPS.items() if re.match(pattern, name)]
    assert peaks == [clusters.GPUS[gpu].tflops]


def test_a_cluster_of_cpus_is_planned_in_32_bits(call, write):
    host = DESCRIBED | {
        "servers": 1,
        "gpu": DESCRIBED["gpu"] | {"name": "cpu", "bf16": True},
    }
    words = (TINY, "--max-global-batch-size 16 --top 1 --cluster", write(host))
    ended = call(*words)
    assert ended.status == 0
    assert "fp32, sequences of 128" in ended.out
    assert "--bf16" in call(*words, "--precision bf16 --verbose").out


def test_parts_of_sequences_are_planned_on_request_and_where_nothing_else_fits(call):
    words = (
        "--model Llama-3.1-8B --gpu H200 --max-global-batch-size 8 --verbose "
        "--tensor-model-parallel-size 1 --top 1 "
    )
    words += "--pipeline-model-parallel-size 1 --schedules 2bw --max-gap 100"
    found = call(words, "--seq-length 131072")
    assert found.status == 0
    assert len(found.errors) == 1
    assert "without context parallelism" in found.errors[0]
    assert re.search("--context-parallel-size [248]", found.out)
    assert "c, e: context-" in found.out
    assert call(words, "--seq-length 131072 --context-parallel-size 1").status == 1
    assert "--context-parallel-size " not in call(words, "--seq-length 4096").out
    asked = call(words, "--seq-length 4096 --context-parallel-size 2")
    assert asked.errors == []
    assert "--context-parallel-size 2" in asked.out


# --- bad input
# --------------------------------------------------------------------------------------

MODEL = "--model gpt-355m"
P3 = "--cluster p3.16xlarge --max-global-batch-size 64"


@pytest.mark.parametrize(
    "words, flag",
    [
        (f"--model lama-8b {P3}", "(did you mean llama-8b?)"),
        (f"--num-layers 4 --num-attention-heads 4 {P3}", "--hidden-size"),
        (f"{MODEL} {P3} --swiglu", "--swiglu"),
        (f"{MODEL} {P3} --gpus-per-server 9", "--gpus-per-server"),
        (f"{MODEL} {P3} --gpu A100", "--gpu A100: give one of A100-40GB, A100-80GB"),
        (f"{MODEL} --max-global-batch-size 8", "--cluster"),
        (
            f"{MODEL} {P3} --cluster 8xa10 --precision fp32 --context-parallel-size 2",
            "--context-parallel-size",
        ),
    ],
)
def test_bad_flags(words, flag, call):
    refused(call(words), flag)


def changed(**parts) -> dict:
    """DESCRIBED with changes: a mapping adds entries to a part, None removes it."""
    new = {
        name: DESCRIBED.get(name, {}) | part if isinstance(part, dict) else part
        for name, part in parts.items()
    }
    return {name: part for name, part in (DESCRIBED | new).items() if part is not None}


@pytest.mark.parametrize(
    "content, words",
    [
        (changed(colour="red"), "colour"),
        (changed(inside={"gb_s": -1}), "inside.gb_s"),
        (changed(gpu="A1000"), "gpu"),
        (changed(gpu={"memory_gib": 80000}), "gpu: memory_gib"),
        ("servers: 1\nservers: 2", "a name stands twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_cluster_files_that_cannot_be_used(content, words, call, write):
    path = write(content)
    refused(
        call(TINY, "--max-global-batch-size 16 --top 1 --cluster", path),
        f"--cluster {path}: ",
        words,
    )


# --- cluster files
# --------------------------------------------------------------------------------------


def test_a_yaml_file_is_the_cluster_that_it_describes(write):
    assert from_yaml(write(DESCRIBED)) == Cluster(
        "my cluster",
        2,
        4,
        Device("mine", 40, 100, 1000, bf16=False, units=64),
        Link(100, 5),
        Link(10, 20, rails=4),
    )
    named = from_yaml(write(changed(name=None, gpu="RTX-3090"))).device
    assert named == clusters.GPUS["RTX-3090"]
    rest = from_yaml(write(changed(gpu={"name": "RTX-3090"}))).device
    assert (rest.memory_gib, rest.units) == (40, 64)
    assert rest.gemm_efficiency == named.gemm_efficiency


OWN = Cluster(
    "mine",
    3,
    5,
    Device(
        name="small",
        memory_gib=10.5,
        tflops=7,
        memory_gb_s=300,
    ),
    Link(1.5, 2, measured=True),
    Link(0.1, 100.5, rails=2),
)


@pytest.mark.parametrize(
    "cluster", [*clusters.PRESETS.values(), OWN], ids=lambda cluster: cluster.name
)
def test_a_cluster_comes_back_from_its_file(cluster, tmp_path):
    to_yaml(cluster, tmp_path / "new" / "cluster.yaml")
    assert from_yaml(tmp_path / "new" / "cluster.yaml") == cluster


# --- calibrate
# --------------------------------------------------------------------------------------


RUNS = """layers,hidden,heads,sequence,tensor,depth,width,microbatch,global_batch,seconds
8,1024,16,512,1,2,2,2,32,0.5
8,1024,16,512,1,1,4,2,32,0.4
8,1024,16,512,2,2,1,1,8,0.2
"""


def test_calibrate_writes_a_cluster_that_plans(call, write, tmp_path):
    runs = write(RUNS, "runs.csv")
    out = tmp_path / "fitted.yaml"
    ended = call("calibrate", runs, "--cluster dgx-a100-80 --out", out)
    assert ended.status == 0
    assert ended.errors == []
    assert ended.out.startswith("fitted to 3 of 3 runs: ")
    by_parts = r"^mean absolute error by cross-validation: [\d.]+%"
    assert re.search(by_parts, ended.out, re.MULTILINE)
    fitted = from_yaml(out)
    assert fitted.name == "dgx-a100-80, calibrated"
    assert fitted.device.calibration == "fitted to 3 measured runs"
    assert fitted.device != clusters.PRESETS["dgx-a100-80"].device
    assert call(TINY, "--max-global-batch-size 16 --top 1 --cluster", out).status == 0
