"""megatron-2bw convergence: its command line, the commands of the runs, what it reads
from logs, figures by hand."""

import json
import math
import shlex
import sys

import pytest
from filelock import FileLock

from megatron_2bw.base.errors import UserError
from megatron_2bw.tools.convergence import options as convergence_options
from megatron_2bw.tools.convergence import run as convergence
from megatron_2bw.tools.convergence.options import Run, command, grid, parse_options
from megatron_2bw.tools.convergence.report import (
    STARTED,
    markdown,
    outcome,
    parse_log,
    summarize,
    too_large,
)


def line(end: int, loss: str = "5.0E+00", skipped: int = 0) -> str:
    """A line of Megatron's log; without a loss where Megatron prints none."""
    text = f" lm loss: {loss} |" if loss else ""
    return (
        f" [time] iteration {end:8d}/      20 | elapsed time per iteration (ms): 9.0 |{text} "
        f"number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |\n"
    )


def validation(iteration: int, loss: str, where: str = "") -> str:
    return (
        f" validation loss at iteration {iteration}{where} | lm loss value: {loss} | "
        "lm loss PPL: 1.0E+02 |\n"
    )


BEGIN = f"{STARTED} torchrun\n"
LOG = (
    BEGIN
    + line(1, "8.4E+00")
    + line(10, "8.000001E+00")
    + validation(12, "7.500000E+00")
    + line(20, "6.5E+00")
    + validation(20, "6.250000E+00", " on validation set")
    + validation(20, "9.0E+00", " on test set")
)


def result(final: float, diverged: bool = False) -> dict:
    """What result.json holds."""
    return {
        "training": [[10, 8.0], [20, 4.0]],
        "validation": [[12, 6.0], [20, final]],
        "diverged": diverged,
    }


# --- logs
# --------------------------------------------------------------------------------------


def test_a_later_attempt_takes_the_place_of_what_it_repeats():
    first = LOG.replace("on validation set", "")
    again = f"half a li\n{BEGIN}" + line(13, "1.0E+00") + line(20, "2.0E+00")
    losses = parse_log(
        first
        + again
        + validation(20, "3.0E+00")
        + validation(20, "9.0E+00", " on test set")
    )
    # All digits, and the line of iteration 1 is in the mean of the next.
    assert losses["training"] == [[10, 8.000001], [20, 2.0]]
    assert losses["validation"] == [[12, 7.5], [20, 3.0]]
    assert parse_log(first + again.replace("13/", " 1/"))["training"] == [[20, 2.0]]


# before any step, and later
@pytest.mark.parametrize("loss", ["", "0.000000E+00"])
def test_a_loss_stays_where_all_steps_were_skipped(loss):
    log = BEGIN + line(1, loss, skipped=1) + line(10, loss, skipped=10)
    log += line(15, "8.0E+00", skipped=4) + line(18, loss, skipped=3) + line(20)
    assert parse_log(log)["training"] == [[15, 8.0], [18, 8.0], [20, 5.0]]
    # the one of 15 was that of the attempt before
    log += BEGIN + line(14, loss, skipped=1) + line(15, loss, skipped=2) + line(20)
    assert parse_log(log)["training"] == [[20, 5.0]]


@pytest.mark.parametrize(
    "log, code, reason",
    [
        (BEGIN + "x.py: error: --lr\nFailed: \n", 1, "exit code 1: x.py: error: --lr"),
        (LOG + f"\n{BEGIN}ValueError: new\n", 1, "ValueError: new"),
        (BEGIN + line(1), 0, "--log-interval"),
        (LOG.replace("iteration 20 on", "iteration 19 on"), 0, "--split"),
    ],
)
def test_a_run_that_failed_has_a_reason_of_one_line(log, code, reason):
    with pytest.raises(UserError) as error:
        outcome(log, code, 20)
    assert reason in str(error.value) and "\n" not in str(error.value)


NAN = "RuntimeError: Rank 0, iteration 14: Unexpected result nan (message='')"


@pytest.mark.parametrize(
    "log, code",
    [
        (LOG + NAN, 1),
        # so Megatron logs a mean that is no number
        (LOG.replace(" lm loss: 6.5E+00 |", ""), 0),
        (LOG.replace("6.250000E+00", "NAN"), 0),
    ],
)
def test_a_run_that_diverged_is_a_result(log, code):
    assert outcome(log, code, 20)["diverged"] is True


# --- figures
# --------------------------------------------------------------------------------------


def rows_of(final: dict[str, list[float]]) -> list[dict]:
    """A row for each variant, from the final losses of its seeds, 1 and up; infinite
    ones are of runs that diverged."""
    results = {}
    for variant, losses in final.items():
        for seed, loss in enumerate(losses, 1):
            results["1e-3", variant, seed] = result(loss, loss == math.inf)
    return [summarize(results, "1e-3", each, [1, 2, 3, 4]) for each in final]


def test_gaps_are_of_runs_with_the_same_seed():
    # of seed 3 vanilla is still to come
    row = rows_of({"vanilla": [4.0, 5.0], "2bw": [4.1, 5.0, 9.0]})[1]
    assert row["finished"] == [1, 2, 3]
    assert row["validation_loss"]["mean"] == pytest.approx(18.1 / 3)
    gap = row["gap_percent"]
    assert gap["by_seed"] == pytest.approx({1: 2.5, 2: 0.0})
    assert gap["mean"] == pytest.approx(1.25)
    assert gap["sd"] == pytest.approx(2.5 / math.sqrt(2))


def test_the_table_by_hand():
    text = markdown(["a fact"], rows_of({"vanilla": [4.0], "2bw": [4.1]}))
    assert "a fact\n\n## Learning rate 1e-3\n" in text and "(curves.png)" in text
    assert "| vanilla | 4.0000 |  |\n| 2bw | 4.1000 | +2.50 |" in text
    row = rows_of({"vanilla": [4.0, 4.0], "2bw": [4.0, math.inf]})[1]
    assert row["diverged"] == [2] and row["gap_percent"]["mean"] == math.inf
    assert "| 2bw | diverged | diverged |" in markdown([], [row])


@pytest.mark.parametrize(
    "limit, seeds, above",
    [(2.5, 1, []), (2.4, 1, ["2bw"]), (-3, 1, ["2bw", "own"]), (5, 2, ["2bw", "own"])],
)
def test_the_threshold(limit, seeds, above):
    """A gap that is not known for all seeds is too large."""
    rows = rows_of({"vanilla": [4.0], "2bw": [4.1], "own": [3.9]})
    lines = too_large(rows, limit, seeds)
    assert [line.split(" at lr 1e-3: ")[0] for line in lines] == above


@pytest.mark.parametrize("vanilla, ours", [(4.0, math.inf), (math.inf, 4.0)])
def test_a_gap_of_a_run_that_diverged_is_too_large(vanilla, ours):
    assert too_large(rows_of({"vanilla": [vanilla], "2bw": [ours]}), 1e9, 1)


# --- the command line
# --------------------------------------------------------------------------------------


def runs_of(text: str) -> list[Run]:
    return grid(parse_options(shlex.split(text)), ["--data-path", "corpus"])


def test_all_runs_of_a_comparison_differ_in_the_variant_alone():
    runs = runs_of("name --seeds 1,2 --lr 1e-3,1e-2 -- --save-interval 5")
    vanilla, ours, third, *_ = runs
    assert vanilla.title == "vanilla lr 1e-3 seed 1"
    assert ours.title == "2bw lr 1e-3 seed 1"
    assert third.title == "vanilla lr 1e-2 seed 1"
    assert len({run.folder for run in runs}) == 8
    pairs = zip(vanilla.command, ours.command, strict=True)
    folders = (str(vanilla.checkpoints), str(ours.checkpoints))
    differ = [pair for pair in pairs if pair[0] != pair[1]]
    assert differ == [folders, folders, ("pipedream-flush", "2bw")]


def test_the_users_flags_override_the_defaults_and_a_variant_overrides_both():
    _, _, run = runs_of(
        "name --variant 'mine=--two-bw-extra-warmup 1 --lr 1' --ranks 2 -- --hidden-size 64 "
        "--train-iters 30 --seq-length 64"
    )
    last = dict(zip(run.command, run.command[1:]))  # of each flag the last value
    expected = {
        "--hidden-size": "64",
        "--lr": "1",
        "--nproc-per-node": "2",
        "--pipeline-schedule": "2bw",
        "--max-position-embeddings": "64",
        "--min-lr": "3e-05",
    }
    assert expected.items() <= last.items() and "--save" not in last


@pytest.mark.parametrize(
    "words, named",
    [
        (["--lr", "fast"], "--lr"),
        (["--variant", "2bw=--x"], "--variant"),
        (["--", "--seed=1"], "--seed"),
        (["--no-defaults"], "--train-iters"),
    ],
)
def test_a_wrong_option_is_one_line(words, named, capsys):
    with pytest.raises(SystemExit) as ended:
        convergence.main(["name", *words])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and named in error


# --- runs
# --------------------------------------------------------------------------------------

# Stands for torchrun: logs a run of 20 iterations whose loss is its seed, or fails.
FAKE = """
import sys
words = sys.argv[1:]
value = lambda flag: words[len(words) - 1 - words[::-1].index(flag) + 1]
if "--fail" in words:
    sys.exit("ValueError: as asked")
for end in (1, 10, 20):
    print(f" iteration {end:8d}/      20 | lm loss: {value('--seed')}.5E+00 |", flush=True)
print(f" validation loss at iteration 20 on validation set | lm loss value: {value('--seed')}.25E+00 |")
open(value("--count"), "a").write("run\\n")
"""


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """Runs main with a stand-in for training: (exit code, how many runs there have
    been)."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    count = tmp_path / "count"
    count.touch()

    def fake(*arguments):
        words = command(*arguments)
        return (sys.executable, str(script), *words[words.index("--nproc-per-node") :])

    def draw(content, path):
        """The real one takes a second."""
        path.touch()

    monkeypatch.setattr(convergence_options, "command", fake)
    monkeypatch.setattr(convergence, "draw", draw)
    monkeypatch.setattr(convergence, "POLL", 0.01)
    monkeypatch.setattr(convergence, "EVERY", 0)

    def run(*options: str, flags: tuple[str, ...] = ()) -> tuple[int, int]:
        common = ["--mock-data", "--train-iters", "20", "--count", str(count), *flags]
        words = ["name", "--out", str(run.out), *options, "--", *common]
        return convergence.main(words), count.read_text().count("run")

    run.out = tmp_path / "out"
    return run


def test_runs_side_by_side_and_only_those_that_are_missing(experiment, capsys):
    assert experiment("--jobs", "3", "--seeds", "1,2", "--max-gap", "0") == (0, 4)
    screen = capsys.readouterr().out
    assert "[2/4] 2bw lr 3e-4 seed 1: iteration 20/20, loss 1.500" in screen
    content = json.loads((experiment.out / "runs.json").read_text())
    assert [run["seed"] for run in content["runs"]] == [1, 1, 2, 2]
    assert content["summary"][0]["validation_loss"]["by_seed"] == {"1": 1.25, "2": 2.25}
    assert content["runs"][0]["training"] == [[10, 1.5], [20, 1.5]]
    assert experiment("--seeds", "1,2,3") == (0, 6)  # two are new
    # a command that goes on
    assert "--seeds 1,2,3 --" in (experiment.out / "report.md").read_text()


def test_a_result_of_other_flags_is_not_taken(experiment, capsys):
    experiment.out.mkdir()
    with FileLock(experiment.out / ".lock"):
        assert experiment() == (1, 0)
    assert "in use" in capsys.readouterr().err
    assert experiment() == (0, 2)
    assert experiment(flags=("--hidden-size", "64")) == (1, 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "vanilla-lr3e-4-seed1234 holds a run of other flags" in error


def test_a_run_that_fails_leaves_the_others_alone(experiment, capsys):
    assert experiment("--variant", "bad=--fail", "--max-gap", "5") == (1, 2)
    captured = capsys.readouterr()
    failed = "bad lr 3e-4 seed 1234: failed, exit code 1: ValueError: as asked"
    assert f"[3/3] {failed}" in captured.out
    assert captured.err == ""  # the others hold
    assert f"- {failed}" in (experiment.out / "report.md").read_text()


def test_a_run_that_starts_again_has_a_new_log(experiment):
    assert experiment(flags=("--fail",)) == (1, 0)
    assert not (experiment.out / "curves.png").exists()
    assert experiment() == (0, 2)
    folder = experiment.out / "runs" / "vanilla-lr3e-4-seed1234"
    assert "ValueError: as asked" in (folder / "train.1.log").read_text()
    assert "ValueError" not in (folder / "train.log").read_text()
