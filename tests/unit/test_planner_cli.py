"""megatron-2bw-plan in this process: what it prints and writes, and one line with status 2 for whatever is wrong."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import yaml

from megatron_2bw.errors import UserError
from megatron_2bw.models import cluster as clusters
from megatron_2bw.models.cluster import Cluster, Device, Link, from_yaml, to_yaml
from megatron_2bw.models.model import PRESETS
from megatron_2bw.models.profile import BlockTime
from megatron_2bw.planner.cli import main
from tests.unit.test_planner_legality import RUN, on_a_gpu_host, parsed  # noqa: F401  a fixture that acts by itself
from tests.unit.test_planner_profile import PROFILE as MEASURED

SHAPE = ["--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4"]
TINY = [*SHAPE, "--seq-length", "128", "--vocab-size", "1000"]
FOUR = ["--cluster", "dgx-a100-80", "--gpus-per-server", "4", "--max-global-batch-size", "16"]
DESCRIBED = {
    "name": "my cluster",
    "servers": 2,
    "gpus_per_server": 4,
    "gpu": {"name": "mine", "memory_gib": 40, "tflops": 100, "memory_gb_s": 1000, "bf16": False, "units": 64},
    "inside": {"gb_s": 100, "latency_us": 5},
    "between": {"gb_s": 10, "latency_us": 20, "rails": 4},
}
PROFILE = replace(MEASURED, blocks=(BlockTime(1, 1e-3, 2e-3),), output=(BlockTime(1, 1e-3, 2e-3),), inside=None)
PROFILED = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 100".split()


@dataclass
class Ended:
    """A call's status, and the lines that it has printed."""

    status: int
    out: str
    errors: list[str]


@pytest.fixture
def call(capsys):
    def run(*words) -> Ended:
        capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:  # argparse's
            status = end.code
        out, errors = capsys.readouterr()
        progress = ("searching the plans of ", "wrote ")
        return Ended(status, out, [line for line in errors.splitlines() if not line.startswith(progress)])

    return run


@pytest.fixture
def write(tmp_path):
    """Files of the test, by what they hold; the path of the one that is written."""

    def made(content, name: str = "cluster.yaml") -> Path:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return path

    return made


def refused(ended: Ended, *words: str, prog: str = "megatron-2bw-plan") -> None:
    """The call has ended with status 2 and one line that has the words."""
    assert ended.status == 2 and len(ended.errors) == 1, ended
    assert ended.errors[0].startswith(f"{prog}: error: ")
    for word in words:
        assert word in ended.errors[0], ended.errors[0]


# --- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_printed(call):
    ended = call(*TINY, *FOUR, "--top", "3")
    assert ended.status == 0 and ended.errors == []
    table = ended.out.split("\n\n")[0].splitlines()
    # The three are a tie.
    assert [line.split()[0] for line in table if re.match(r"\s*(1=|[123])\s+\S", line)][:3] == ["1="] * 3
    for words in ("ESTIMATED", "safe for convergence", "Flags of the first plan:\n  --num-layers 4", "GiB"):
        assert words in ended.out
    assert ended.out.count("Flags of the first plan:") == 1


@pytest.mark.parametrize(
    "words, precision",
    [
        ([*TINY, *FOUR], "bf16"),
        ([*TINY, *FOUR, "--precision", "fp32", "--schedules", "gpipe", "--pipeline-model-parallel-size", "2"], "fp32"),
        ([*TINY, *FOUR, "--schedules", "megatron", "--tensor-model-parallel-size", "2"], "bf16"),
        (
            [
                "--model",
                "llama-8b",
                "--cluster",
                "dgx-h100",
                "--servers",
                "2",
                "--max-global-batch-size",
                "64",
                "--top",
                "1",
                "--tensor-model-parallel-size",
                "4,8",
                "--micro-batch-size",
                "1",
            ],
            "bf16",
        ),
        (
            [
                *TINY,
                "--cluster",
                "p3.16xlarge",
                "--max-global-batch-size",
                "32",
                "--recompute",
                "full",
                "--gradient-slots",
                "1",
                "--schedules",
                "2bw",
            ],
            "fp16",
        ),
    ],
    ids=["tiny", "gpipe fp32", "megatron t2", "llama", "one slot fp16"],
)
def test_the_printed_flags_are_megatrons_and_the_plans(words, precision, call, tmp_path):
    path = tmp_path / "plan.json"
    ended = call(*words, "--json", path)
    assert ended.status == 0
    flags = ended.out.split("Flags of the first plan:\n")[1].split()
    written = json.loads(path.read_text())
    plan, gpus = written["plans"][0], written["cluster"]["servers"] * written["cluster"]["gpus_per_server"]
    args = parsed([*flags, *RUN, "--vocab-size", str(written["model"]["vocab"])], gpus)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (plan["tensor"], plan["depth"])
    assert args.data_parallel_size == plan["width"] and args.micro_batch_size == plan["microbatch"]
    assert args.global_batch_size == plan["global_batch"] == plan["microbatch"] * plan["microbatches"] * plan["width"]
    assert args.pipeline_schedule == plan["schedule"]
    assert (args.num_layers, args.hidden_size) == (written["model"]["layers"], written["model"]["hidden"])
    assert {"bf16": args.bf16, "fp16": args.fp16, "fp32": not args.bf16 and not args.fp16}[precision]
    assert args.use_distributed_optimizer == plan["distributed_optimizer"]
    assert (args.recompute_granularity or "none") == plan["recompute"]


def test_what_may_be_chosen_is_kept_to(call, write, tmp_path):
    path = tmp_path / "plan.json"
    slow = write(
        DESCRIBED
        | {
            "servers": 4,
            "gpus_per_server": 1,
            "gpu": DESCRIBED["gpu"] | {"bf16": True},
            "between": {"gb_s": 0.05, "latency_us": 20},
        }
    )

    def plans(*words) -> list[dict]:
        where = [] if "--cluster" in words else FOUR
        assert call(*TINY, *where, "--top", "20", "--json", path, *words).status == 0
        return json.loads(path.read_text())["plans"]

    assert {plan["schedule"] for plan in plans()} > {"2bw", "megatron"}
    assert {plan["schedule"] for plan in plans("--schedules", "gpipe,2bw")} == {"gpipe", "2bw"}
    assert {plan["depth"] for plan in plans("--pipeline-model-parallel-size", "2,4")} == {2, 4}
    assert {plan["tensor"] for plan in plans("--tensor-model-parallel-size", "2")} == {2}
    assert {plan["microbatch"] for plan in plans("--micro-batch-size", "2")} == {2}
    assert {plan["recompute"] for plan in plans("--recompute", "full")} == {"full"}
    assert not any(plan["distributed_optimizer"] for plan in plans("--no-distributed-optimizer"))
    assert not any(plan["sequence_parallel"] for plan in plans("--no-sequence-parallel"))
    assert not any(plan["first"] or plan["last"] for plan in plans("--no-uneven-stages"))
    assert {plan["gradient_slots"] for plan in plans("--gradient-slots", "1") if plan["schedule"] == "2bw"} == {1}
    ahead = [
        "--cluster",
        slow,
        "--max-global-batch-size",
        "16",
        "--schedules",
        "2bw",
        "--micro-batch-size",
        "1",
        "--pipeline-model-parallel-size",
        "4",
    ]
    assert any(plan["extra_warmup"] for plan in plans(*ahead))
    assert not any(plan["extra_warmup"] for plan in plans(*ahead, "--no-extra-warmup"))
    for words, corrected in (((), True), (("--extrapolate",), True), (("--no-extrapolate",), False)):
        found = {(plan["schedule"] == "2bw", plan["extrapolate"]) for plan in plans(*words)}
        assert found == {(True, corrected), (False, False)}
    assert len(plans("--top", "1")) == 1
    assert all(plan["global_batch"] <= 16 for plan in plans())
    closed, simulated = (plans("--cost", name)[0]["seconds"] for name in ("closed-form", "simulation"))
    assert closed != simulated


def test_files_that_are_asked_for_appear(call, tmp_path):
    paths = {name: tmp_path / f"plan.{name}" for name in ("json", "script", "sbatch", "trace", "report")}
    words = [word for name, path in paths.items() for word in (f"--{name}", path)]
    ended = call(*TINY, *FOUR, "--top", "2", *words)
    assert ended.status == 0 and ended.errors == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(path.name for path in paths.values())
    written = json.loads(paths["json"].read_text())
    assert len(written["plans"]) == 2 and written["model"]["layers"] == 4
    assert "torchrun" in paths["script"].read_text() and os.access(paths["script"], os.X_OK)
    assert "#SBATCH" in paths["sbatch"].read_text()
    events = json.loads(paths["trace"].read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"F", "B"}
    assert {path.name for path in paths["report"].iterdir()} == {
        "index.md",
        "index.html",
        "front.png",
        "splits.png",
        "timeline.png",
        "memory.png",
    }


def test_where_nothing_fits_one_line_says_so(call):
    ended = call("--model", "gpt-175b", "--cluster", "p3.16xlarge", "--max-global-batch-size", "64")
    assert ended.status == 1 and ended.errors == []
    assert len(ended.out.splitlines()) == 1 and "GiB" in ended.out


@pytest.mark.parametrize(
    "rate, expected",
    [
        ("25gbe", clusters.PRESETS["p3.16xlarge"].between),
        ("100Gbit", clusters.PRESETS["p3dn.24xlarge"].between),
        ("8xib-hdr", clusters.PRESETS["dgx-a100-80"].between),
        ("2x2.5gbit", Link(0.5, 50, 2)),
        ("ib-ndr", Link(40, 20)),
    ],
)
def test_the_network_by_its_rate(rate, expected, call, tmp_path):
    """A preset has the link that its network's rate means."""
    path = tmp_path / "plan.json"
    words = ["--cluster", "dgx-h100", "--servers", "2", "--max-global-batch-size", "16", "--top", "1"]
    assert call(*TINY, *words, "--link", rate, "--json", path).status == 0
    assert json.loads(path.read_text())["cluster"]["between"] == pytest.approx(asdict(expected))


def test_a_cluster_of_cpus_is_planned_in_32_bits(call, write):
    host = DESCRIBED | {"servers": 1, "gpu": DESCRIBED["gpu"] | {"name": "cpu", "bf16": True}}
    words = [*TINY, "--cluster", write(host), "--max-global-batch-size", "16", "--top", "1"]
    ended = call(*words)
    assert ended.status == 0 and "fp32, sequences of 128" in ended.out and "--bf16" not in ended.out
    assert "--bf16" in call(*words, "--precision", "bf16").out


def test_a_sequence_that_does_not_fit_is_named_with_one_that_fits(call):
    where = ["--cluster", "dgx-a100-40", "--max-global-batch-size", "8", "--tensor-model-parallel-size", "8"]
    words = ["--model", "llama-8b", *where, "--schedules", "2bw", "--seq-length"]
    ended = call(*words, "131072")
    assert ended.status == 1 and ended.errors == [] and "Nothing fits with --seq-length 131072. " in ended.out
    shorter = int(re.search(r"or --seq-length (\d+), for example with 2bw", ended.out)[1])
    assert shorter < 131072 and call(*words, shorter).status == 0 and call(*words, 2 * shorter).status == 1


def test_parts_of_sequences_are_planned_on_request_and_where_nothing_else_fits(call):
    one = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1", "--schedules", "2bw"]
    words = ["--model", "llama-8b", "--cluster", "hgx-h200", "--max-global-batch-size", "8", *one, "--top", "1"]
    long = [*words, "--seq-length", "131072"]
    found = call(*long)
    assert found.status == 0 and [line.split(":")[0] for line in found.errors] == [
        "nothing fits without context parallelism"
    ]
    assert re.search("--context-parallel-size [248]", found.out) and "c: context-parallel size" in found.out
    assert call(*long, "--context-parallel-size", "1").status == 1
    assert "--context-parallel-size" not in call(*words, "--seq-length", "4096").out
    asked = call(*words, "--seq-length", "4096", "--context-parallel-size", "2")
    assert asked.errors == [] and "--context-parallel-size 2" in asked.out


def test_rows_of_2bw_without_a_pipeline_are_explained(call):
    for depth in ("1", "2"):
        ended = call(*TINY, *FOUR, "--schedules", "2bw", "--pipeline-model-parallel-size", depth)
        assert ("2bw with d 1: no pipeline." in ended.out) == (depth == "1")


def test_a_measured_profile(call, write, tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    ended = call(*PROFILED, *FOUR, "--profile", tmp_path / "profile.json", "--top", "1")
    assert ended.status == 0 and re.search(r"compute +MEASURED", ended.out)
    assert "--bf16" not in ended.out and "--fp16" not in ended.out  # it was measured in 32 bits
    path = write(DESCRIBED | {"profile": "profile.json"})  # beside the file that names it
    ended = call(*PROFILED, "--cluster", path, "--max-global-batch-size", "16", "--top", "1")
    assert ended.status == 0 and re.search(r"compute +MEASURED", ended.out)


# --- bad input -------------------------------------------------------------------------------------------------------

MODEL = ["--model", "gpt-355m"]
P3 = ["--cluster", "p3.16xlarge", "--max-global-batch-size", "64"]
BAD = [
    (["--model", "gpt-2b", *P3], "--model gpt-2b"),
    (["--model", "none.json", *P3], "--model none.json"),
    ([*MODEL, "--cluster", "p4", "--max-global-batch-size", "64"], "--cluster p4"),
    (["--num-layers", "4", "--num-attention-heads", "4", *P3], "--hidden-size is missing"),
    (["--hidden-size", "4", *P3], "--num-layers is missing"),
    (P3, "give --model NAME"),
    ([*MODEL, *P3, "--num-layers", "4"], "--num-layers: --model gpt-355m says it already"),
    ([*MODEL, *P3, "--swiglu"], "--swiglu: --model"),
    ([*MODEL, *P3, "--normalization", "RMSNorm"], "--normalization"),
    ([*MODEL, *P3, "--normalization", "BatchNorm"], "--normalization"),
    ([*MODEL, *P3, "--schedules", "1f1b"], "--schedules: 1f1b"),
    ([*MODEL, *P3, "--schedules", ""], "--schedules"),
    ([*MODEL, *P3, "--recompute", "half"], "--recompute: half"),
    ([*MODEL, *P3, "--gradient-slots", "3"], "--gradient-slots: 3"),
    ([*MODEL, *P3, "--gradient-slots", "0"], "--gradient-slots"),
    ([*MODEL, *P3, "--memory-margin", "2"], "--memory-margin"),
    ([*MODEL, *P3, "--memory-margin", "nan"], "--memory-margin"),
    ([*MODEL, *P3, "--memory-margin", "-0.1"], "--memory-margin"),
    ([*MODEL, *P3, "--memory-margin", "x"], "--memory-margin"),
    ([*MODEL, *P3, "--top", "0"], "--top"),
    ([*MODEL, *P3, "--fast"], "--fast"),
    ([*MODEL, *P3, "--serv", "2"], "--serv"),
    ([*MODEL, *P3, "--servers", "0"], "--servers"),
    *(
        ([*MODEL, *P3, "--servers", "2", "--link", rate], f"--link: {rate}: give a rate such as 100gbit")
        for rate in ("100", "gbit", "0gbit", "x100gbit", "0x100gbit", "ib-xyz", "1" + "0" * 40 + "gbit")
    ),
    ([*MODEL, *P3, "--link", "100gbit"], "--link has no effect with one server"),
    ([*MODEL, *P3, "--servers", "two"], "--servers"),
    ([*MODEL, *P3, "--gpus-per-server", "0"], "--gpus-per-server"),
    ([*MODEL, *P3, "--gpus-per-server", "9"], "--gpus-per-server 9"),
    ([*MODEL, *P3, "--max-global-batch-size", "0"], "--max-global-batch-size"),
    ([*MODEL, "--cluster", "p3.16xlarge"], "--max-global-batch-size"),
    ([*MODEL], "--cluster"),
    ([*MODEL, *P3, "--micro-batch-size", "0"], "--micro-batch-size"),
    ([*MODEL, *P3, "--micro-batch-size", "1,x"], "--micro-batch-size"),
    ([*MODEL, *P3, "--precision", "bf16"], "--precision bf16"),
    ([*MODEL, *P3, "--precision", "fp8"], "--precision"),
    ([*MODEL, *P3, "--seq-length", "0"], "--seq-length"),
    ([*MODEL, *P3, "--profile", "none.json"], "--profile none.json"),
    ([*MODEL, *P3, "--cost", "guess"], "--cost"),
    ([*MODEL, *P3, "--attention", "linear"], "--attention"),
    ([*MODEL, *P3, "--exp-avg-dtype", "bf16"], "--exp-avg-dtype has no effect without --use-precision-aware-opt"),
    ([*MODEL, *P3, "--grad-reduce-in-bf16"], "--grad-reduce-in-bf16 has no effect with --precision fp16"),
    ([*MODEL, *P3, "--precision", "fp8"], "--precision fp8: not available on V100-16GB; use bf16"),
    ([*MODEL, *P3, "--context-parallel-size", "2"], "--context-parallel-size needs flash attention"),
    ([*SHAPE, *P3, "--num-attention-heads", "3"], "--num-attention-heads 3"),
    ([*SHAPE, *P3, "--num-query-groups", "2"], "--group-query-attention"),
    ([*SHAPE, *P3, "--group-query-attention", "--num-query-groups", "3"], "--num-query-groups 3"),
    ([*SHAPE, *P3, "--group-query-attention", "--num-query-groups", "0"], "--num-query-groups"),
    ([*SHAPE, *P3, "--vocab-size", "0"], "--vocab-size"),
    ([*SHAPE, *P3, "--vocab-size", "-1"], "--vocab-size"),
    ([*SHAPE, *P3, "--ffn-hidden-size", "0"], "--ffn-hidden-size"),
    ([*SHAPE, *P3, "--ffn-hidden-size", "-8"], "--ffn-hidden-size"),
    ([*SHAPE, *P3, "--kv-channels", "0"], "--kv-channels"),
    ([*SHAPE, *P3, "--kv-channels", "-4"], "--kv-channels"),
    ([*SHAPE, *P3, "--num-layers", "4.5"], "--num-layers"),
    ([*SHAPE, *P3, "--num-layers", "1001"], "--num-layers: 1001 layers are more than the planner searches, 1000"),
    ([*SHAPE, *P3, "--rotary-base", "0"], "--rotary-base must be positive, not 0"),
    ([*SHAPE, *P3, "--rotary-base", "3"], "--rotary-base has no effect without --position-embedding-type rope"),
    ([*SHAPE, *P3, "--use-rope-scaling"], "--use-rope-scaling has no effect without --position-embedding-type rope"),
    ([*SHAPE, *P3, "--swiglu", "--seq-length", "7" * 300], "--seq-length 777"),
    ([*MODEL, *P3, "--seq-length", "7" * 300], "--seq-length 777"),
    ([*SHAPE, *P3, "--norm-epsilon", "nan"], "--norm-epsilon must be greater than 0 and less than 1, not nan"),
    ([*SHAPE, *P3, "--hidden-dropout", "nan"], "--hidden-dropout must be at least 0 and less than 1, not nan"),
    ([*SHAPE, *P3, "--attention-dropout", "1"], "--attention-dropout must be at least 0 and less than 1, not 1.0"),
    ([*MODEL, *P3, "--servers", "100000000000000000000"], "--servers: 800000000000000000000 GPUs are more than the"),
    ([*MODEL, *P3, "--max-global-batch-size", "1000001"], "--max-global-batch-size must be from 1 to 1000000, not"),
    ([*MODEL, *P3, "--top", "10001"], "--top must be from 1 to 10000, not 10001"),
    (["--model", "x" * 300, *P3], f"--model {'x' * 300}"),
    ([*MODEL, "--cluster", "x" * 300, "--max-global-batch-size", "64"], f"--cluster {'x' * 300}"),
    ([*MODEL, *P3, "--profile", "x" * 300], f"--profile {'x' * 300}"),
]


@pytest.mark.parametrize("words, flag", BAD, ids=[" ".join(words[-2:]) for words, _ in BAD])
def test_bad_flags(words, flag, call):
    ended = call(*words)
    refused(ended, flag)
    assert ended.out == ""


def test_the_profile_of_another_model(call, write, tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    given = ["--profile", tmp_path / "profile.json"]
    refused(call(*MODEL, *FOUR, *given), "--profile ", "profile.json: --hidden-size: the profile was measured with 64")
    refused(call(*PROFILED, *FOUR, *given, "--precision", "bf16"), "--precision", "fp32")
    path = write(DESCRIBED | {"profile": "profile.json"})
    ended = call(*MODEL, "--cluster", path, "--max-global-batch-size", "16")
    refused(ended, f"{tmp_path / 'profile.json'}: --hidden-size")
    refused(call(*MODEL, *FOUR, "--profile", write("{}", "other.json")), "--profile ", "other.json: not a profile")


def without(mapping: dict, name: str) -> dict:
    return {key: value for key, value in mapping.items() if key != name}


def gpu(**entries) -> dict:
    return DESCRIBED | {"gpu": DESCRIBED["gpu"] | entries}


def inside(**entries) -> dict:
    return DESCRIBED | {"inside": DESCRIBED["inside"] | entries}


# What the file holds and the words that name what is wrong.
_FAST, _SLOW = (
    {"name": name, "memory_gib": size, "tflops": 2 * size, "memory_gb_s": 900}
    for name, size in (("fast", 24), ("slow", 16))
)
MIXED = {name: DESCRIBED[name] for name in ("gpus_per_server", "inside", "between")} | {
    "groups": [{"servers": 1, "gpu": _FAST}, {"servers": 2, "gpu": _SLOW}]
}
BAD_CLUSTERS = {
    "no groups": (MIXED | {"groups": []}, "groups must be a list of servers and gpu"),
    "a group of none": (MIXED | {"groups": [{"servers": 0, "gpu": _FAST}]}, "servers must be a positive whole number"),
    "a group without a gpu": (MIXED | {"groups": [{"servers": 1}]}, "groups: the entry gpu is missing"),
    "groups and a gpu": (MIXED | {"gpu": _FAST}, "unknown entry gpu"),
    "a profile of groups": (MIXED | {"profile": "p.json"}, "profile is of one GPU"),
    **{
        f"no {name}": (without(DESCRIBED, name), f"the entry {name} is missing")
        for name in ("servers", "gpus_per_server", "gpu", "inside", "between")
    },
    "no gb_s": (DESCRIBED | {"inside": {"latency_us": 5}}, "inside: the entry gb_s is missing"),
    "no tflops": (DESCRIBED | {"gpu": without(DESCRIBED["gpu"], "tflops")}, "gpu: the entry tflops is missing"),
    "unknown": (DESCRIBED | {"colour": "red"}, "unknown entry colour"),
    "unknown of a link": (inside(speed=3), "inside: unknown entry speed"),
    "unknown of the gpu": (gpu(speed=3), "gpu: unknown entry speed"),
    "negative link": (inside(gb_s=-1), "inside: gb_s must be a positive number, not -1"),
    "negative memory": (gpu(memory_gib=-1), "gpu: memory_gib must be a positive number, not -1"),
    "no servers": (DESCRIBED | {"servers": 0}, "servers must be a positive whole number, not 0"),
    "half a server": (DESCRIBED | {"servers": 1.5}, "servers must be a positive whole number, not 1.5"),
    "a word for servers": (DESCRIBED | {"servers": "two"}, "servers must be a positive whole number, not 'two'"),
    "servers with a point": (DESCRIBED | {"servers": 4.0}, "servers must be a positive whole number, not 4.0"),
    "absurd memory": (gpu(memory_gib=1e9), "gpu: memory_gib must be at most 100000, not 1000000000.0"),
    "an absurd link": (inside(gb_s=1e9), "inside: gb_s must be at most 1e+06"),
    "absurd servers": (DESCRIBED | {"servers": 10**7}, "servers must be at most 1e+06"),
    "a key twice": ("servers: 2\nname: x\nservers: 4\n", "servers is given twice"),
    "a key twice inside": ("servers: 2\ninside: {gb_s: 1, latency_us: 2, gb_s: 3}\n", "gb_s is given twice"),
    "an absurd error": (gpu(error=2), "gpu: error must be a share of at most 1"),
    "true servers": (DESCRIBED | {"servers": True}, "servers must be a positive whole number, not True"),
    "not a number": (inside(gb_s=float("nan")), "gb_s must be a positive number, not nan"),
    "unknown gpu": (DESCRIBED | {"gpu": "B300"}, "gpu 'B300' is not one of V100-16GB"),
    "a list for a gpu": (DESCRIBED | {"gpu": [1]}, "gpu: expected the entries"),
    "a list": ([1, 2], "expected the entries"),
    "words": ("just words", "expected the entries"),
    "nothing": ("", "expected the entries"),
    "not YAML": ("a: [1\nb: }", "not a readable YAML file"),
    "a tab": ("a:\n\t- b", "not a readable YAML file"),
    "bytes": (b"\xff\xfe\x00\x81", "not a readable YAML file"),
    "a word for a link": (inside(gb_s="fast"), "gb_s"),
    "a list for a link": (inside(latency_us=[5]), "latency_us"),
    "true for a link": (inside(gb_s=True), "gb_s"),
    "nothing for memory": (gpu(memory_gib=None), "memory_gib"),
    "a word for bf16": (gpu(bf16="no"), "bf16"),
    "half a card": (inside(rails=1.5), "rails"),
    "more than the peak": (gpu(gemm_efficiency=3), "gemm_efficiency"),
    "endless": (gpu(tflops=float("inf")), "tflops"),
    "no profile there": (DESCRIBED | {"profile": "none.json"}, "none.json: not a readable JSON file"),
}


@pytest.mark.parametrize("name", BAD_CLUSTERS)
def test_cluster_files_that_cannot_be_used(name, call, write):
    content, words = BAD_CLUSTERS[name]
    path = write(content)
    flag = "--profile" if name == "no profile there" else f"--cluster {path}: "
    refused(call(*TINY, "--cluster", path, "--max-global-batch-size", "16", "--top", "1"), flag, words)


def test_a_folder_is_not_a_cluster_file(call, tmp_path):
    ended = call(*TINY, "--cluster", tmp_path, "--max-global-batch-size", "16")
    refused(ended, f"--cluster {tmp_path}: not a readable")


@pytest.mark.parametrize("flag", ["--script", "--sbatch"])
def test_files_that_are_there_stay(flag, call, write):
    path = write("mine", "plan")
    refused(call(*TINY, *FOUR, "--top", "1", flag, path), f"{flag} {path} exists")
    assert path.read_text() == "mine"


@pytest.mark.parametrize("flag", ["--script", "--sbatch", "--json", "--trace", "--report"])
def test_files_that_cannot_be_written(flag, call, write):
    path = write("mine", "file") / "inside a file"
    refused(call(*TINY, *FOUR, "--top", "1", flag, path), f"{flag} {path}")


# --- cluster files ---------------------------------------------------------------------------------------------------


def test_a_yaml_file_is_the_cluster_that_it_describes(write):
    assert from_yaml(write(DESCRIBED)) == Cluster(
        "my cluster", 2, 4, Device("mine", 40, 100, 1000, bf16=False, units=64), Link(100, 5), Link(10, 20, rails=4)
    )
    named = from_yaml(write(without(DESCRIBED, "name") | {"gpu": "H100-80GB", "profile": "p.json"}))
    assert named.device == clusters.PRESETS["dgx-h100"].device and named.name.endswith("cluster.yaml")
    assert named.profile == Path(named.name).parent / "p.json"
    assert from_yaml(write(without(DESCRIBED, "gpu") | {"gpu": without(DESCRIBED["gpu"], "name")})).device.name == "gpu"


def test_a_described_gpu_of_a_known_name_says_what_it_takes_from_it(write, call):
    entries = {"name": "A100-80GB", "memory_gib": 70, "tflops": 300, "memory_gb_s": 2000, "units": 100}
    path = write(DESCRIBED | {"gpu": entries})
    device, known = from_yaml(path).device, clusters.GPUS["A100-80GB"]
    assert device == replace(
        known, memory_gib=70, tflops=300, memory_gb_s=2000, units=100, calibration=device.calibration
    )
    assert device.calibration.startswith(f"{known.calibration}; of the known A100-80GB: tflops_fp32, bf16, flash, gemm")
    ended = call(*TINY, "--cluster", path, "--max-global-batch-size", "16", "--top", "1")
    assert "of the known A100-80GB: tflops_fp32" in " ".join(ended.out.split())


@pytest.mark.parametrize(
    "cluster",
    [
        *clusters.PRESETS.values(),
        Cluster("mine", 3, 5, Device("small", 10.5, 7, 300), Link(1.5, 2, measured=True), Link(0.1, 100.5, rails=2)),
    ],
    ids=lambda cluster: cluster.name,
)
def test_a_cluster_comes_back_from_its_file(cluster, tmp_path):
    path = tmp_path / "new" / "cluster.yaml"
    to_yaml(cluster, path)
    assert from_yaml(path) == cluster
    assert [entry.name for entry in path.parent.iterdir()] == ["cluster.yaml"]
    with pytest.raises(UserError, match=f"^--out {tmp_path}: Is a directory$"):
        to_yaml(cluster, tmp_path)


def test_servers_of_different_gpus(call, write, tmp_path):
    cluster = from_yaml(write(MIXED))
    assert cluster.servers == 3 and [device.name for device in cluster.devices] == ["fast", "slow", "slow"]
    assert (cluster.device.memory_gib, cluster.device.tflops, cluster.device.name) == (16, 32, "fast and slow")
    assert cluster.part(1, 2).device == cluster.devices[0] and cluster.part(1, 2).devices == ()
    to_yaml(cluster, tmp_path / "again.yaml")
    assert from_yaml(tmp_path / "again.yaml") == cluster
    words = ["--cluster", write(MIXED), "--max-global-batch-size", "24", "--tensor-model-parallel-size", "1"]
    one = [*words, "--pipeline-model-parallel-size", "6", "--schedules", "2bw", "--top", "1"]
    found = call("--model", "gpt-1.3b", *one, "--json", tmp_path / "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text())["plans"][0]
    assert sum(plan["layers"]) == 24 and plan["layers"][1] > plan["layers"][2]
    layout = "E" + "|".join(f"t*{layers}" for layers in plan["layers"]) + "L"
    assert f"--pipeline-model-parallel-layout '{layout}'" in found.out  # as a shell takes it
    refused(call("--model", "gpt-1.3b", *one, "--servers", "2"), "--servers 2: the groups of --cluster")
    refused(call("--model", "gpt-1.3b", *one, "--profile", "p.json"), "--profile p.json: it is of one GPU")


def test_a_described_cluster_plans_as_the_preset_that_it_is(call, tmp_path):
    to_yaml(replace(clusters.PRESETS["dgx-a100-80"], servers=2), tmp_path / "cluster.yaml")

    def plans(*words) -> list:
        assert call(*TINY, *words, "--max-global-batch-size", "16", "--json", tmp_path / "plan.json").status == 0
        return json.loads((tmp_path / "plan.json").read_text())["plans"]

    assert plans("--cluster", tmp_path / "cluster.yaml") == plans("--cluster", "dgx-a100-80", "--servers", "2")
    fewer = ["--gpus-per-server", "4", "--servers", "1"]
    assert plans("--cluster", tmp_path / "cluster.yaml", *fewer) == plans("--cluster", "dgx-a100-80", *fewer)


# --- simulate --------------------------------------------------------------------------------------------------------

SIMULATE = ["simulate", "--schedule", "2bw", "--stages", "4", "--microbatches", "4"]


def test_a_schedule_is_drawn_as_text(call):
    ended = call(*SIMULATE)
    assert ended.status == 0 and ended.errors == []
    lines = ended.out.splitlines()
    assert lines[0] == "2bw, 4 stages, 4 microbatches a batch"
    stages = [line.split()[2:] for line in lines if line.startswith("stage ")]
    assert len(stages) == 4 and stages[0][:4] == ["1", "2", "3", "4"]
    assert stages[3][:5] == ["......1", "1bb", "2", "2bb", "3"]  # the last stage, once filled, never waits
    assert lines[-1] == "an iteration takes 12"  # 4 microbatches of 1 + 2, without a bubble
    assert call(*SIMULATE, "--schedule", "pipedream-flush").out.splitlines()[-1] == "an iteration takes 21"
    rounds = call(*SIMULATE, "--schedule", "gpipe", "--gpipe-round", "2").out.splitlines()
    assert rounds[-1] == "an iteration takes 30"  # two rounds of 2 + 3 microbatches
    assert rounds[5].split()[2:8] == ["......1", "2", "1bb", "2bb", "..................3", "4"]
    ended = call(*SIMULATE, "--schedule", "megatron-interleaved", "--virtual", "2")
    assert ended.out.splitlines()[-1] == "an iteration takes 16.5"  # half of the bubble of 9
    assert call(*SIMULATE, "--forward", "2", "--backward", "2").out.endswith("takes 16\n")
    slow = ["--microbatches", "8", "--transfer", "0.5"]
    takes = [
        call(*SIMULATE, *slow, *more).out.splitlines()[-1].removeprefix("an iteration takes ")
        for more in ([], ["--extra-warmup", "0,1,0"], ["--extra-warmup", "1"])
    ]
    assert takes == ["30", "28", "24"]  # 8 microbatches of 3 + 2 3/4 0.5; of (2 3 + 2 0.5) / 2; of 3
    narrow = call(*SIMULATE, "--columns", "40").out.splitlines()
    assert max(len(line) for line in narrow if line.startswith("stage")) <= 40 < max(map(len, lines))
    assert "W(v)" in call(*SIMULATE, "--versions").out and "W(v)" not in ended.out


def test_a_schedule_is_drawn_as_a_picture(call, tmp_path):
    path = tmp_path / "timeline.png"
    ended = call(*SIMULATE, "--out", path)
    assert ended.status == 0 and path.read_bytes().startswith(b"\x89PNG") and f"wrote {path}" in ended.out


BAD_SIMULATIONS = [
    (["--microbatches", "3"], "--microbatches 3: 2bw needs 4 with 4 stages"),
    (["--microbatches", "0"], "--microbatches"),
    (["--stages", "0"], "--stages"),
    (["--stages", "x"], "--stages"),
    (["--schedule", "3bw"], "--schedule"),
    (["--schedule", "megatron-interleaved", "--microbatches", "6"], "--microbatches must be a multiple of --stages"),
    (["--iterations", "0"], "--iterations"),
    (["--virtual", "0"], "--virtual"),
    (["--columns", "0"], "--columns"),
    (["--gradient-slots", "3"], "--gradient-slots"),
    (["--forward", "-1"], "--forward"),
    (["--reduce", "x"], "--reduce"),
    (["--extra-warmup", "1,x"], "--extra-warmup: 1,x: must be whole numbers of 0 or more, with commas between"),
    (["--extra-warmup", "-1"], "--extra-warmup"),
    (["--extra-warmup", ""], "--extra-warmup"),
    (["--extra-warmup", "1,1"], "--extra-warmup: give one number, or one for each of the 3 boundaries"),
    (["--extra-warmup", "1", "--microbatches", "6"], "--microbatches 6: 2bw needs 7 with 4 stages and --extra-warmup"),
    (["--extra-warmup", "1", "--schedule", "gpipe"], "--extra-warmup has no effect without --schedule 2bw"),
    (["--extra-warmup", "1", "--stages", "1"], "--extra-warmup has no effect without"),
    (["--gpipe-round", "2"], "--gpipe-round has no effect without --schedule gpipe: leave it out"),
    (["--gpipe-round", "0", "--schedule", "gpipe"], "--gpipe-round: 0: must be a whole number of 1 or more"),
    (["--gpipe-round", "5", "--schedule", "gpipe"], "--gpipe-round 5 is more than --microbatches 4"),
    (["--virtual", "3"], "--virtual has no effect without --schedule megatron-interleaved: leave it out"),
    (["--gradient-slots", "1", "--schedule", "gpipe"], "--gradient-slots has no effect without --schedule 2bw"),
    (["--chunks", "2"], "--chunks"),
    (["--forward", "nan"], "--forward"),
    (["--transfer", "inf"], "--transfer"),
    (["--forward", "0", "--backward", "0"], "--forward"),
    (["--forward", "1e-300"], "--forward must be a time, 0 or from 1e-09 to 1e+09, not 1e-300"),
    (["--backward", "1e300"], "--backward must be a time, 0 or from 1e-09 to 1e+09, not 1e+300"),
    (["--columns", "1000000000"], "--columns must be from 1 to 20000"),
    (["--stages", "1001", "--schedule", "gpipe"], "--stages must be from 1 to 1000, not 1001"),
    (["--iterations", "1251"], "--stages x --microbatches x --iterations makes 20016 forwards: at most 20000 are"),
    (
        ["--schedule", "megatron-interleaved", "--iterations", "100", "--virtual", "13"],
        "--stages x --microbatches x --iterations x --virtual makes 20800 forwards",
    ),
]


@pytest.mark.parametrize("words, flag", BAD_SIMULATIONS, ids=[" ".join(words) for words, _ in BAD_SIMULATIONS])
def test_bad_simulations(words, flag, call):
    refused(call(*SIMULATE, *words), flag, prog="megatron-2bw-plan simulate")


@pytest.mark.parametrize("flag", ["--trace", "--report"])
def test_a_plan_too_long_to_draw(flag, call, tmp_path):
    words = [*TINY, *FOUR, "--max-global-batch-size", "1000000", "--pipeline-model-parallel-size", "4"]
    refused(call(*words, "--micro-batch-size", "1", flag, tmp_path / "out"), "--max-global-batch-size", flag)


def test_a_picture_that_cannot_be_written(call, write):
    path = write("mine", "file") / "timeline.png"
    refused(call(*SIMULATE, "--out", path), f"--out {path}", prog="megatron-2bw-plan simulate")
    path = write("mine", "picture.xyz")
    refused(call(*SIMULATE, "--out", path), f"--out {path}", prog="megatron-2bw-plan simulate")


def test_a_schedule_is_needed(call):
    refused(call("simulate", "--stages", "4"), "--schedule is missing", "--figure", prog="megatron-2bw-plan simulate")
    refused(call("simulate", "--figure", "2", "--stages", "4"), "--figure", prog="megatron-2bw-plan simulate")
    refused(
        call("simulate", "--figure", "2", "--versions"),
        "--versions has no effect with --figure",
        prog="megatron-2bw-plan simulate",
    )


# --- calibrate -------------------------------------------------------------------------------------------------------

RUNS = """layers,hidden,heads,sequence,tensor,depth,width,microbatch,global_batch,seconds
8,1024,16,512,1,2,2,2,32,0.5
8,1024,16,512,1,1,4,2,32,0.4
8,1024,16,512,2,2,1,1,8,0.2
"""


def test_calibrate_writes_a_cluster_that_plans(call, write, tmp_path):
    runs, out, predictions = write(RUNS, "runs.csv"), tmp_path / "fitted.yaml", tmp_path / "predicted.csv"
    words = ["--cluster", "dgx-a100-80", "--rows", "2", "--out", out, "--predictions", predictions]
    ended = call("calibrate", runs, *words)
    assert ended.status == 0 and ended.errors == []
    assert ended.out.startswith("fitted to 2 of 3 runs: ") and "mean absolute error of the other 1: " in ended.out
    fitted = from_yaml(out)
    assert fitted.name == "dgx-a100-80, calibrated" and fitted.device.calibration == "fitted to 2 measured runs"
    assert fitted.device != clusters.PRESETS["dgx-a100-80"].device
    assert [line.rsplit(",", 1)[0] for line in predictions.read_text().splitlines()] == RUNS.splitlines()
    assert call(*TINY, "--cluster", out, "--max-global-batch-size", "16", "--top", "1").status == 0


def test_calibrate_without_a_fit_predicts(call, write):
    ended = call("calibrate", write(RUNS, "runs.csv"), "--cluster", "dgx-a100-80", "--rows", "0")
    assert ended.status == 0 and "fitted to 0 of 3 runs" in ended.out and "error of the other 3" in ended.out
    ended = call("calibrate", write(RUNS, "runs.csv"), "--cluster", "dgx-a100-80", "--rows", "3")
    assert ended.status == 0 and "error of the other" not in ended.out
    assert re.search(r"^mean absolute error by cross-validation: [\d.]+%, at most [\d.]+%$", ended.out, re.MULTILINE)


def test_a_described_cluster_is_fitted_and_read_again(call, write, tmp_path):
    described, runs, out = write(DESCRIBED), write(RUNS, "runs.csv"), tmp_path / "fitted.yaml"
    assert call("calibrate", runs, "--cluster", described, "--rows", "3", "--out", out).status == 0
    assert call("calibrate", runs, "--cluster", out, "--rows", "0").status == 0


def test_a_cluster_with_a_profile_is_fitted_or_refused(call, write, tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    path, runs = write(DESCRIBED | {"profile": "profile.json"}), write(RUNS, "runs.csv")
    ended = call("calibrate", runs, "--cluster", path, "--rows", "0")
    if ended.status:
        refused(ended, "--cluster", "profile", prog="megatron-2bw-plan calibrate")
    else:  # the profile is another model's, so the constants count
        assert ended.out == call("calibrate", runs, "--cluster", write(DESCRIBED), "--rows", "0").out


CALIBRATE = ["--cluster", "dgx-a100-80", "--rows", "3"]
BAD_CALIBRATIONS = {
    "a missing column": (RUNS.replace(",depth", ",deep"), CALIBRATE, "the column depth is missing"),
    "an unknown column": (RUNS.replace("seconds", "seconds,colour", 1), CALIBRATE, "unknown column colour"),
    "not a number": (RUNS.replace("0.4", "fast"), CALIBRATE, "line 3: seconds is 'fast', not a number"),
    "no rows": (RUNS.splitlines()[0] + "\n", CALIBRATE, "no rows"),
    "too many rows": (RUNS, ["--cluster", "dgx-a100-80", "--rows", "4"], "--rows 4: the file has 3"),
    "the default of 20 rows": (RUNS, ["--cluster", "dgx-a100-80"], "--rows 20: the file has 3"),
    "negative rows": (RUNS, ["--cluster", "dgx-a100-80", "--rows", "-1"], "--rows -1"),
    "an unknown cluster": (RUNS, ["--cluster", "p4", "--rows", "3"], "--cluster p4"),
    "no cluster": (RUNS, [], "--cluster"),
    "an unknown flag": (RUNS, [*CALIBRATE, "--fast"], "--fast"),
    "an unknown schedule": (
        RUNS.replace("seconds", "seconds,schedule", 1).replace("0.5", "0.5,1f1b"),
        CALIBRATE,
        "1f1b",
    ),
    "no pipelines": (RUNS.replace("1,1,4,2", "1,1,0,2"), CALIBRATE, "width"),
}


@pytest.mark.parametrize("name", BAD_CALIBRATIONS)
def test_bad_calibrations(name, call, write):
    text, words, expected = BAD_CALIBRATIONS[name]
    refused(call("calibrate", write(text, "runs.csv"), *words), expected, prog="megatron-2bw-plan calibrate")


@pytest.mark.parametrize("flag", ["--out", "--predictions"])
def test_fits_that_cannot_be_written(flag, call, write):
    runs, path = write(RUNS, "runs.csv"), write("mine", "file") / "inside a file"
    refused(call("calibrate", runs, *CALIBRATE, flag, path), f"{flag} {path}", prog="megatron-2bw-plan calibrate")


def test_a_table_that_is_not_there(call, tmp_path):
    ended = call("calibrate", tmp_path / "runs.csv", *CALIBRATE)
    refused(ended, "runs.csv: No such file", prog="megatron-2bw-plan calibrate")


# --- all commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [[], ["plan"], ["profile"], ["simulate"], ["calibrate"]], ids=str)
def test_help(command, call):
    ended = call(*command, "--help")
    assert ended.status == 0 and ended.errors == [] and "--help" in ended.out
    if command in ([], ["plan"]):
        assert all(name in ended.out for name in (*PRESETS, *clusters.PRESETS))
