"""The real entry script: own data, evaluation, a saved model that Megatron loads, early
exits, under torchrun."""

from __future__ import annotations

import re
import signal

import psutil
import pytest

from megatron_2bw.base import run_log
from megatron_2bw.tools.data.corpus import build_corpus
from tests.distributed.training import command
from tests.e2e.launcher import end, forked, start


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    corpus = build_corpus(
        tmp_path_factory.mktemp("corpus"), vocab_size=512, max_bytes=200_000
    )
    return corpus.flags()


def on(data: list[str], flags: list[str]) -> list[str]:
    """The mock data of `command` is replaced by `data`."""
    flags = [flag for flag in flags if flag != "--mock-data"]
    for name in ("--tokenizer-type", "--vocab-size"):
        position = flags.index(name)
        del flags[position : position + 2]
    return flags + data


def losses(output: str) -> list[float]:
    return [line.loss for line in run_log.training(output)]


def validation(output: str) -> dict[str, str]:
    names = (
        (line, f"iteration {line.iteration}") for line in run_log.validations(output)
    )
    return {
        name + (line.dataset and f" on {line.dataset}"): line.fields["lm loss value"]
        for line, name in names
    }


@pytest.mark.proof
def test_own_data_evaluation_and_a_checkpoint_that_megatron_loads(data, tmp_path):
    options = dict(
        train_iters=6,
        eval_interval=3,
        eval_iters=2,
        log_interval=2,
        split="80,10,10",
        adam_beta2=0.95,
    )
    saves = dict(save=tmp_path / "model", save_interval=3)
    trained = forked(2, on(data, command(2, 4, "2bw", **options, **saves)))
    assert len(losses(trained)) == 4  # iteration 1, then every second
    assert losses(trained)[-1] < losses(trained)[0]
    assert all(
        0 <= line.milliseconds < 1000 * 86400 for line in run_log.training(trained)
    ), "of another clock"
    seen = validation(trained)
    assert set(seen) == {
        "iteration 3",
        "iteration 6",
        "iteration 6 on validation set",
        "iteration 6 on test set",
    }

    # The same data is asked for, so a run that starts from its first sample evaluates
    # the same ones: those of the evaluation in the middle, with microbatches in flight,
    # and those of the test set. To the last digit.
    for step, found, expected in (
        (3, "iteration 0 on validation set", "iteration 3"),
        (6, "iteration 0 on test set", "iteration 6 on test set"),
    ):
        words = "--finetune --skip-train --no-load-optim --no-load-rng".split()
        flags = command(
            2, 4, "megatron", *words, load=tmp_path / "model", ckpt_step=step, **options
        )
        assert validation(forked(2, on(data, flags)))[found] == seen[expected]


@pytest.mark.parametrize("split, shown", [("1,0,0", 0), ("3,1,0", 3)])
def test_an_empty_share_is_not_evaluated(data, split, shown):
    """Nor of the test set, which has no line: Megatron skips it by itself."""
    options = dict(train_iters=4, eval_interval=2, eval_iters=1, split=split)
    output = forked(2, on(data, command(2, 2, "2bw", **options)))
    assert len(losses(output)) == 4 and len(validation(output)) == shown
    assert output.count(
        f"> --split {split}: no data for validation, so it is skipped"
    ) == (shown == 0)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1], ids=["to a rank", "kills torchrun"]
)
def test_a_signal_saves_and_ends_the_run_everywhere(number, tmp_path):
    """--exit-signal-handler, asked for in the background: all iterations are logged,
    the last one is saved.

    SIGUSR1 kills torchrun, and its store of addresses with it. With loader processes,
    as by default, which have inherited Megatron's handler, and with a process that
    writes the checkpoint: they must not outlive the run.
    """
    asynchronous = (
        "--async-save",
        "--use-persistent-ckpt-worker",
        "--async-strategy",
        "mcore",
    )
    saves = dict(save=tmp_path / "model", save_interval=100_000)
    options = dict(train_iters=100_000, split="100,0,0", num_workers=2)
    exits = ("--exit-signal-handler", "--exit-signal", number.name)
    process = start(
        2,
        "pretrain_gpt_2bw.py",
        command(2, 2, "2bw", *exits, *asynchronous, **options, **saves),
    )
    seen = ""
    try:
        for line in process.stdout:
            seen += line
            if re.search(r"iteration +5/", line):
                break
        ranks = [
            child
            for child in psutil.Process(process.pid).children()
            if "pretrain_gpt_2bw.py" in child.cmdline()
        ]
        (first,) = [child for child in ranks if child.environ()["RANK"] == "0"]
        (first if number == signal.SIGTERM else process).send_signal(number)
        # until all have ended; what was read ahead, too: communicate() would lose it
        seen += process.stdout.read()
    finally:
        run = end(process)
    output = seen + run.stdout
    assert run.returncode == (0 if number == signal.SIGTERM else -number), (
        output[-2000:] + run.stderr[-4000:]
    )
    assert "exiting program after receiving SIGTERM" in output
    logged = [line.iteration for line in run_log.training(output)]
    saved = int((tmp_path / "model" / "latest_checkpointed_iteration.txt").read_text())
    assert logged == list(range(1, saved + 1)) and saved >= 6
