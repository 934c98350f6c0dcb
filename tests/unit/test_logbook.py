"""Log lines, and what the stages add to them: written at once, or when their step is
made."""

from __future__ import annotations

import collections
import types

import pytest
import torch


@pytest.fixture
def world(cpu_layer, monkeypatch):
    """Megatron's globals, as far as a logbook reads them."""
    from megatron.core import num_microbatches_calculator as calculators

    from megatron_2bw.mcore import log_lines as logbook

    sizes = dict(
        log_interval=2,
        step_batch_size_schedule=None,
        seq_length=16,
        train_iters=10,
        world_size=2,
    )
    calculator = calculators.ConstantNumMicroBatchesCalculator(8, 1, 2, False, 1)
    monkeypatch.setattr(calculators, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", calculator)
    more = dict(
        consumed_train_samples=0,
        skipped_train_samples=0,
        params_dtype=torch.bfloat16,
        fp8=None,
    )
    args = types.SimpleNamespace(**sizes, **more)
    timer = types.SimpleNamespace(
        _started=False, elapsed=lambda reset=True, barrier=False: 1.5
    )
    monkeypatch.setattr(logbook, "get_args", lambda: args)
    monkeypatch.setattr(logbook, "get_timers", lambda: lambda name, log_level: timer)
    scalars = collections.defaultdict(dict)
    writer = types.SimpleNamespace(
        add_scalar=lambda name, value, step: scalars[step].update({name: value})
    )
    wandb = types.SimpleNamespace(
        log=lambda values, step: scalars["wandb", step].update(values)
    )
    monkeypatch.setattr(logbook, "get_tensorboard_writer", lambda: writer)
    monkeypatch.setattr(logbook, "get_wandb_writer", lambda: wandb)
    return types.SimpleNamespace(
        args=args, timer=timer, scalars=scalars, module=logbook
    )


@pytest.fixture
def late(world):
    world.book = world.module.LogLines()
    return world


def outcome(batch: int, **changes):
    from megatron_2bw.mcore.late_step import StepResult
    from megatron_2bw.mcore.stage_times import StageStats

    stages = tuple(
        StageStats(waited, 10.0, memory * 2**30)
        for waited, memory in ((1.0, 2), (3.0, 4))
    )
    values = dict(
        stepped=True,
        grad_norm=0.5 + batch,
        zeros=None,
        loss_scale=8.0,
        learning_rate=0.1 * batch,
    )
    return StepResult(
        batch,
        stages=stages,
        exit_requested=False,
        save_complete=False,
        **values | changes,
    )


def call(iteration: int) -> dict:
    return {
        "iteration": iteration,
        "is_first_iteration": iteration == 1,
        "loss_dict": {"lm loss": iteration},
    }


def add(world, write, iteration: int, size: int = 8) -> bool:
    """The loop's call of `training_log` after an iteration of `size` samples."""
    world.args.consumed_train_samples += size
    return world.book.add(write, call(iteration))


def megatrons(world, lines: list):
    """A `training_log` that reads the timer and prints a line where Megatron's does."""
    since: list[int] = []  # the line before

    def training_log(**values):
        text, first = "not printed", values["is_first_iteration"]
        since.append(values["iteration"])
        if values["iteration"] % 2 == 0 or first:
            mean = world.timer.elapsed(barrier=True, reset=not first) / len(since)
            begin = (
                f" iteration {since[-1]}/10 | elapsed time per iteration (ms): "
                f"{1000 * mean:.1f} |"
            )
            text = world.book.line(begin).removeprefix(begin)
            since[:] = since if first else []
        lines.append((values, world.args.consumed_train_samples, text))
        return False

    return training_log


def test_a_line_waits_for_its_step_and_shows_its_values(late):
    lines, book = [], late.book
    write = megatrons(late, lines)
    late.args.consumed_train_samples = 8
    assert book.add(write, call(1)) is True and lines == []
    book.completed(outcome(0))
    late.args.consumed_train_samples = 16
    assert book.add(write, call(2)) is False
    ((values, samples, suffix),) = lines
    assert (
        values["iteration"] == 1
        and values["grad_norm"] == 0.5
        and values["skipped_iter"] == 0
        and samples == 8
    )
    # nine more iterations of 1.5 s
    progress = " tokens/s: 85 | tokens: 128 | ETA: 0:00:14 |"
    assert (
        suffix
        == f"{progress} bubble: 20.0%/30.0% | peak memory by stage (GiB): 2.00 4.00 |"
    )
    book.completed(outcome(1, stepped=False, grad_norm=None, loss_scale=4.0))
    book.flush()
    values, samples, _ = lines[1]
    assert (values["iteration"], values["skipped_iter"], values["grad_norm"]) == (
        2,
        1,
        None,
    )
    assert (values["loss_scale"], samples) == (
        4.0,
        16,
    ) and late.args.consumed_train_samples == 16
    assert book.line("other") == "other", "only Megatron's line gets the suffix"


def test_a_gpu_that_runs_out_of_memory_after_the_warm_up(late, monkeypatch, capsys):
    """The allocator's retries of each iteration, and the lines that report them: at the
    lines of Megatron's log."""
    counts = {1: 1, 2: 3, 3: 4, 4: 4, 5: 5, 6: 5, 7: 6, 8: 7, 9: 7, 10: 7}
    asked = []
    monkeypatch.setattr(late.module.dist, "get_rank", lambda: 3)
    retries = iter(())
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats",
        lambda: asked.append(0) or {"num_alloc_retries": next(retries)},
    )
    for iteration, count in counts.items():
        retries = iter([count])
        late.book.add(lambda **values: True, call(iteration))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(". ")[0] for line in lines] == [
        "> rank 3, before the end of iteration 6: GPU memory ran out, allocator retries: 1",
        "> rank 3, before the end of iteration 8: GPU memory ran out, allocator retries: 2",
    ]
    assert len(asked) == 3 + 4, "asked in the warm-up and at each line"


def test_the_stages_values_go_to_tensorboard_and_wandb(late):
    late.args.consumed_train_samples = 24
    late.book.add(megatrons(late, []), call(1))
    late.book.completed(outcome(0))
    late.book.flush()
    expected = {
        "bubble/mean": 0.2,
        "bubble/max": 0.3,
        "bubble/stage 0": 0.1,
        "bubble/stage 1": 0.3,
    }
    expected |= {
        "peak memory (GiB)/stage 0": 2.0,
        "peak memory (GiB)/stage 1": 4.0,
        "ETA (hours)": 9 * 1.5 / 3600,
    }
    expected |= {"tokens per second": 8 * 16 / 1.5, "tokens": 24 * 16}
    assert late.scalars[1] == pytest.approx(expected) and late.scalars[
        "wandb", 1
    ] == pytest.approx(expected)


def test_the_eta_is_the_mean_pace_since_the_first_line(prompt, monkeypatch):
    """Lines come at 50 s, then every 30 s of an iteration: evaluation and saving count,
    unlike in the timer's 1.5 s."""
    clock = iter([50, *range(80, 1000, 60)])
    monkeypatch.setattr(prompt.module.time, "perf_counter", lambda: next(clock))
    lines = []
    for iteration in range(1, 11):
        add(prompt, megatrons(prompt, lines), iteration)
    shown = [
        text.split("ETA: ")[1].split(" |")[0]
        for *_, text in lines
        if text != "not printed"
    ]
    assert shown == ["0:00:14", "0:04:00", "0:03:00", "0:02:00", "0:01:00", "0:00:00"]


@pytest.mark.parametrize(
    "gpu, peak",
    [("NVIDIA A100-SXM4-40GB", 312e12), ("NVIDIA H100 PCIe", None), ("cpu", None)],
)
def test_mfu_is_megatrons_operations_by_the_peak_of_all_gpus(
    gpu, peak, late, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    monkeypatch.setattr(
        late.module.training,
        "num_floating_point_operations",
        lambda args, batch: batch * 1e14,
    )
    lines: list = []
    late.book.add(megatrons(late, lines), call(1))
    late.book.completed(outcome(0))
    late.book.flush()
    expected = None if peak is None else 8 * 1e14 / (1.5 * 2 * peak)
    assert late.scalars[1].get("MFU") == (
        None if peak is None else pytest.approx(expected)
    )
    assert (
        "ETA: 0:00:14 | bubble"
        if peak is None
        else f"ETA: 0:00:14 | MFU: {expected:.1%} |"
    ) in lines[0][2]
    late.args.params_dtype = torch.float32
    assert late.module.mfu(late.args, 8, 1.5) is None


@pytest.fixture
def prompt(world, monkeypatch):
    """The first of two stages; at each line the second one's rest is two seconds
    longer."""
    from megatron_2bw.mcore import stage_times

    gathered = []

    def gather(own, group):
        waited, elapsed, rest, _ = own
        gathered.append([waited, elapsed, rest])
        return [own, [0.0, elapsed, rest + 2.0, 2.0**31]]

    monkeypatch.setattr(stage_times, "new_group", lambda *options: None)
    monkeypatch.setattr(stage_times, "gather", gather)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    world.gathered = gathered
    meeting = stage_times.Meeting(lambda: stage_times.StageTimes(1.0, 6.0, 2.0), [0, 1])
    world.book = world.module.LogLines(meeting)
    return world


def test_stages_that_meet_exchange_their_reports_at_lines_only(prompt):
    lines = []
    write = megatrons(prompt, lines)
    for iteration in range(1, 5):
        assert add(prompt, write, iteration) is False, (
            "written at once; returns what Megatron's does"
        )
    assert prompt.gathered == [[1.0, 6.0, 2.0], [1.0, 6.0, 2.0], [2.0, 12.0, 4.0]], (
        "since the last line each"
    )
    # Stage 0 waited 2 of 16 seconds; stage 1, two seconds longer in the rest, 2 of 18.
    assert prompt.scalars[4]["bubble/stage 0"] == pytest.approx(2 / 16)
    assert prompt.scalars[4]["bubble/stage 1"] == pytest.approx(2 / 18)
    assert prompt.scalars[4]["peak memory (GiB)/stage 1"] == 2.0
    texts = [text for *_, text in lines]
    assert texts[2] == "not printed"
    assert texts[3].endswith(
        " bubble: 11.8%/12.5% | peak memory by stage (GiB): 1.00 2.00 |"
    )


def test_tokens_per_second_are_those_of_the_interval_that_the_line_shows(prompt):
    """Megatron's first line does not reset its timer, so the second one's time covers
    the first iteration too.

    The last batch is larger.
    """
    write = megatrons(prompt, [])
    for iteration, size in ((1, 8), (2, 8), (3, 8), (4, 24)):
        prompt.book._read = lambda seconds=iteration: float(seconds)
        add(prompt, write, iteration, size)
    tokens = {step: prompt.scalars[step]["tokens per second"] for step in (1, 2, 4)}
    assert tokens == pytest.approx(
        {1: 128 / 1, 2: 2 * 128 / (1 + 2), 4: (8 + 24) * 16 / (3 + 4)}
    )


def test_a_runs_iterations_and_samples_under_a_batch_schedule(cpu_layer, monkeypatch):
    """Of 4 samples up to sample 8, then of 16: 8 samples in two iterations, 80 in
    seven."""
    from megatron.core import num_microbatches_calculator as calculators

    from megatron_2bw.mcore.batch_sizes import planned, position

    calculator = calculators.StepBatchsizeNumMicroBatchesCalculator(
        2, 1, False, 1, "0:4 128:16", seq_length=16
    )
    monkeypatch.setattr(calculators, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", calculator)
    args = types.SimpleNamespace(
        step_batch_size_schedule="0:4 128:16", train_iters=None, train_samples=80
    )
    assert planned(args) == (7, 88)
    args.train_iters, args.consumed_train_samples, args.curr_iteration = 7, 4, 1
    assert planned(args, 1, 4) == (7, 88)
    assert position(args) == (1, 2, 8)
    args.consumed_train_samples, args.curr_iteration = 24, 3
    calculator.update(24, consistency_check=True)
    assert position(args) == (3, 7, 8)
    calculator = calculators.StepBatchsizeNumMicroBatchesCalculator(
        2, 1, False, 1, "0:4 48:8 64:16", seq_length=16
    )
    monkeypatch.setattr(calculators, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", calculator)
    args.consumed_train_samples, args.curr_iteration = 0, 0
    assert position(args) == (0, 1, 8), "no batch has 8 samples"


def test_whoever_finishes_early_has_waited_for_the_last(world):
    """Times of one batch of 1F1B with d = m = 2, forward 1, backward 2; update 0.5. The
    bubble is 1 / (m + d - 1)."""
    from megatron_2bw.mcore.stage_times import StageTimes, stage_stats

    # two forwards and two backwards, and waits for a backward
    first = StageTimes(waited=3.0, elapsed=9.0, tail=0.5)
    # waits for a forward, and 2 s for the other's backward
    second = StageTimes(waited=1.0, elapsed=7.0, tail=2.5)
    for report in stage_stats([(first, 1.0), (second, 2.0)]):
        assert (report.waited, report.elapsed) == (3.0, 9.5)
