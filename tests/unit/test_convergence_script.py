"""megatron-2bw convergence: its command line, the commands of the runs, what it reads
from logs, figures by hand."""

import json
import math
import sys

import pytest
from filelock import FileLock

from megatron_2bw.base.errors import UserError
from megatron_2bw.tools.convergence import options as convergence_options
from megatron_2bw.tools.convergence import run as convergence
from megatron_2bw.tools.convergence.options import Run, command, grid, parse
from megatron_2bw.tools.convergence.report import (
    STARTED,
    markdown,
    outcome,
    parse_log,
    summarize,
    too_large,
)


def line(
    end: int,
    loss: str = " lm loss: 5.0E+00 |",
    milliseconds: float = 100.0,
    skipped: int = 0,
) -> str:
    times = f"elapsed time per iteration (ms): {milliseconds} |"
    skips = (
        f"number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |"
    )
    return f" [time] iteration {end:8d}/      20 | {times}{loss} loss scale: 1.0 | {skips}\n"


def validation(iteration: int, loss: str, where: str = "") -> str:
    return (
        f" validation loss at iteration {iteration}{where} | lm loss value: {loss} | "
        "lm loss PPL: 1.0E+02 |\n"
    )


LOG = (
    f"{STARTED} torchrun\n"
    + line(1, " lm loss: 8.4E+00 |", 900.0)
    + line(10, " lm loss: 8.000001E+00 |")
    + validation(12, "7.500000E+00")
    + line(20, " lm loss: 6.5E+00 |", 120.0)
    + validation(20, "6.250000E+00", " on validation set")
    + validation(20, "9.0E+00", " on test set")
)


def result(training=((10, 8.0), (20, 4.0)), final=5.0, diverged=False):
    """What result.json holds."""
    points = [list(pair) for pair in training]
    return {
        "training": points,
        "validation": [[12, 6.0], [20, final]],
        "diverged": diverged,
    }


# --- logs
# --------------------------------------------------------------------------------------


def test_a_later_attempt_takes_the_place_of_what_it_repeats():
    first = LOG.replace("on validation set", "")
    again = (
        f"half a li\n{STARTED} torchrun\n"
        + line(13, " lm loss: 1.0E+00 |")
        + line(20, " lm loss: 2.0E+00 |")
    )
    found = parse_log(
        first
        + again
        + validation(20, "3.0E+00")
        + validation(20, "9.0E+00", " on test set")
    )
    # All digits, and the line of iteration 1 is in the mean of the next.
    assert found["training"] == [[10, 8.000001], [20, 2.0]] and found["validation"] == [
        [12, 7.5],
        [20, 3.0],
    ]
    assert parse_log(first + again.replace("13/", " 1/"))["training"] == [[20, 2.0]]


# before any step, and later
@pytest.mark.parametrize("loss", ["", " lm loss: 0.000000E+00 |"])
def test_a_loss_stays_where_all_steps_were_skipped(loss):
    log = (
        f"{STARTED} torchrun\n" + line(1, loss, skipped=1) + line(10, loss, skipped=10)
    )
    log += (
        line(15, " lm loss: 8.0E+00 |", skipped=4)
        + line(18, loss, skipped=3)
        + line(20, " lm loss: 7.0E+00 |")
    )
    assert parse_log(log)["training"] == [[15, 8.0], [18, 8.0], [20, 7.0]]
    assert outcome(log + validation(20, "7.5E+00"), 0, 20)["diverged"] is False
    again = (
        log
        + f"\n{STARTED} torchrun\n"
        + line(14, loss, skipped=1)
        + line(15, loss, skipped=2)
        + line(20)
    )
    # the one of 15 was that of the attempt before
    assert parse_log(again)["training"] == [[20, 5.0]]


@pytest.mark.parametrize(
    "log, code, reason",
    [
        (
            f"{STARTED} torchrun\nx.py: error: --lr\nChildFailedError: \n",
            1,
            "exit code 1: x.py: error: --lr",
        ),
        (LOG + f"\n{STARTED} torchrun\nValueError: new\n", 1, "ValueError: new"),
        (f"{STARTED} torchrun\n" + line(1), 0, "--log-interval"),
        (LOG.replace("iteration 20 on", "iteration 19 on"), 0, "--split"),
    ],
)
def test_a_run_that_failed_has_a_reason_of_one_line(log, code, reason):
    with pytest.raises(UserError) as error:
        outcome(log, code, 20)
    assert reason in str(error.value) and "\n" not in str(error.value)


NAN = (
    "RuntimeError: Rank 0, iteration 14: Unexpected result nan (message='found NaN "
    "in local grad norm')"
)


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


def test_gaps_are_of_runs_with_the_same_seed():
    results = {
        ("1e-3", "vanilla", 1): result(final=4.0),
        ("1e-3", "vanilla", 2): result(final=5.0),
        ("1e-3", "2bw", 1): result([(10, 8.0), (20, 4.4)], 4.1),
        ("1e-3", "2bw", 2): result(final=5.0),
        ("1e-3", "2bw", 3): result(final=9.0),  # vanilla is still to come
    }
    row = summarize(results, "1e-3", "2bw", [1, 2, 3, 4])
    assert row["finished"] == [1, 2, 3] and row["validation_loss"][
        "mean"
    ] == pytest.approx(18.1 / 3)
    assert row["gap_percent"]["by_seed"] == pytest.approx({1: 2.5, 2: 0.0})
    assert row["gap_percent"]["mean"] == pytest.approx(1.25)
    assert row["gap_percent"]["sd"] == pytest.approx(2.5 / math.sqrt(2))


def diverging(*who):
    """Rows of both variants of two seeds; those named have diverged."""
    results = {
        ("1", variant, seed): result(final=4.0, diverged=(variant, seed) in who)
        for variant in ("vanilla", "2bw")
        for seed in (1, 2)
    }
    return [summarize(results, "1", variant, [1, 2]) for variant in ("vanilla", "2bw")]


def test_the_table_by_hand():
    results = {
        ("1e-3", "vanilla", 1): result(final=4.0),
        ("1e-3", "2bw", 1): result(final=4.1),
    }
    text = markdown(
        ["a fact"], [summarize(results, "1e-3", v, [1]) for v in ("vanilla", "2bw")]
    )
    assert "a fact\n\n## Learning rate 1e-3\n" in text
    assert "| vanilla | 4.0000 |  |" in text
    assert "| 2bw | 4.1000 | +2.50 |" in text and "(curves.png)" in text
    row = diverging(("2bw", 2))[1]
    assert row["diverged"] == [2] and row["gap_percent"]["mean"] == math.inf
    assert "| 2bw | diverged | diverged |" in markdown([], [row])


@pytest.mark.parametrize(
    "limit, seeds, above",
    [(2.5, 1, []), (2.4, 1, ["2bw"]), (-3, 1, ["2bw", "own"]), (5, 2, ["2bw", "own"])],
)
def test_the_threshold(limit, seeds, above):
    """A gap that is not known for all seeds is too large, and so is that of a run that
    diverged."""
    final = {"vanilla": 4.0, "2bw": 4.1, "own": 3.9}
    results = {
        ("1e-3", variant, 1): result(final=loss) for variant, loss in final.items()
    }
    rows = [summarize(results, "1e-3", variant, [1]) for variant in final]
    assert [
        line.split(" at lr 1e-3: ")[0]
        for line in too_large(rows, {"1e-3": limit}, seeds)
    ] == above
    assert too_large(diverging(("2bw", 1)), {"1": 1e9}, 2) and too_large(
        diverging(("vanilla", 1)), {"1": 1e9}, 2
    )


# --- the command line
# --------------------------------------------------------------------------------------


def runs_of(*words: str, data=("--data-path", "corpus")) -> list[Run]:
    return grid(parse(words), data)


def value(command, flag: str) -> str | None:
    return dict(zip(command, command[1:])).get(flag)


def test_all_runs_of_a_comparison_differ_in_the_variant_alone():
    runs = runs_of(
        "name", "--seeds", "1,2", "--lr", "1e-3,1e-2", "--", "--save-interval", "5"
    )
    assert [run.title for run in runs[:3]] == [
        "vanilla lr 1e-3 seed 1",
        "2bw lr 1e-3 seed 1",
        "vanilla lr 1e-2 seed 1",
    ]
    assert len(runs) == 8 and len({run.folder for run in runs}) == 8
    vanilla, ours = (list(run.command) for run in runs[:2])
    differ = [
        (one, other) for one, other in zip(vanilla, ours, strict=True) if one != other
    ]
    assert differ == [
        (str(runs[0].folder / "checkpoints"), str(runs[1].folder / "checkpoints"))
    ] * 2 + [("pipedream-flush", "2bw")]


def test_the_users_flags_override_the_defaults_and_a_variant_overrides_both():
    mine = ("--variant", "mine=--two-bw-extra-warmup 1 --lr 1", "--ranks", "2")
    (_, _, own) = runs_of(
        "name",
        *mine,
        "--",
        "--hidden-size",
        "64",
        "--train-iters",
        "30",
        "--seq-length",
        "64",
    )
    expected = {
        "--hidden-size": "64",
        "--lr": "1",
        "--nproc-per-node": "2",
        "--pipeline-schedule": "2bw",
    }
    expected |= {"--max-position-embeddings": "64", "--min-lr": "3e-05", "--save": None}
    assert {flag: value(own.command, flag) for flag in expected} == expected


@pytest.mark.parametrize(
    "words, named",
    [
        (["--lr", "fast"], "--lr"),
        (["--variant", "2bw=--x"], "--variant"),
        (["--max-gap", "1,2"], "--max-gap 1,2"),
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
    script, count = tmp_path / "fake.py", tmp_path / "count"
    script.write_text(FAKE)
    count.touch()
    real = command

    def fake(*arguments):
        words = list(real(*arguments))
        return (sys.executable, str(script), *words[words.index("--nproc-per-node") :])

    monkeypatch.setattr(convergence_options, "command", fake)
    # it takes a second
    monkeypatch.setattr(
        convergence, "draw", lambda *arguments: arguments[-1].write_bytes(b"")
    )
    monkeypatch.setattr(convergence, "POLL", 0.01)
    # else torch is imported to count them
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(*options: str, flags: tuple[str, ...] = ()) -> tuple[int, int]:
        common = ["--mock-data", "--train-iters", "20", "--count", str(count), *flags]
        code = convergence.main(
            ["name", "--out", str(tmp_path / "out"), *options, "--", *common]
        )
        return code, count.read_text().count("run")

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
    assert (
        error.count("\n") == 1
        and "vanilla-lr3e-4-seed1234 holds a run of other flags" in error
    )


def test_a_run_that_fails_leaves_the_others_alone(experiment, capsys):
    assert experiment("--variant", "bad=--fail", "--max-gap", "5") == (1, 2)
    captured = capsys.readouterr()
    assert (
        "[3/3] bad lr 3e-4 seed 1234: failed, exit code 1: ValueError: as asked"
        in captured.out
    )
    assert captured.err == ""  # the others hold
    assert (
        "- bad lr 3e-4 seed 1234: failed, exit code 1"
        in (experiment.out / "report.md").read_text()
    )


def test_nothing_more_is_started_if_the_first_has_not_trained(experiment, capsys):
    """A flag that is wrong for all."""
    assert experiment("--seeds", "1,2", flags=("--fail",)) == (1, 0)
    screen = capsys.readouterr().out
    assert "no other run is started" in screen and "[2/4]" not in screen
    assert "curves.png" not in screen + (experiment.out / "report.md").read_text()
    assert experiment("--seeds", "1,2") == (0, 4)
    folder = experiment.out / "runs" / "vanilla-lr3e-4-seed1"
    # it is not taken for one of this run
    assert "ValueError: as asked" in (folder / "train.1.log").read_text()
    assert "ValueError" not in (folder / "train.log").read_text()
