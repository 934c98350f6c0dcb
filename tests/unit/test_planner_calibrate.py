"""Fitting a cluster to runs: a known cluster is recovered, what runs do not tell of
stays, files are read."""

from dataclasses import replace
from pathlib import Path

import pytest
from pytest import approx

from megatron_2bw.base.errors import UserError
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions import cluster as clusters
from megatron_2bw.tools.planner.descriptions.model import Model
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.measure.calibrate import (
    DEVICE,
    calibrate,
    cross_validated,
    memory_errors,
    predict,
)
from megatron_2bw.tools.planner.measure.runs import (
    COLUMNS,
    MeasuredRun,
    read,
    read_log,
    read_runs,
)

PRESET = clusters.preset("dgx-a100-80", 1)
SMALL = Model("small", 12, 1024, 16, sequence=1024)
LARGE = Model("large", 24, 4096, 32, sequence=2048)
# tensor, depth, width, microbatch, microbatches of a batch, recompute, schedule
SHAPES = [
    (1, 1, 8, 4, 4, "none", "megatron"),
    (1, 1, 1, 1, 1, "none", "megatron"),
    (1, 4, 2, 1, 8, "none", "2bw"),
    (1, 4, 2, 4, 8, "none", "megatron"),
    (2, 2, 2, 1, 8, "full", "megatron"),
    (4, 1, 2, 2, 4, "none", "pipedream-flush"),
    (8, 1, 1, 1, 1, "none", "megatron"),
    (2, 4, 1, 1, 16, "none", "2bw"),
    (1, 4, 4, 1, 8, "none", "megatron"),
    (8, 2, 1, 2, 8, "selective", "megatron"),
    (1, 2, 8, 1, 4, "none", "2bw"),
    (8, 1, 2, 1, 4, "none", "megatron"),
]


def runs_on(
    cluster: clusters.Cluster, shapes=SHAPES, models=(SMALL, LARGE)
) -> list[MeasuredRun]:
    """What `cluster` takes for runs of the models in turn."""
    runs = [
        MeasuredRun(models[i % len(models)], Plan(*shape), 1.0)
        for i, shape in enumerate(shapes)
    ]
    return [
        replace(run, seconds=seconds)
        for run, seconds in zip(runs, predict(cluster, runs))
    ]


def changed(cluster: clusters.Cluster, **constants: float) -> clusters.Cluster:
    """`cluster` with constants multiplied: of the device, or of a link as
    inside_gb_s."""
    for name, factor in constants.items():
        part, field = (
            name.split("_", 1)
            if name.startswith(("inside", "between"))
            else ("device", name)
        )
        owner = getattr(cluster, part)
        cluster = replace(
            cluster, **{part: replace(owner, **{field: getattr(owner, field) * factor})}
        )
    return cluster


def errors(cluster: clusters.Cluster, runs: list[MeasuredRun]) -> list[float]:
    return [
        abs(seconds / run.seconds - 1)
        for seconds, run in zip(predict(cluster, runs), runs)
    ]


# --- the fit
# --------------------------------------------------------------------------------------


def test_a_known_cluster_is_recovered():
    truth = changed(
        PRESET,
        gemm_efficiency=0.75,
        memory_efficiency=1.1,
        layer_launch_us=1.25,
        inside_gb_s=0.85,
        between_gb_s=0.8,
    )
    runs = runs_on(truth)
    before = errors(PRESET, runs)
    assert len(runs) == 12
    assert sum(before) / len(before) > 0.1
    fitted = calibrate(PRESET, runs)
    found = errors(fitted, runs)
    assert sum(found) / len(found) < 0.01
    assert max(found) < 0.03
    assert fitted.device.gemm_efficiency == approx(
        truth.device.gemm_efficiency, rel=0.05
    )
    assert fitted.device.layer_launch_us == approx(
        truth.device.layer_launch_us, rel=0.05
    )
    assert fitted.device.calibration == "fitted to 12 measured runs"
    assert fitted.name == PRESET.name
    # Runs that it has not seen: other microbatches, another depth.
    others = [
        (1, 2, 4, 2, 4, "none", "2bw"),
        (4, 2, 1, 1, 8, "none", "megatron"),
        (1, 8, 1, 2, 16, "full", "2bw"),
    ]
    unseen = runs_on(truth, others, (LARGE,))
    assert max(errors(fitted, unseen)) < 0.05 < max(errors(PRESET, unseen))


def test_constants_that_runs_say_nothing_about_stay():
    truth = changed(
        PRESET,
        gemm_efficiency=0.7,
        inside_gb_s=0.5,
        between_gb_s=0.1,
        exchange_us=5,
        collective_launch_us=9,
    )
    alone = [
        (1, 1, 1, *rest, "megatron")
        for rest in ((1, 4, "none"), (8, 2, "none"), (2, 1, "full"))
    ]
    fitted = calibrate(PRESET, runs_on(truth, alone))
    assert fitted.device.gemm_efficiency != PRESET.device.gemm_efficiency
    for name in ("collective_launch_us", "exchange_us"):
        assert getattr(fitted.device, name) == getattr(PRESET.device, name)
    assert (fitted.inside, fitted.between) == (PRESET.inside, PRESET.between)
    unfitted = dict.fromkeys((*DEVICE, "calibration"))
    assert replace(fitted.device, **unfitted) == replace(PRESET.device, **unfitted)
    # In one server nothing is told of the network; in two it is.
    inside = [shape for shape in SHAPES if shape[0] * shape[1] * shape[2] <= 8]
    assert calibrate(PRESET, runs_on(truth, inside)).between == PRESET.between
    assert calibrate(PRESET, runs_on(truth)).between.gb_s < 0.5 * PRESET.between.gb_s


def test_one_wrong_row_has_little_weight():
    runs = runs_on(changed(PRESET, gemm_efficiency=0.8, inside_gb_s=0.85))
    wrong = [
        replace(run, seconds=run.seconds * (0.5 if index == 4 else 1))
        for index, run in enumerate(runs)
    ]
    found = errors(calibrate(PRESET, wrong), runs)
    assert sum(found) / len(found) < 0.02
    assert max(found) < 0.06


def test_cross_validation_predicts_each_run_by_the_others():
    runs = runs_on(changed(PRESET, gemm_efficiency=0.8), SHAPES[:9])
    found = cross_validated(PRESET, runs, parts=3)
    assert len(found) == len(runs)
    assert max(map(abs, found)) < 0.05
    alone = next(index for index, run in enumerate(runs) if run.plan.gpus == 16)
    runs[alone] = replace(runs[alone], seconds=2 * runs[alone].seconds)
    found = cross_validated(PRESET, runs, parts=3)
    # it did not take part in its own fit
    assert found[alone] == approx(-0.5, abs=0.06)
    assert (
        errors(calibrate(PRESET, runs[alone : alone + 1]), runs[alone : alone + 1])[0]
        < 0.4
    )


def test_memory_is_compared_where_it_was_measured():
    runs = runs_on(PRESET)[:3]
    cost = Cost(runs[1].model, PRESET, "bf16", False)
    runs[1] = replace(runs[1], memory=cost.memory.heaviest(runs[1].plan) / 2**30 / 1.1)
    assert memory_errors(PRESET, runs) == approx([0.1])


# --- the table of runs
# --------------------------------------------------------------------------------------

ROW = dict(zip(COLUMNS, (8, 1024, 16, 512, 1, 2, 2, 2, 32, 0.5), strict=True))
SHAPE = dict(layers=8, hidden=1024, heads=16, sequence=512)


def table(path: Path, *rows: dict) -> Path:
    names = dict.fromkeys(name for row in rows for name in row)
    path.write_text(
        "\n".join(
            [
                ",".join(names),
                *(",".join(str(row.get(name, "")) for name in names) for row in rows),
            ]
        )
    )
    return path


def test_rows_are_read(tmp_path):
    other = dict(
        vocab=1000,
        recompute="full",
        schedule="2bw",
        precision="fp16",
        flash=1,
        ffn=2048,
        groups=4,
        gated=1,
    )
    other |= dict(
        sequence_parallel=1,
        distributed_optimizer=1,
        pipeline_inside=1,
        seconds=1.25,
        tensor=2,
    )
    path = table(tmp_path / "runs.csv", ROW, ROW | other)
    plan = Plan(
        2,
        2,
        2,
        2,
        8,
        "full",
        distributed_optimizer=True,
        pipeline_inside=True,
        sequence_parallel=True,
    )
    runs = [
        # an empty cell is the default
        MeasuredRun(
            Model("run", **SHAPE), Plan(1, 2, 2, 2, 8, schedule="megatron"), 0.5
        ),
        MeasuredRun(
            Model("run", **SHAPE, vocab=1000, ffn=2048, groups=4, gated=True),
            plan,
            1.25,
            "fp16",
            True,
        ),
    ]
    assert read_runs(path) == runs
    path.write_text("\ufeff" + path.read_text())  # as spreadsheets write it
    assert read_runs(path) == runs


def test_a_row_holds_any_plan(tmp_path):
    cells = dict(
        depth=4,
        layers=10,
        recompute="full",
        schedule="2bw",
        memory="one-slot",
        distributed_optimizer=1,
    )
    cells |= dict(
        first=2,
        last=4,
        extra_warmup="1 0 2",
        corrected=1,
        late=3,
        recompute_layers=2,
        memory_gib=1.5,
        tied=0,
    )
    others = (
        ROW | dict(schedule="gpipe", gpipe_round=4),
        ROW | dict(overlap=0),
        ROW | dict(overlap=1),
    )
    run, *others = read_runs(table(tmp_path / "runs.csv", ROW | cells, *others))
    ends = dict(first=2, last=4, extra_warmup=(1, 0, 2))
    choices = dict(
        memory="one-slot",
        distributed_optimizer=True,
        corrected=True,
        late=3,
        recompute_layers=2,
    )
    assert run.plan == Plan(1, 4, 2, 2, 8, "full", **ends, **choices)
    assert run.memory == 1.5
    assert not run.model.tied
    assert run.model.bias
    assert [other.plan.gpipe_round for other in others] == [4, None, None]
    assert [other.plan.schedule for other in others] == [
        "gpipe",
        "pipedream-flush",
        "megatron",
    ]


@pytest.mark.parametrize(
    "cells, word",
    [
        ({"depth": "two"}, "depth"),
        ({"global_batch": 31}, "global_batch"),
        ({"heads": 3}, "--num-attention-heads"),
        ({"overlap": 0, "virtual": 2, "layers": 8}, "--overlap-grad-reduce"),
    ],
    ids=str,
)
def test_a_row_that_cannot_be_used_is_named(cells, word, tmp_path):
    path = table(tmp_path / "runs.csv", ROW, ROW | cells)
    with pytest.raises(UserError, match=f"^{path}, line 3: .*{word}"):
        read_runs(path)


# --- logs of runs
# --------------------------------------------------------------------------------------

# As Megatron prints them, which `log` writes a line each.
ARGUMENTS = dict(
    pair.split()
    for pair in """
num_layers 10, hidden_size 1024, num_attention_heads 16, seq_length 512, vocab_size 1000, ffn_hidden_size 2816,
kv_channels 64, group_query_attention True, num_query_groups 4, swiglu True, normalization RMSNorm,
position_embedding_type rope, untie_embeddings_and_output_weights True, add_bias_linear False, hidden_dropout 0.0,
attention_dropout 0.0, tensor_model_parallel_size 1, pipeline_model_parallel_size 4, data_parallel_size 2,
micro_batch_size 2, global_batch_size 32, pipeline_schedule 2bw, two_bw_memory one-slot, two_bw_late 25%,
decoder_first_pipeline_num_layers 2, decoder_last_pipeline_num_layers 4, use_distributed_optimizer True,
virtual_pipeline_model_parallel_size None, recompute_granularity None, context_parallel_size 1, bf16 True,
two_bw_correction auto, transformer_impl transformer_engine, attention_backend AttnBackend.auto
""".split(",")
) | {"two_bw_extra_warmup": (1, 0, 2)}


STAGES = "peak memory by stage (GiB): 1.50 2.25 1.00 1.75 |"


def log(
    path: Path,
    milliseconds=(9000, 700, 600, 500, 510, 900, 490),
    memory: str = STAGES,
    **changed,
) -> Path:
    lines = ["[default0]:------------------------ arguments ------------------------"]
    lines += [
        f"[default0]:  {name} {'.' * (40 - len(name))} {value}"
        for name, value in (ARGUMENTS | changed).items()
    ]
    lines += ["-------------------- end of arguments ---------------------"]
    lines += [
        f" [2026-01-01] iteration {n}/ 7 | elapsed time per iteration (ms): {ms:.1f} | {memory}"
        for n, ms in enumerate(milliseconds, 1)
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_log_of_a_run_is_a_run(tmp_path):
    run = read_log(log(tmp_path / "run.log"))
    options = dict(
        gated=True, rms_norm=True, rotary=True, tied=False, bias=False, dropout=False
    )
    assert run.model == Model(
        "gpt", 10, 1024, 16, 1000, 512, ffn=2816, groups=4, **options
    )
    choices = dict(
        memory="one-slot",
        distributed_optimizer=True,
        first=2,
        last=4,
        extra_warmup=(1, 0, 2),
    )
    assert run.plan == Plan(1, 4, 2, 2, 8, late=2, corrected=True, **choices)
    assert (run.seconds, run.precision, run.flash, run.memory) == (
        0.505,
        "bf16",
        True,
        2.25,
    )
    wide = dict(
        pipeline_model_parallel_size=1, data_parallel_size=8, two_bw_extra_warmup="()"
    )
    ends = dict(
        decoder_first_pipeline_num_layers=None, decoder_last_pipeline_num_layers=None
    )
    for overlap, schedule in ((True, "megatron"), (False, "pipedream-flush")):
        plain = dict(
            two_bw_memory="two-slots",
            two_bw_late="all",
            pipeline_schedule="megatron",
        )
        text = log(
            tmp_path / "b.log", overlap_grad_reduce=overlap, **plain, **wide, **ends
        )
        assert read_log(text).plan.schedule == schedule
    scores = log(
        tmp_path / "c.log",
        attention_backend="AttnBackend.unfused",
        add_bias_linear=True,
        lora_rank=8,
    )
    assert not read_log(scores).flash
    assert read_log(scores).model.bias
    assert read_log(scores).model.adapter_rank == 8
    # A layout, context parallelism, layers by twos, gradients in 16 bits.
    names = dict(
        pipeline_model_parallel_layout="Et*4|t*3|t*2|tL", context_parallel_size=2
    )
    run = read_log(log(tmp_path / "a.log", **ends, **names))
    assert run.plan.stages == (4, 3, 2, 1)
    assert run.plan.context == 2
    assert run.plan.gpus == 16
    again = dict(recompute_granularity="full", recompute_num_layers=2)
    plan = read_log(log(tmp_path / "b.log", **again, grad_reduce_in_bf16=True)).plan
    assert plan.recompute_layers == 2
    assert plan.grad_reduce_in_bf16


def test_the_records_of_all_ranks_are_a_run(tmp_path):
    """Logs as a run writes them in its folder. Its screen shows the iterations, and the name
    of the first rank's file."""
    path = log(tmp_path / "run" / "job.out")
    output = tmp_path / "run" / "saved" / "output"
    output.mkdir(parents=True)
    run = read_log(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if "iteration" in line))
    (output / "rank-0.txt").write_text(
        "\n".join(line for line in lines if "iteration" not in line)
    )
    (output / "rank-3.txt").write_text(path.read_text())
    assert read([tmp_path]) == [run]
    with pytest.raises(UserError, match="--save"):
        read([path])
    path.write_text(
        f"> output: {output}/rank-0.txt has all that this rank prints\n{path.read_text()}"
    )
    (tmp_path / "run").rename(tmp_path / "moved")
    assert read([tmp_path]) == read([tmp_path / "moved" / "job.out"]) == [run]


def test_folders_of_logs_are_read_with_tables(tmp_path):
    for name in ("a/train.log", "b/job-1.out"):
        log(tmp_path / name)
    (tmp_path / "b" / "notes.txt").write_text("nothing of a run\n")
    csv_file = table(tmp_path / "runs.csv", ROW)
    assert (
        len(
            read(
                [tmp_path / "a", tmp_path / "b", csv_file, tmp_path / "a" / "train.log"]
            )
        )
        == 4
    )
    (tmp_path / "c").mkdir()
    for path in (tmp_path / "b" / "notes.txt", tmp_path / "c"):
        with pytest.raises(UserError, match="arguments"):
            read([path])


@pytest.mark.parametrize(
    "count, changed, word",
    [
        (3, {}, "iterations"),
        (4, {"num_layers": 3}, "layers"),
    ],
)
def test_logs_that_cannot_be_used(count, changed, word, tmp_path):
    path = log(tmp_path / "run.log", [9000, 700, 600, 500][:count], **changed)
    with pytest.raises(UserError, match=f"^{path}: .*{word}"):
        read([path])
