"""Log lines, and what the stages add to them: written at once, or when their step is
made."""

import collections
import itertools
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

GIB = 2**30


class Timer:
    _started = False

    def elapsed(self, reset=True, barrier=False) -> float:
        return 1.5


class Writer:
    """TensorBoard's and wandb's: notes the values of each step."""

    def __init__(self):
        self.scalars = collections.defaultdict(dict)

    def add_scalar(self, name: str, value, step: int) -> None:
        self.log({name: value}, step)

    def log(self, values: dict, step: int) -> None:
        self.scalars[step] |= values


@pytest.fixture
def calculator(monkeypatch):
    """Sets Megatron's calculator of microbatches."""
    from megatron.core import num_microbatches_calculator as calculators

    def use(kind: str, *args, **kwargs):
        made = getattr(calculators, kind)(*args, **kwargs)
        name = "_GLOBAL_NUM_MICROBATCHES_CALCULATOR"
        monkeypatch.setattr(calculators, name, made)
        return made

    return use


@pytest.fixture
def world(cpu_layer, monkeypatch, calculator):
    """Megatron's globals, as far as a logbook reads them."""
    from megatron_2bw.mcore import log_lines

    calculator("ConstantNumMicroBatchesCalculator", 8, 1, 2, False, 1)
    world = SimpleNamespace(
        timer=Timer(),
        tensorboard=Writer(),
        wandb=Writer(),
        module=log_lines,
        lines=[],
        args=SimpleNamespace(
            log_interval=2,
            step_batch_size_schedule=None,
            seq_length=16,
            train_iters=10,
            world_size=2,
            consumed_train_samples=0,
            skipped_train_samples=0,
            params_dtype=torch.bfloat16,
            fp8=None,
        ),
    )

    def timers(name, log_level):
        return world.timer

    monkeypatch.setattr(log_lines, "get_args", Mock(return_value=world.args))
    monkeypatch.setattr(log_lines, "get_timers", Mock(return_value=timers))
    monkeypatch.setattr(
        log_lines, "get_tensorboard_writer", Mock(return_value=world.tensorboard)
    )
    monkeypatch.setattr(log_lines, "get_wandb_writer", Mock(return_value=world.wandb))
    return world


@pytest.fixture
def late(world):
    world.book = world.module.LogLines()
    return world


def outcome(batch: int, **changes):
    from megatron_2bw.mcore.late_step import StepResult
    from megatron_2bw.mcore.stage_times import StageStats

    values = dict(
        stepped=True,
        grad_norm=0.5 + batch,
        zeros=None,
        loss_scale=8.0,
        learning_rate=0.1 * batch,
        stages=(StageStats(1.0, 10.0, 2 * GIB), StageStats(3.0, 10.0, 4 * GIB)),
        exit_requested=False,
        save_complete=False,
    )
    return StepResult(batch, **values | changes)


def megatrons(world):
    """A `training_log` that reads the timer and prints a line where Megatron's does."""
    since = []  # the line before

    def training_log(iteration: int, is_first_iteration: bool, **values):
        text = "not printed"
        since.append(iteration)
        if iteration % 2 == 0 or is_first_iteration:
            elapsed = world.timer.elapsed(barrier=True, reset=not is_first_iteration)
            mean = 1000 * elapsed / len(since)
            begin = (
                f" iteration {iteration}/10 | elapsed time per iteration (ms): "
                f"{mean:.1f} |"
            )
            text = world.book.line(begin).removeprefix(begin)
            if not is_first_iteration:
                since.clear()
        values |= dict(iteration=iteration, samples=world.args.consumed_train_samples)
        world.lines.append((values, text))
        return False

    return training_log


def add(world, write, iteration: int, size: int = 8) -> bool:
    """The loop's call of `training_log` after an iteration of `size` samples."""
    world.args.consumed_train_samples += size
    values = dict(
        iteration=iteration,
        is_first_iteration=iteration == 1,
        loss_dict={"lm loss": iteration},
    )
    return world.book.add(write, values)


def write_first_line(late) -> str:
    add(late, megatrons(late), 1)
    late.book.completed(outcome(0))
    late.book.flush()
    return late.lines[0][1]


def test_a_line_waits_for_its_step_and_shows_its_values(late):
    book = late.book
    write = megatrons(late)
    assert add(late, write, 1) is True
    assert late.lines == []
    book.completed(outcome(0))
    assert add(late, write, 2) is False
    ((values, suffix),) = late.lines
    first = dict(iteration=1, grad_norm=0.5, skipped_iter=0, samples=8)
    assert first.items() <= values.items()
    # nine more iterations of 1.5 s
    progress = " tokens/s: 85 | tokens: 128 | ETA: 0:00:14 |"
    stages = " bubble: 20.0%/30.0% | peak memory by stage (GiB): 2.00 4.00 |"
    assert suffix == progress + stages
    book.completed(outcome(1, stepped=False, grad_norm=None, loss_scale=4.0))
    book.flush()
    second = dict(iteration=2, grad_norm=None, skipped_iter=1, samples=16)
    assert (second | dict(loss_scale=4.0)).items() <= late.lines[1][0].items()
    assert late.args.consumed_train_samples == 16
    assert book.line("other") == "other", "only Megatron's line gets the suffix"


def test_a_gpu_that_runs_out_of_memory_after_the_warm_up(late, monkeypatch, capsys):
    """The allocator's retries of each iteration, and the lines that report them: at the
    lines of Megatron's log."""
    asked = []

    def memory_stats() -> dict:
        asked.append(iteration)
        return {"num_alloc_retries": count}

    def write(**values) -> bool:
        return True

    monkeypatch.setattr(late.module.dist, "get_rank", Mock(return_value=3))
    monkeypatch.setattr(torch.cuda, "memory_stats", memory_stats)
    for iteration, count in enumerate([1, 3, 4, 4, 5, 5, 6, 7, 7, 7], start=1):
        add(late, write, iteration)
    text = capsys.readouterr().out
    start = "> rank 3, before the end of iteration"
    reason = "GPU memory ran out, allocator retries"
    assert text.count("\n") == 2
    assert f"{start} 6: {reason}: 1. " in text
    assert f"{start} 8: {reason}: 2. " in text
    assert asked == [1, 2, 3, 4, 6, 8, 10], "in the warm-up and at each line"


def test_the_stages_values_go_to_tensorboard_and_wandb(late):
    late.args.consumed_train_samples = 16
    write_first_line(late)
    expected = {
        "bubble/mean": 0.2,
        "bubble/max": 0.3,
        "bubble/stage 0": 0.1,
        "bubble/stage 1": 0.3,
        "peak memory (GiB)/stage 0": 2.0,
        "peak memory (GiB)/stage 1": 4.0,
        "ETA (hours)": 9 * 1.5 / 3600,
        "tokens per second": 8 * 16 / 1.5,
        "tokens": 24 * 16,
    }
    assert late.tensorboard.scalars[1] == pytest.approx(expected)
    assert late.wandb.scalars[1] == pytest.approx(expected)


def test_the_eta_is_the_mean_pace_since_the_first_line(prompt, monkeypatch):
    """Lines come at 50 s, then every 30 s of an iteration: evaluation and saving count,
    unlike in the timer's 1.5 s."""
    clock = itertools.chain([50], itertools.count(80, 60))
    monkeypatch.setattr(prompt.module.time, "perf_counter", clock.__next__)
    write = megatrons(prompt)
    for iteration in range(1, 11):
        add(prompt, write, iteration)
    shown = []
    for _, text in prompt.lines:
        if text != "not printed":
            shown.append(text.split("ETA: ")[1].split(" |")[0])
    assert shown == ["0:00:14", "0:04:00", "0:03:00", "0:02:00", "0:01:00", "0:00:00"]


def test_mfu_is_megatrons_operations_by_the_peak_of_all_gpus(late, monkeypatch):
    def count(args, batch) -> float:
        return batch * 1e14

    operations = "num_floating_point_operations"
    monkeypatch.setattr(late.module.training, operations, count)
    name = "NVIDIA A100-SXM4-40GB"
    monkeypatch.setattr(torch.cuda, "get_device_name", Mock(return_value=name))
    text = write_first_line(late)
    expected = 8 * 1e14 / (1.5 * 2 * 312e12)
    assert late.tensorboard.scalars[1]["MFU"] == pytest.approx(expected)
    assert f"ETA: 0:00:14 | MFU: {expected:.1%} |" in text
    late.args.params_dtype = torch.float32
    assert late.module.mfu(late.args, 8, 1.5) is None


@pytest.fixture
def prompt(world, monkeypatch):
    """The first of two stages; at each line the second one's rest is two seconds
    longer."""
    from megatron_2bw.mcore import stage_times

    world.gathered = []

    def gather(own, group):
        waited, elapsed, rest, _ = own
        world.gathered.append([waited, elapsed, rest])
        return [own, [0.0, elapsed, rest + 2.0, 2.0 * GIB]]

    def times():
        return stage_times.StageTimes(1.0, 6.0, 2.0)

    monkeypatch.setattr(stage_times, "new_group", Mock(return_value=None))
    monkeypatch.setattr(stage_times, "gather", gather)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", Mock(return_value=GIB))
    world.book = world.module.LogLines(stage_times.Meeting(times, [0, 1]))
    return world


def test_stages_that_meet_exchange_their_reports_at_lines_only(prompt):
    write = megatrons(prompt)
    for iteration in range(1, 5):
        assert add(prompt, write, iteration) is False, "written at once"
    since_the_last_line = [[1.0, 6.0, 2.0], [1.0, 6.0, 2.0], [2.0, 12.0, 4.0]]
    assert prompt.gathered == since_the_last_line
    # Stage 0 waited 2 of 16 seconds; stage 1, two seconds longer in the rest, 2 of 18.
    scalars = prompt.tensorboard.scalars[4]
    assert scalars["bubble/stage 0"] == pytest.approx(2 / 16)
    assert scalars["bubble/stage 1"] == pytest.approx(2 / 18)
    assert scalars["peak memory (GiB)/stage 1"] == 2.0
    assert prompt.lines[2][1] == "not printed"
    stages = " bubble: 11.8%/12.5% | peak memory by stage (GiB): 1.00 2.00 |"
    assert prompt.lines[3][1].endswith(stages)


def test_tokens_per_second_are_those_of_the_interval_that_the_line_shows(prompt):
    """Megatron's first line does not reset its timer, so the second one's time covers
    the first iteration too.

    The last batch is larger.
    """
    write = megatrons(prompt)
    seconds = itertools.count(1.0)
    prompt.book._read = seconds.__next__
    for iteration, size in ((1, 8), (2, 8), (3, 8), (4, 24)):
        add(prompt, write, iteration, size)
    expected = {1: 128 / 1, 2: 2 * 128 / (1 + 2), 4: (8 + 24) * 16 / (3 + 4)}
    for step, rate in expected.items():
        scalars = prompt.tensorboard.scalars[step]
        assert scalars["tokens per second"] == pytest.approx(rate)


def test_a_runs_iterations_and_samples_under_a_batch_schedule(cpu_layer, calculator):
    """Batches of 4 samples up to sample 8, then of 16: 8 samples in two iterations, 80 in
    seven."""
    from megatron_2bw.mcore.batch_sizes import planned, position

    kind = "StepBatchsizeNumMicroBatchesCalculator"
    sizes = calculator(kind, 2, 1, False, 1, "0:4 128:16", seq_length=16)
    args = SimpleNamespace(
        step_batch_size_schedule="0:4 128:16", train_iters=None, train_samples=80
    )
    assert planned(args) == (7, 88)
    args.train_iters = 7
    args.consumed_train_samples = 4
    args.curr_iteration = 1
    assert planned(args, 1, 4) == (7, 88)
    assert position(args) == (1, 2, 8)
    args.consumed_train_samples = 24
    args.curr_iteration = 3
    sizes.update(24, consistency_check=True)
    assert position(args) == (3, 7, 8)
    calculator(kind, 2, 1, False, 1, "0:4 48:8 64:16", seq_length=16)
    args.consumed_train_samples = 0
    args.curr_iteration = 0
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
