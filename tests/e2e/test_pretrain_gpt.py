"""The real entry script: own data, evaluation, a saved model that Megatron loads, early
exits, under torchrun."""

import re
import signal

import psutil
import pytest

from megatron_2bw.base import run_log
from megatron_2bw.base.argv import split_by
from megatron_2bw.mcore.checkpoints.folder import latest_iteration
from megatron_2bw.tools.data.corpus import build_corpus
from tests.distributed.training import command
from tests.e2e.launcher import end, forked, start


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    return build_corpus(folder, vocab_size=512, max_bytes=200_000).flags()


def on(data: list[str], flags: list[str]) -> list[str]:
    """The mock data of `command` is replaced by `data`."""
    _, kept = split_by(flags, ("--mock-data", "--tokenizer-type", "--vocab-size"))
    return kept + data


def losses(output: str) -> list[float]:
    return [line.loss for line in run_log.training(output)]


def validation(output: str) -> dict[str, str]:
    found = {}
    for line in run_log.validations(output):
        name = f"iteration {line.iteration}"
        if line.dataset:
            name += f" on {line.dataset}"
        found[name] = line.fields["lm loss value"]
    return found


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
    for line in run_log.training(trained):
        assert 0 <= line.milliseconds < 1000 * 86400, "of another clock"
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
    def evaluated(step: int) -> dict[str, str]:
        words = "--finetune --skip-train --no-load-optim --no-load-rng"
        load = dict(load=tmp_path / "model", ckpt_step=step)
        flags = command(2, 4, "megatron", words, **load, **options)
        return validation(forked(2, on(data, flags)))

    assert evaluated(3)["iteration 0 on validation set"] == seen["iteration 3"]
    assert evaluated(6)["iteration 0 on test set"] == seen["iteration 6 on test set"]


@pytest.mark.parametrize("split, shown", [("1,0,0", 0), ("3,1,0", 3)])
def test_an_empty_share_is_not_evaluated(data, split, shown):
    """The test set, which Megatron skips by itself, has no line."""
    options = dict(train_iters=4, eval_interval=2, eval_iters=1, split=split)
    output = forked(2, on(data, command(2, 2, "2bw", **options)))
    assert len(losses(output)) == 4 and len(validation(output)) == shown
    line = f"> --split {split}: no data for validation, so it is skipped"
    assert output.count(line) == (shown == 0)


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
    words = (
        f"--exit-signal-handler --exit-signal {number.name} --async-save "
        "--use-persistent-ckpt-worker --async-strategy mcore"
    )
    saves = dict(save=tmp_path / "model", save_interval=100_000)
    options = dict(train_iters=100_000, split="100,0,0", num_workers=2)
    flags = command(2, 2, "2bw", words, **options, **saves)
    process = start(2, "pretrain_gpt_2bw.py", flags)
    seen = ""
    try:
        for line in process.stdout:
            seen += line
            if re.search(r"iteration +5/", line):
                break
        target = process
        for child in psutil.Process(process.pid).children():
            is_first = child.environ().get("RANK") == "0"
            if is_first and number == signal.SIGTERM:
                target = child
        target.send_signal(number)
        # until all have ended; what was read ahead, too: communicate() would lose it
        seen += process.stdout.read()
    finally:
        run = end(process)
    output = seen + run.stdout
    expected = 0 if number == signal.SIGTERM else -number
    assert run.returncode == expected, output[-2000:] + run.stderr[-4000:]
    assert "exiting program after receiving SIGTERM" in output
    logged = [line.iteration for line in run_log.training(output)]
    saved = latest_iteration(tmp_path / "model")
    assert logged == list(range(1, saved + 1)) and saved >= 6
