"""Fitting a cluster to runs: a known cluster is recovered, what runs do not tell of stays, files are read."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_2bw.errors import UserError
from megatron_2bw.models import cluster as clusters
from megatron_2bw.models.model import Model
from megatron_2bw.models.plan import Plan
from megatron_2bw.planner.cost.simulated import Cost
from megatron_2bw.planner.measure import calibrate as calibrating
from megatron_2bw.planner.measure.calibrate import (
    DEVICE,
    SHARE_LIMIT,
    calibrate,
    cross_validated,
    memory_errors,
    predict,
)
from megatron_2bw.planner.measure.runs import COLUMNS, Run, read, read_log, read_runs, write_predictions

PRESET = clusters.preset("dgx-a100-80", 1)
SMALL, LARGE = Model("small", 12, 1024, 16, sequence=1024), Model("large", 24, 4096, 32, sequence=2048)
SHAPES = [  # tensor, depth, width, microbatch, microbatches of a batch, recompute, schedule
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


def runs_on(cluster: clusters.Cluster, shapes=SHAPES, models=(SMALL, LARGE)) -> list[Run]:
    """What `cluster` takes for runs of the models in turn."""
    runs = [Run(models[i % len(models)], Plan(*shape), 1.0) for i, shape in enumerate(shapes)]
    return [replace(run, seconds=seconds) for run, seconds in zip(runs, predict(cluster, runs))]


def changed(cluster: clusters.Cluster, **constants: float) -> clusters.Cluster:
    """`cluster` with constants multiplied: of the device, or of a link as inside_gb_s."""
    for name, factor in constants.items():
        part, field = name.split("_", 1) if name.startswith(("inside", "between")) else ("device", name)
        owner = getattr(cluster, part)
        cluster = replace(cluster, **{part: replace(owner, **{field: getattr(owner, field) * factor})})
    return cluster


def errors(cluster: clusters.Cluster, runs: list[Run]) -> list[float]:
    return [abs(seconds / run.seconds - 1) for seconds, run in zip(predict(cluster, runs), runs)]


# --- the fit ---------------------------------------------------------------------------------------------------------


def test_a_known_cluster_is_recovered():
    truth = changed(
        PRESET, gemm_efficiency=0.75, memory_efficiency=1.1, layer_launch_us=1.25, inside_gb_s=0.85, between_gb_s=0.8
    )
    runs = runs_on(truth)
    before = errors(PRESET, runs)
    assert len(runs) == 12 and sum(before) / len(before) > 0.1
    fitted = calibrate(PRESET, runs)
    found = errors(fitted, runs)
    assert sum(found) / len(found) < 0.01 and max(found) < 0.03
    assert fitted.device.gemm_efficiency == pytest.approx(truth.device.gemm_efficiency, rel=0.05)
    assert fitted.device.layer_launch_us == pytest.approx(truth.device.layer_launch_us, rel=0.05)
    assert fitted.device.calibration == "fitted to 12 measured runs" and fitted.name == PRESET.name
    # Runs that it has not seen: other microbatches, another depth.
    others = [(1, 2, 4, 2, 4, "none", "2bw"), (4, 2, 1, 1, 8, "none", "megatron"), (1, 8, 1, 2, 16, "full", "2bw")]
    unseen = runs_on(truth, others, (LARGE,))
    assert max(errors(fitted, unseen)) < 0.05 < max(errors(PRESET, unseen))


def test_runs_of_the_preset_leave_it_as_it_is():
    fitted = calibrate(PRESET, runs_on(PRESET))
    assert replace(fitted, device=replace(fitted.device, calibration="")) == replace(
        PRESET, device=replace(PRESET.device, calibration="")
    )


def test_constants_that_runs_say_nothing_about_stay():
    truth = changed(
        PRESET, gemm_efficiency=0.7, inside_gb_s=0.5, between_gb_s=0.1, exchange_us=5, collective_launch_us=9
    )
    alone = [(1, 1, 1, *rest, "megatron") for rest in ((1, 4, "none"), (8, 2, "none"), (2, 1, "full"))]
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


def test_shares_keep_below_the_whole():
    runs = [replace(run, seconds=run.seconds / 3) for run in runs_on(PRESET, models=(LARGE,))]
    fitted = calibrate(PRESET, runs)
    assert fitted.device.gemm_efficiency <= SHARE_LIMIT and fitted.device.memory_efficiency <= SHARE_LIMIT
    assert sum(errors(fitted, runs)) < sum(errors(PRESET, runs))


def test_one_wrong_row_has_little_weight():
    truth = changed(PRESET, gemm_efficiency=0.8, inside_gb_s=0.85)
    runs = runs_on(truth)
    wrong = [replace(run, seconds=run.seconds * (0.5 if index == 4 else 1)) for index, run in enumerate(runs)]
    found = errors(calibrate(PRESET, wrong), runs)
    assert sum(found) / len(found) < 0.02 and max(found) < 0.06


def test_cross_validation_predicts_each_run_by_the_others():
    truth = changed(PRESET, gemm_efficiency=0.8)
    runs = runs_on(truth, SHAPES[:9])
    found = cross_validated(PRESET, runs, parts=3)
    assert len(found) == len(runs) and max(map(abs, found)) < 0.05
    alone = next(index for index, run in enumerate(runs) if run.plan.gpus == 16)
    runs[alone] = replace(runs[alone], seconds=2 * runs[alone].seconds)
    assert cross_validated(PRESET, runs, parts=3)[alone] == pytest.approx(
        -0.5, abs=0.06
    )  # it did not take part in its own fit
    assert errors(calibrate(PRESET, runs[alone : alone + 1]), runs[alone : alone + 1])[0] < 0.4


@pytest.mark.parametrize("count, parts", [(12, 5), (5, 5), (3, 3), (2, 2)])
def test_by_default_there_are_five_parts_or_one_for_each_run(monkeypatch, count, parts):
    fits: list[list[SimpleNamespace]] = []
    monkeypatch.setattr(calibrating, "calibrate", lambda cluster, others: fits.append([*others]))
    monkeypatch.setattr(calibrating, "predict", lambda cluster, own: [2.0] * len(own))
    runs = [SimpleNamespace(seconds=1.0 + index) for index in range(count)]
    assert cross_validated(PRESET, runs) == [2.0 / run.seconds - 1 for run in runs]
    assert len(fits) == parts
    assert sorted(run.seconds for fit in fits for run in runs if run not in fit) == [run.seconds for run in runs]


def test_memory_is_compared_where_it_was_measured():
    runs = runs_on(PRESET)[:3]
    cost = Cost(runs[1].model, PRESET, "bf16", False)
    runs[1] = replace(runs[1], memory=cost.memory.heaviest(runs[1].plan) / 2**30 / 1.1)
    assert memory_errors(PRESET, runs) == pytest.approx([0.1])


def test_predictions_are_the_costs_of_as_many_servers_as_a_run_has():
    runs = runs_on(PRESET)
    for run in runs:
        servers = -(-run.plan.gpus // 8)
        cost = Cost(run.model, clusters.preset("dgx-a100-80", servers), "bf16", False)
        assert run.seconds == cost.seconds(run.plan)
    assert predict(PRESET, [replace(runs[0], flash=True)]) != [runs[0].seconds]
    assert predict(PRESET, [replace(runs[0], precision="fp32")])[0] > runs[0].seconds


# --- the table of runs -----------------------------------------------------------------------------------------------

ROW = dict(
    layers=8,
    hidden=1024,
    heads=16,
    sequence=512,
    tensor=1,
    depth=2,
    width=2,
    microbatch=2,
    global_batch=32,
    seconds=0.5,
)
assert tuple(ROW) == COLUMNS


def table(path: Path, *rows: dict, leave_out: str = "") -> Path:
    names = [name for name in {name: None for row in rows for name in row} if name != leave_out]
    lines = [",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rows_are_read(tmp_path):
    path = table(
        tmp_path / "runs.csv",
        ROW,
        ROW
        | dict(
            vocab=1000,
            recompute="full",
            schedule="2bw",
            precision="fp16",
            flash=1,
            ffn=2048,
            groups=4,
            gated=1,
            sequence_parallel=1,
            distributed_optimizer=1,
            pipeline_inside=1,
            seconds=1.25,
            tensor=2,
        ),
    )
    first, second = read_runs(path)  # an empty cell is the default
    assert first == Run(
        Model("run", 8, 1024, 16, sequence=512), Plan(1, 2, 2, 2, 8, schedule="megatron"), 0.5, "bf16", False
    )
    assert second == Run(
        Model("run", 8, 1024, 16, vocab=1000, sequence=512, ffn=2048, groups=4, gated=True),
        Plan(2, 2, 2, 2, 8, "full", "2bw", distributed_optimizer=True, pipeline_inside=True, sequence_parallel=True),
        1.25,
        "fp16",
        True,
    )
    path.write_text("\ufeff" + path.read_text())  # as spreadsheets write it
    assert read_runs(path) == [first, second]


@pytest.mark.parametrize("name", COLUMNS)
def test_missing_columns(name, tmp_path):
    path = table(tmp_path / "runs.csv", ROW, leave_out=name)
    with pytest.raises(UserError) as error:
        read_runs(path)
    assert str(error.value).startswith(f"{path}: the column {name} is missing (known: ")


# The changed cells and the words that name what is wrong.
@pytest.mark.parametrize(
    "cells, words",
    [
        ({"depth": "two"}, "depth is 'two', not a number"),
        ({"seconds": "fast"}, "seconds is 'fast', not a number"),
        ({"seconds": ""}, "seconds is '', not a number"),
        ({"layers": "8.5"}, "layers is '8.5', not a number"),
        ({"flash": "yes"}, "flash is 'yes', not a number"),
        ({"seconds": 0}, "seconds must be positive"),
        ({"seconds": -1}, "seconds must be positive"),
        ({"global_batch": 31}, "a multiple of microbatch × width"),
        ({"layers": 0}, "layers must be positive"),
        ({"heads": 3}, "--num-attention-heads 3"),
        ({"groups": 3}, "--num-query-groups 3"),
        ({"seconds": "nan"}, "seconds"),
        ({"seconds": "inf"}, "seconds"),
        ({"global_batch": 0}, "global_batch"),
        ({"width": 0}, "width"),
        ({"width": -2}, "width"),
        ({"microbatch": 0}, "microbatch"),
        ({"tensor": 0}, "tensor"),
        ({"depth": 0}, "depth"),
        ({"virtual": 0}, "virtual"),
        ({"recompute": "half"}, "half"),
        ({"schedule": "1f1b"}, "1f1b"),
        ({"precision": "int8"}, "int8"),
        ({"kind": "rnn"}, "rnn"),
        ({"depth": 16}, "layers"),
        ({"depth": 3}, "layers"),
    ],
    ids=str,
)
def test_rows_that_cannot_be_used(cells, words, tmp_path):
    path = table(tmp_path / "runs.csv", ROW, ROW | cells)
    with pytest.raises(UserError) as error:
        read_runs(path)
    line = str(error.value)
    assert line.startswith(f"{path}, line 3: ") and words in line and "\n" not in line


@pytest.mark.parametrize(
    "text, words",
    [
        (b"", "no rows; expected a header with layers"),
        (",".join(COLUMNS).encode() + b"\n", "no rows"),
        (
            ",".join([*COLUMNS, "colour"]).encode() + b"\n" + b"1," * 10 + b"red\n",
            "unknown column colour (known: layers",
        ),
        (b"\xff\xfe\x00\x81", "not a readable"),
    ],
)
def test_files_that_cannot_be_used(text, words, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_bytes(text)
    with pytest.raises(UserError) as error:
        read_runs(path)
    assert str(error.value).startswith(f"{path}: ") and words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("place", [1, 2])
def test_a_row_with_a_cell_too_many(place, tmp_path):
    path = table(tmp_path / "runs.csv", ROW, ROW)
    lines = path.read_text().splitlines()
    lines[place] += ",7"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=rf"^{path}.*line {place + 1}: "):
        read_runs(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="runs.csv: No such file or directory$"):
        read_runs(tmp_path / "runs.csv")


def test_a_row_holds_any_plan(tmp_path):
    plan = Plan(
        1,
        4,
        2,
        2,
        8,
        "full",
        "2bw",
        gradient_slots=1,
        distributed_optimizer=True,
        first=2,
        last=4,
        extra_warmup=(1, 0, 2),
        extrapolate=True,
        recompute_layers=2,
    )
    cells = dict(depth=4, layers=10, recompute="full", schedule="2bw", gradient_slots=1, distributed_optimizer=1)
    cells |= dict(first=2, last=4, extra_warmup="1 0 2", extrapolate=1, recompute_layers=2, memory_gib=1.5, tied=0)
    run, *others = read_runs(
        table(
            tmp_path / "runs.csv",
            ROW | cells,
            ROW | dict(schedule="gpipe", gpipe_round=4),
            ROW | dict(overlap=0),
            ROW | dict(overlap=1),
        )
    )
    assert run.plan == plan and run.memory == 1.5 and not run.model.tied and run.model.bias
    assert [other.plan.gpipe_round for other in others] == [4, None, None]
    assert [other.plan.schedule for other in others] == ["gpipe", "pipedream-flush", "megatron"]
    for wrong, words in (
        ({"overlap": 2}, "overlap must be 0 or 1, not 2"),
        ({"extra_warmup": "1,x"}, "extra_warmup is '1,x', not a number"),
        ({"overlap": 0, "virtual": 2, "layers": 8}, "interleaved stages are planned with --overlap-grad-reduce only"),
    ):
        with pytest.raises(UserError, match=words):
            read_runs(table(tmp_path / "wrong.csv", {k: f'"{v}"' for k, v in (ROW | wrong).items()}))


# --- logs of runs ----------------------------------------------------------------------------------------------------

ARGUMENTS = dict(
    num_layers=10,
    hidden_size=1024,
    num_attention_heads=16,
    seq_length=512,
    vocab_size=1000,
    ffn_hidden_size=2816,
    kv_channels=64,
    group_query_attention=True,
    num_query_groups=4,
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    untie_embeddings_and_output_weights=True,
    add_bias_linear=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=4,
    data_parallel_size=2,
    micro_batch_size=2,
    global_batch_size=32,
    pipeline_schedule="2bw",
    two_bw_gradient_slots=1,
    two_bw_extra_warmup=(1, 0, 2),
    two_bw_correction="auto",
    decoder_first_pipeline_num_layers=2,
    decoder_last_pipeline_num_layers=4,
    use_distributed_optimizer=True,
    virtual_pipeline_model_parallel_size=None,
    recompute_granularity=None,
    context_parallel_size=1,
    bf16=True,
    transformer_impl="transformer_engine",
    attention_backend="AttnBackend.auto",
)


def log(path: Path, milliseconds=(9000, 700, 600, 500, 510, 900, 490), **changed) -> Path:
    lines = ["[default0]:------------------------ arguments ------------------------"]
    lines += [f"[default0]:  {name} {'.' * (40 - len(name))} {value}" for name, value in (ARGUMENTS | changed).items()]
    lines += ["-------------------- end of arguments ---------------------"]
    memory = "peak memory by stage (GiB): 1.50 2.25 1.00 1.75 |"
    lines += [
        f" [2026-01-01] iteration {n}/ 7 | elapsed time per iteration (ms): {ms:.1f} | {memory}"
        for n, ms in enumerate(milliseconds, 1)
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_log_of_a_run_is_a_run(tmp_path):
    run = read_log(log(tmp_path / "run.log"))
    options = dict(gated=True, rms_norm=True, rotary=True, tied=False, bias=False, dropout=False)
    assert run.model == Model("run", 10, 1024, 16, 1000, 512, ffn=2816, groups=4, **options)
    choices = dict(gradient_slots=1, distributed_optimizer=True, first=2, last=4, extra_warmup=(1, 0, 2))
    assert run.plan == Plan(1, 4, 2, 2, 8, extrapolate=True, **choices)
    assert (run.seconds, run.precision, run.flash, run.memory) == (0.505, "bf16", True, 2.25)
    wide = dict(pipeline_model_parallel_size=1, data_parallel_size=8, two_bw_extra_warmup="()")
    ends = dict(decoder_first_pipeline_num_layers=None, decoder_last_pipeline_num_layers=None)
    for overlap, schedule in ((True, "megatron"), (False, "pipedream-flush")):
        plain = dict(two_bw_gradient_slots=2, two_bw_correction="none", pipeline_schedule="megatron")
        text = log(tmp_path / "b.log", overlap_grad_reduce=overlap, **plain, **wide, **ends)
        assert read_log(text).plan.schedule == schedule
    scores = log(tmp_path / "c.log", attention_backend="AttnBackend.unfused", add_bias_linear=True)
    assert not read_log(scores).flash and read_log(scores).model.bias


def test_the_log_of_a_run_with_what_a_plan_has_on_request(tmp_path):
    """A layout, context parallelism, modules or some layers again, and the floats of the optimizer."""
    ends = dict(decoder_first_pipeline_num_layers=None, decoder_last_pipeline_num_layers=None)
    names = dict(pipeline_model_parallel_layout="Et*4|t*3|t*2|tL", context_parallel_size=2)
    run = read_log(log(tmp_path / "a.log", **ends, **names))
    assert run.plan.stages == (4, 3, 2, 1) and run.plan.context == 2 and run.plan.gpus == 16
    block = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=2)
    run = read_log(log(tmp_path / "b.log", **block, grad_reduce_in_bf16=True, exp_avg_dtype="torch.bfloat16"))
    assert (run.plan.recompute_block, run.plan.recompute_layers) == (2, 1)
    assert run.plan.numerics == ("--grad-reduce-in-bf16",)
    floats = dict(use_precision_aware_optimizer=True, exp_avg_dtype="torch.bfloat16", exp_avg_sq_dtype="torch.float32")
    plain = dict(two_bw_gradient_slots=2, two_bw_correction="none", two_bw_extra_warmup="()", fp8="hybrid")
    modules = dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])
    run = read_log(log(tmp_path / "c.log", pipeline_schedule="megatron", **plain, **modules, **floats))
    assert run.plan.numerics == ("--use-precision-aware-optimizer", "--exp-avg-dtype bf16") and run.precision == "fp8"
    assert run.plan.recompute_modules == ("core_attn", "mlp")


def test_the_arguments_of_a_log_are_in_the_file_that_it_names(tmp_path):
    path = log(tmp_path / "old" / "train.log")
    output = tmp_path / "old" / "output" / "rank-0.txt"
    output.parent.mkdir()
    output.write_text(path.read_text())
    run = read_log(path)
    lines = [line for line in path.read_text().splitlines() if "iteration" in line]
    path.write_text("\n".join([f"> output: {output} has all that this rank prints", *lines]) + "\n")
    assert read_log(path) == run
    (tmp_path / "old").rename(tmp_path / "new")
    path = tmp_path / "new" / "train.log"
    assert read_log(path) == run
    (tmp_path / "new" / "output" / "rank-0.txt").unlink()
    with pytest.raises(UserError, match="prints them with --verbose"):
        read_log(path)


def test_folders_of_logs_are_read_with_tables(tmp_path):
    for name in ("a/train.log", "b/job-1.out"):
        log(tmp_path / name)
    (tmp_path / "b" / "notes.txt").write_text("nothing of a run\n")
    csv_file = table(tmp_path / "runs.csv", ROW)
    assert len(read([tmp_path / "a", tmp_path / "b", csv_file, tmp_path / "a" / "train.log"])) == 4
    found = read([tmp_path])
    again = write_predictions(found, [1.0] * len(found), tmp_path / "predicted.csv")
    assert again is None and "predicted_seconds" in (tmp_path / "predicted.csv").read_text()


@pytest.mark.parametrize(
    "milliseconds, changed, words",
    [
        ((9000, 700, 600), {}, "fewer than 4 lines of iterations"),
        ((9000, 700, 600, 500), {"context_parallel_size": 3}, "--context-parallel-size 3 needs a --seq-length"),
        ((9000, 700, 600, 500), {"num_experts": 8}, "num_experts is 8"),
        ((9000, 700, 600, 500), {"num_layers": 3}, "layers"),
        ((9000, 700, 600, 500), {"pipeline_schedule": "zb"}, "schedule is 'zb'"),
    ],
)
def test_logs_that_cannot_be_used(milliseconds, changed, words, tmp_path):
    path = log(tmp_path / "run.log", milliseconds, **changed)
    with pytest.raises(UserError) as error:
        read([path])
    assert str(error.value).startswith(f"{path}: ") and words in str(error.value)


def test_a_folder_without_logs(tmp_path):
    (tmp_path / "run.log").write_text("no arguments\n")
    for path, words in ((tmp_path, "no log with Megatron's arguments"), (tmp_path / "run.log", "no arguments")):
        with pytest.raises(UserError, match=words):
            read([path])


def test_predictions_are_written_beside_the_runs(tmp_path):
    path = table(tmp_path / "runs.csv", ROW, ROW | {"microbatch": 4, "recompute": "full"})
    seconds = predict(PRESET, read_runs(path))
    write_predictions(read_runs(path), seconds, tmp_path / "new" / "predicted.csv")
    with open(tmp_path / "new" / "predicted.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    with open(path, newline="") as file:
        assert [{name: cell for name, cell in row.items() if name != "predicted_seconds"} for row in rows] == list(
            csv.DictReader(file)
        )
    assert [float(row["predicted_seconds"]) for row in rows] == pytest.approx(seconds, rel=1e-5)
    assert list(rows[0])[-1] == "predicted_seconds"
    with pytest.raises(UserError, match="^--predictions .*: Is a directory$"):
        write_predictions(read_runs(path), seconds, tmp_path)
