"""scripts/convergence.py: its command line, the commands of the runs, what it reads from logs, figures by hand."""

import fcntl
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

from megatron_2bw.convergence import options as convergence_options
from megatron_2bw.convergence import plot as convergence_plot
from megatron_2bw.convergence import report as convergence_report
from megatron_2bw.convergence import run as convergence
from megatron_2bw.convergence.options import Run, command, eval_interval, grid, parse, value
from megatron_2bw.convergence.report import STARTED, lag, markdown, outcome, parse_log, spread, summarize, too_large
from megatron_2bw.errors import UserError


def line(end: int, loss: str = " lm loss: 5.0E+00 |", milliseconds: float = 100.0, skipped: int = 0) -> str:
    times = f"elapsed time per iteration (ms): {milliseconds} |"
    skips = f"number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |"
    return f" [time] iteration {end:8d}/      20 | {times}{loss} loss scale: 1.0 | {skips}\n"


def validation(iteration: int, loss: str, where: str = "") -> str:
    return f" validation loss at iteration {iteration}{where} | lm loss value: {loss} | lm loss PPL: 1.0E+02 |\n"


LOG = (
    f"{STARTED} torchrun\n"
    + line(1, " lm loss: 8.4E+00 |", 900.0)
    + line(10, " lm loss: 8.000001E+00 |")
    + validation(12, "7.500000E+00")
    + line(20, " lm loss: 6.5E+00 |", 120.0)
    + validation(20, "6.250000E+00", " on validation set")
    + validation(20, "9.0E+00", " on test set")
)


def result(training=((10, 8.0), (20, 4.0)), final=5.0, diverged=False, seconds=0.1):
    """What result.json holds."""
    return {
        "training": [list(pair) for pair in training],
        "validation": [[12, 6.0], [20, final]],
        "seconds_per_iteration": seconds,
        "diverged": diverged,
    }


# --- logs -----------------------------------------------------------------------------------------------------------


def test_the_log_gives_all_digits_and_no_loss_twice():
    found = parse_log(LOG)
    assert found["training"] == [[10, 8.000001], [20, 6.5]]  # the line of iteration 1 is in the mean of the next
    assert found["validation"] == [[12, 7.5], [20, 6.25]]  # not the test set's
    assert found["seconds_per_iteration"] == pytest.approx(0.11)


def test_a_later_attempt_takes_the_place_of_what_it_repeats():
    first = LOG.replace("on validation set", "")
    again = f"half a li\n{STARTED} torchrun\n" + line(13, " lm loss: 1.0E+00 |") + line(20, " lm loss: 2.0E+00 |")
    found = parse_log(first + again + validation(20, "3.0E+00"))
    assert found["training"] == [[10, 8.000001], [20, 2.0]] and found["validation"] == [[12, 7.5], [20, 3.0]]
    assert parse_log(first + again.replace("13/", " 1/"))["training"] == [[20, 2.0]]


@pytest.mark.parametrize("loss", ["", " lm loss: 0.000000E+00 |"])  # before any step, and later
def test_a_loss_stays_where_all_steps_were_skipped(loss):
    log = f"{STARTED} torchrun\n" + line(1, loss, skipped=1) + line(10, loss, skipped=10)
    log += line(15, " lm loss: 8.0E+00 |", skipped=4) + line(18, loss, skipped=3) + line(20, " lm loss: 7.0E+00 |")
    assert parse_log(log)["training"] == [[15, 8.0], [18, 8.0], [20, 7.0]]
    assert outcome(log + validation(20, "7.5E+00"), 0, 20)["diverged"] is False
    again = log + f"\n{STARTED} torchrun\n" + line(14, loss, skipped=1) + line(15, loss, skipped=2) + line(20)
    assert parse_log(again)["training"] == [[20, 5.0]]  # the one of 15 was that of the attempt before


def test_a_run_in_which_all_steps_were_skipped_failed():
    log = f"{STARTED} torchrun\n" + line(1, "", skipped=1) + line(20, "", skipped=20) + validation(20, "7.5E+00")
    with pytest.raises(UserError, match="all steps were skipped"):
        outcome(log, 0, 20)


def test_a_run_that_ended_well():
    assert outcome(LOG, 0, 20) == parse_log(LOG) | {"diverged": False}


@pytest.mark.parametrize(
    "log, code, reason",
    [
        (
            f"{STARTED} torchrun\nx.py: error: --lr is missing\nChildFailedError: \n",
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


@pytest.mark.parametrize(
    "log, code, iteration",
    [
        (
            LOG + "RuntimeError: Rank 0, iteration 14: Unexpected result nan (message='found NaN in local grad norm')",
            1,
            14,
        ),
        (LOG.replace(" lm loss: 6.5E+00 |", ""), 0, 20),  # so Megatron logs a mean that is no number
        (LOG.replace("6.250000E+00", "NAN"), 0, 20),
    ],
)
def test_a_run_that_diverged_is_a_result(log, code, iteration):
    found = outcome(log, code, 20)
    assert found["diverged"] is True and found["iteration"] == iteration


# --- the lag --------------------------------------------------------------------------------------------------------


def curve(delay: float):
    """Training points of a loss that is `delay` iterations late."""
    return [[t, 2 + 6 * (1 + max(0, t - 5 - delay) / 50) ** -0.4] for t in range(10, 1001, 10)]


@pytest.mark.parametrize("delay", [5, 50, 200])
def test_a_curve_that_is_late_lags_by_that_and_the_other_way_round_leads(delay):
    assert lag(curve(delay), curve(0), 100) == pytest.approx(delay, rel=0.03)
    assert lag(curve(0), curve(delay), 100) == pytest.approx(-delay, rel=0.2)  # the fit has to follow a kink


def test_equal_curves_lag_by_nothing():
    noisy = [[t, loss + 0.3 * math.sin(t * t)] for t, loss in curve(0)]
    assert lag(noisy, noisy, 100) == 0


def test_the_noise_of_the_batches_is_not_taken_for_a_lag():
    random, lags = numpy.random.default_rng(1), []
    for _ in range(20):
        noise = random.normal(0, 0.1, 100)  # of the mean of ten batches
        late, vanilla = ([[t, loss + more] for (t, loss), more in zip(curve(delay), noise)] for delay in (40, 0))
        lags.append(lag(late, vanilla, 100))
    assert numpy.mean(lags) == pytest.approx(40, rel=0.15) and numpy.std(lags) < 20


def test_a_straight_line_by_hand():
    # From 10 down by 0.01 an iteration, and one that is 0.5 above: 50 iterations late.
    vanilla = [[t, 10 - 0.01 * (t - 5)] for t in range(10, 501, 10)]
    late = [[t, loss + 0.5] for t, loss in vanilla]
    assert lag(late, vanilla, 50) == pytest.approx(50, rel=0.02)
    assert lag(vanilla, late, 50) == pytest.approx(-50, rel=0.02)


def test_a_lag_is_bounded_by_the_curve_and_unknown_without_losses():
    far = [[t, 20.0] for t, _ in curve(0)]
    assert lag(far, curve(0), 100) == 900
    assert math.isnan(lag([[10, 5.0], [1000, math.nan]], curve(0), 100)) and math.isnan(lag([], curve(0), 100))


# --- figures --------------------------------------------------------------------------------------------------------


def test_spread_by_hand():
    figure = spread({1: 1.0, 2: 2.0, 3: 6.0})
    assert figure["mean"] == 3.0 and figure["sd"] == pytest.approx(math.sqrt(7))  # (4 + 1 + 9) / 2
    assert math.isnan(spread({1: 1.0})["sd"]) and math.isnan(spread({})["mean"])


def test_a_lag_that_is_a_bound_says_so_where_the_log_ends_early():
    """--log-interval 7 has no line of iteration 1000."""
    short = curve(0)[:-1]
    results = {("1", "vanilla", 1): result(short), ("1", "2bw", 1): result([[t, 20.0] for t, _ in short])}
    rows = [summarize(results, "1", variant, [1], 1000) for variant in ("vanilla", "2bw")]
    assert rows[1]["lag_iterations"]["of_means"] == rows[1]["lag_limit"] == 890
    assert "| ≥ 890 |" in markdown("t", [], rows, [])


def test_a_run_that_no_longer_steps_lags():
    """fp16 at the floor of its loss scale: what it has not trained is not left out."""
    logs = [f"{STARTED} torchrun\n" + line(1) for _ in range(2)]
    for end in range(10, 1501, 10):
        loss = f" lm loss: {20 - end / 100} |"
        logs[0] += line(end, loss)
        logs[1] += line(end, loss) if end <= 1000 else line(end, " lm loss: 0.000000E+00 |", skipped=10)
    vanilla, stuck = (outcome(log + validation(1500, "5.0E+00"), 0, 1500) for log in logs)
    row = summarize({("1", "vanilla", 1): vanilla, ("1", "2bw", 1): stuck}, "1", "2bw", [1], 1500)
    assert row["lag_iterations"]["of_means"] > 400


def test_gaps_are_of_runs_with_the_same_seed():
    results = {
        ("1e-3", "vanilla", 1): result(final=4.0),
        ("1e-3", "vanilla", 2): result(final=5.0),
        ("1e-3", "2bw", 1): result([(10, 8.0), (20, 4.4)], 4.1),
        ("1e-3", "2bw", 2): result(final=5.0, seconds=0.3),
        ("1e-3", "2bw", 3): result(final=9.0),  # vanilla is still to come
    }
    row = summarize(results, "1e-3", "2bw", [1, 2, 3, 4], 20)
    assert row["finished"] == [1, 2, 3] and row["validation_loss"]["mean"] == pytest.approx(18.1 / 3)
    assert row["gap_percent"]["by_seed"] == pytest.approx({1: 2.5, 2: 0.0})
    assert row["gap_percent"]["mean"] == pytest.approx(1.25)
    assert row["gap_percent"]["sd"] == pytest.approx(2.5 / math.sqrt(2))
    assert row["gap_percent"]["of_means"] == pytest.approx(100 * 0.1 / 9)
    assert row["training_gap_percent"]["by_seed"] == pytest.approx({1: 10.0, 2: 0.0})
    assert row["seconds_per_iteration"] == 0.1 and row["lag_iterations"]["by_seed"][2] == 0


def test_the_training_loss_is_the_mean_of_the_last_tenth():
    points = [(t, 100.0) for t in range(1, 91)] + [(t, float(t % 2)) for t in range(91, 101)]
    row = summarize({("1", "vanilla", 1): result(points)}, "1", "vanilla", [1], 100)
    assert row["training_loss"]["mean"] == pytest.approx(0.5)


def diverging(*who):
    """Rows of both variants of two seeds; those named have diverged."""
    results = {
        ("1", variant, seed): result(final=4.0, diverged=(variant, seed) in who)
        for variant in ("vanilla", "2bw")
        for seed in (1, 2)
    }
    return [summarize(results, "1", variant, [1, 2], 20) for variant in ("vanilla", "2bw")]


def test_a_variant_that_diverged_has_no_finite_gap():
    row = diverging(("2bw", 2))[1]
    assert row["diverged"] == [2] and row["gap_percent"]["mean"] == math.inf
    assert "| 2bw | diverged | diverged | – | diverged |" in markdown("t", [], [row], ["2bw: diverged"])


def test_a_vanilla_that_diverged_gives_no_gap():
    row = diverging(("vanilla", 2))[1]
    assert row["gap_percent"]["by_seed"] == {1: 0.0} and row["diverged"] == []


def test_the_table_by_hand():
    results = {("1e-3", "vanilla", 1): result(final=4.0), ("1e-3", "2bw", 1): result(final=4.1)}
    text = markdown("Title", ["a fact"], [summarize(results, "1e-3", v, [1], 20) for v in ("vanilla", "2bw")], [])
    assert "# Title\n\na fact\n\n## Learning rate 1e-3\n" in text and "wrong" not in text
    assert "| vanilla | 4.0000 |  |  | 4.0000 |  | 0.1 |" in text
    assert "| 2bw | 4.1000 | +2.50 | 0 | 4.0000 | +0.00 | 0.1 |" in text and "(curves.png)" in text


@pytest.mark.parametrize(
    "limit, of, seeds, count",
    [
        (2.5, ["2bw"], 1, 0),
        (2.4, ["2bw"], 1, 1),
        (1, ["own"], 1, 0),
        (1, ["2bw", "own"], 1, 1),
        (5, ["2bw"], 2, 1),
        (5, ["new"], 1, 1),  # nothing has run
    ],
)
def test_the_threshold(limit, of, seeds, count):
    results = {
        ("1e-3", "vanilla", 1): result(final=4.0),
        ("1e-3", "2bw", 1): result(final=4.1),
        ("1e-3", "own", 1): result(final=3.9),
    }
    rows = [summarize(results, "1e-3", variant, [1], 20) for variant in ("vanilla", "2bw", "own")]
    lines = too_large(rows, {"1e-3": limit}, of, seeds)
    assert len(lines) == count and all(one.startswith(f"{of[0]} at lr 1e-3: ") for one in lines)


@pytest.mark.parametrize("who, says", [(("2bw", 1), "diverged"), (("vanilla", 1), "1 of 2 seeds")])
def test_the_threshold_does_not_hold_for_what_diverged(who, says):
    assert [says in found for found in too_large(diverging(who), {"1": 1e9}, ["2bw"], 2)] == [True]


def test_the_picture_is_a_png(tmp_path):
    rates, seeds = ["1e-3", "1e-2"], [1, 2]
    runs = [
        {"lr": lr, "variant": variant, "seed": seed} | result(final=4.0, diverged=(lr, variant) == ("1e-2", "2bw"))
        for lr in rates
        for variant in ("vanilla", "2bw")
        for seed in seeds
        if (lr, variant, seed) != ("1e-3", "vanilla", 2)
    ]
    content = {"learning_rates": rates, "seeds": seeds, "iterations": 20, "runs": runs}
    content["variants"] = dict.fromkeys(["vanilla", "2bw", "later"], ())
    convergence_plot.draw(content, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# --- the command line -----------------------------------------------------------------------------------------------


def runs_of(*words: str, data=("--data-path", "corpus")) -> list[Run]:
    return grid(parse(words), data)


def test_all_runs_of_a_comparison_differ_in_the_variant_alone():
    runs = runs_of("name", "--seeds", "1,2", "--lr", "1e-3,1e-2", "--", "--save-interval", "5")
    assert [run.title for run in runs[:3]] == ["vanilla lr 1e-3 seed 1", "2bw lr 1e-3 seed 1", "vanilla lr 1e-2 seed 1"]
    assert len(runs) == 8 and len({run.folder for run in runs}) == 8
    vanilla, ours = (list(run.command) for run in runs[:2])
    differ = [(one, other) for one, other in zip(vanilla, ours, strict=True) if one != other]
    assert differ == [(str(runs[0].folder / "checkpoints"), str(runs[1].folder / "checkpoints"))] * 2 + [
        ("pipedream-flush", "2bw")
    ]


def test_the_users_flags_come_after_the_defaults_and_the_variants_after_them():
    (_, _, own) = runs_of(
        "name",
        "--variant",
        "mine=--two-bw-extra-warmup 1 --lr 1",
        "--stages",
        "2",
        "--",
        "--hidden-size",
        "64",
        "--train-iters",
        "30",
        "--seq-length",
        "64",
    )
    assert value(own.command, "--hidden-size") == "64" and value(own.command, "--lr") == "1"
    assert own.command.count("--hidden-size") == 2 and own.command[-2:] == ("--lr", "1")
    assert own.command[own.command.index("--nproc-per-node") + 1] == "2"
    assert value(own.command, "--pipeline-schedule") == "2bw" and value(own.command, "--micro-batch-size") == "2"
    assert value(own.command, "--max-position-embeddings") == "64"
    assert int(value(own.command, "--lr-warmup-iters")) < 30 and value(own.command, "--min-lr") == "3e-05"
    assert "--save" not in own.command


def test_without_defaults_there_are_only_the_users_flags():
    words = ["--variants", "vanilla", "--no-defaults", "--lr", "1e-3", "--", "--train-iters", "5"]
    (vanilla,) = runs_of("name", *words, data=())
    at = next(i for i, word in enumerate(vanilla.command) if word.endswith("pretrain_gpt_2bw.py"))
    assert vanilla.command[at + 1 :] == (
        "--pipeline-model-parallel-size",
        "1",
        "--device",
        "auto",
        "--seed",
        "1234",
        "--lr",
        "1e-3",
        "--train-iters",
        "5",
        "--pipeline-schedule",
        "pipedream-flush",
    )


def test_the_variants_flags():
    options = parse(
        [
            "name",
            "--vanilla",
            "megatron",
            "--variants",
            ",".join(convergence_options.VARIANTS),
            "--sync-iterations",
            "7",
            "--variant",
            "g=--pipeline-schedule gpipe",
        ]
    )
    sync = ["--two-bw-sync-iterations", "7"]
    correction = ["--two-bw-correction", "extrapolate"]
    ours = ["--pipeline-schedule", "2bw"]
    assert options.variants == {
        "vanilla": ["--pipeline-schedule", "megatron"],
        "2bw": ours,
        "2bw+auto": [*ours, "--two-bw-correction", "auto"],
        "2bw+sync": ours + sync,
        "2bw+extrapolate": ours + correction,
        "2bw+both": ours + sync + correction,
        "g": ["--pipeline-schedule", "gpipe"],
    }
    assert parse(["name", "--variants", "vanilla,2bw+both"]).variants["2bw+both"] == [
        *ours,
        "--two-bw-sync-iterations",
        "300",
        "--two-bw-correction",
        "extrapolate",
    ]


@pytest.mark.parametrize(
    "options, flags, ranks, micro, batch",
    [
        ([], [], 1, 4, 4),
        (["--stages", "2"], [], 2, 2, 4),
        (["--stages", "3"], [], 3, 1, 4),
        (["--width", "2"], [], 2, 2, 4),
        (["--stages", "2", "--width", "3"], [], 6, 1, 6),
        (["--width", "3"], [], 3, 1, 6),
        (["--stages", "2", "--width", "2"], ["--tensor-model-parallel-size", "2"], 8, 1, 4),
        ([], ["--context-parallel-size=2", "--tensor-model-parallel-size", "2"], 4, 4, 4),
    ],
)
def test_processes_and_batches(options, flags, ranks, micro, batch):
    words = runs_of("name", *options, "--", *flags)[1].command
    found = [value(words, flag) for flag in ("--nproc-per-node", "--micro-batch-size", "--global-batch-size")]
    assert found == [str(ranks), str(micro), str(batch)]


def test_data_that_are_split_already_get_no_split():
    flags = "--train-data-path a --valid-data-path b --test-data-path c".split()
    assert [value(run.command, "--split") for run in runs_of("name", "--", *flags)] == [None, None]
    assert [value(run.command, "--split") for run in runs_of("name")] == ["90,10,0"] * 2


def test_what_the_users_optimizer_does_not_take_is_no_default():
    words = ["--variant", "s=--optimizer sgd", "--variant", "m=--optimizer muon --muon-scalar-optimizer lion"]
    for typed, expected in (words, ["0.95", "0.95", None, None]), (["--", "--optimizer", "sgd"], [None, None]):
        assert [value(run.command, "--adam-beta2") for run in runs_of("name", *typed)] == expected


@pytest.mark.parametrize("iterations", [1, 2, 6, 40, 1500, 6000])
def test_about_ten_validations_and_none_of_them_twice(iterations):
    assert iterations % eval_interval(iterations) != 0
    assert iterations < 40 or 6 <= iterations // eval_interval(iterations) < 10


def test_the_users_data_or_tokenizer_takes_the_place_of_the_corpus(monkeypatch):
    corpus = SimpleNamespace(flags=lambda: ["built in"])
    monkeypatch.setattr(convergence_options, "build_corpus", lambda: corpus)
    assert convergence_options.built_in(parse(["name"])) == ["built in"]
    for flags in (
        "--data-path mine",
        "--data-path=mine",
        "--mock-data",
        "--tokenizer-type NullTokenizer",
        "--train-data-path mine",
        "--data-args-path list",
        "--per-split-data-args-path list",
    ):
        assert convergence_options.built_in(parse(["name", "--", *flags.split()])) == []
    assert convergence_options.built_in(parse(["name", "--no-defaults", "--", "--train-iters", "5"])) == []


@pytest.mark.parametrize(
    "words, named",
    [
        (["--lr", "fast"], "--lr: fast"),
        (["--lr", "1e-3,0.001"], "--lr 1e-3,0.001"),
        (["--lr", "nan"], "--lr: nan"),
        (["--lr", "0"], "--lr: 0"),
        (["--seeds", "1,"], "--seeds: an empty word"),
        (["--seeds", "-1"], "--seeds"),
        (["--seeds", "0"], "--seeds: 0 is not a whole number from 1 on"),  # Megatron's rule
        (["--width", "0"], "--width 0"),
        (["--stages", "0"], "--stages 0"),
        (["--jobs", "0"], "--jobs 0"),
        (["--variants", "2bw"], "--variants: vanilla"),
        (["--variants", "vanilla,3bw"], "--variants: 3bw"),
        (["--variant", "2bw=--x"], '--variant "2bw=--x"'),
        (["--variant", "no flags"], '--variant "no flags"'),
        (["--variant", 'a="'], "--variant"),
        (["--variant", "a=--train-iters 3"], "--train-iters"),
        (["--sync-iterations", "5"], "--sync-iterations"),
        (["--variants", "vanilla,2bw+sync", "--sync-iterations", "1501"], "--sync-iterations 1501"),
        (["--variants", "vanilla,2bw+both", "--sync-iterations", "1500"], "--sync-iterations 1500: with 2bw+both"),
        (["--variants", "vanilla,2bw+both", "--", "--train-iters", "1"], "--sync-iterations 1: with 2bw+both"),
        (["--", "--lr", "1", "--seed", "2"], "after the --: --lr (give --lr before the --), --seed (give --seeds"),
        (["--max-gap-of", "2bw"], "--max-gap-of"),
        (["--max-gap", "1", "--max-gap-of", "vanilla"], "--max-gap-of: vanilla"),
        (["--max-gap", "1", "--variants", "vanilla"], "--max-gap"),
        (["--max-gap", "nan"], "--max-gap nan"),
        (["--max-gap", "1,2"], "--max-gap 1,2: it must be a number of percent, or one for each --lr"),
        (["--max-gap", "1,2", "--lr", "1,2,3"], "--max-gap 1,2"),
        (["--fresh", "--report-only"], "--fresh"),
        (["--no-defaults"], "--train-iters is missing"),
        (["--speed"], "--speed"),
        (["--", "--seed=1"], "after the --: --seed (give --seeds before the --)"),
        (["--", "--pipeline-schedule", "gpipe"], "--variant"),
        (["--", "--save", "x"], "--save-interval"),
        (["--", "--train-iters", "0"], "--train-iters 0"),
        (["--", "--tensor-model-parallel-size", "two"], "--tensor-model-parallel-size two"),
        (["--", "--train-iters", "many"], "--train-iters many"),
        (["--", "--eval-iters", "0"], "--eval-iters 0"),
        (["--", "--lr-warmup-iters", "1500"], "--lr-warmup-iters 1500"),
        (["--lr", "1e-3,1e-5", "--", "--min-lr", "1e-4"], "--min-lr 1e-4"),
    ],
)
def test_a_wrong_option_is_one_line(words, named, capsys):
    with pytest.raises(SystemExit) as ended:
        convergence.main(["name", *words])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and named in error


# --- runs -----------------------------------------------------------------------------------------------------------

# Stands for torchrun: logs a run of 20 iterations whose loss is its seed, or fails.
FAKE = """
import sys, time
words = sys.argv[1:]
value = lambda flag: words[len(words) - 1 - words[::-1].index(flag) + 1]
if "--fail" in words:
    sys.exit("ValueError: as asked")
for end in (1, 10, 20):
    print(f" iteration {end:8d}/      20 | lm loss: {value('--seed')}.5E+00 |", flush=True)
print(f" validation loss at iteration 20 on validation set | lm loss value: {value('--seed')}.25E+00 |")
if "--slow" in words:
    time.sleep(2)
open(value("--count"), "a").write("run\\n")
"""


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """Runs main with a stand-in for training: (exit code, how many runs there have been)."""
    script, count = tmp_path / "fake.py", tmp_path / "count"
    script.write_text(FAKE)
    count.touch()
    real = command

    def fake(*arguments):
        words = list(real(*arguments))
        return (sys.executable, str(script), *words[words.index("--nproc-per-node") :])

    monkeypatch.setattr(convergence_options, "command", fake)
    monkeypatch.setattr(convergence, "draw", lambda *arguments: arguments[-1].write_bytes(b""))  # it takes a second
    monkeypatch.setattr(convergence, "POLL", 0.01)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # else torch is imported to count them

    def run(*options: str, flags: tuple[str, ...] = ()) -> tuple[int, int]:
        common = ["--mock-data", "--train-iters", "20", "--count", str(count), *flags]
        code = convergence.main(["name", "--out", str(tmp_path / "out"), *options, "--", *common])
        return code, count.read_text().count("run")

    run.out = tmp_path / "out"
    return run


def test_runs_side_by_side_and_only_those_that_are_missing(experiment, capsys):
    assert experiment("--jobs", "3", "--seeds", "1,2", "--max-gap", "0") == (0, 4)
    screen = capsys.readouterr().out
    assert "[2/4] 2bw lr 3e-4 seed 1: iteration 20/20, loss 1.500" in screen and "--max-gap 0 holds for 2bw" in screen
    assert "[4/4] 2bw lr 3e-4 seed 2: ended after 0:0" in screen and "validation loss 2.2500" in screen
    content = json.loads((experiment.out / "runs.json").read_text())
    assert [run["seed"] for run in content["runs"]] == [1, 1, 2, 2]
    assert content["summary"][0]["validation_loss"]["by_seed"] == {"1": 1.25, "2": 2.25}
    assert content["runs"][0]["training"] == [[10, 1.5], [20, 1.5]]
    assert sorted(path.name for path in experiment.out.iterdir()) == [
        ".lock",
        "curves.png",
        "report.md",
        "runs",
        "runs.json",
    ]
    assert experiment("--seeds", "1,2,3") == (0, 6)  # two are new
    assert experiment("--seeds", "1,2,3", "--report-only") == (0, 6)
    text = (experiment.out / "report.md").read_text()
    assert "--seeds 1,2,3 --" in text and "--report-only" not in text  # a command that goes on


def test_a_result_of_other_flags_is_not_taken(experiment, capsys):
    assert experiment() == (0, 2)
    assert experiment(flags=("--hidden-size", "64")) == (1, 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--fresh" in error and "vanilla-lr3e-4-seed1234 holds a run of other" in error
    assert experiment("--fresh", flags=("--hidden-size", "64")) == (0, 4)
    assert len(list((experiment.out / "runs.1").iterdir())) == 2  # nothing is lost
    assert "--fresh" not in (experiment.out / "report.md").read_text()
    assert experiment("--fresh", flags=("--fail",)) == (1, 4)
    assert not (experiment.out / "curves.png").exists()  # it would be that of other runs


def test_checkpoints_of_other_flags_are_not_gone_on_from(experiment, capsys):
    assert experiment(flags=("--save-interval", "5")) == (0, 2)
    folder = experiment.out / "runs" / "2bw-lr3e-4-seed1234"
    (folder / "result.json").unlink()
    assert experiment(flags=("--save-interval", "5")) == (0, 3)
    (folder / "result.json").unlink()
    (folder / "checkpoints").mkdir()
    assert experiment(
        "--seeds", "1234", "--sync-iterations", "3", "--variants", "vanilla,2bw+sync", flags=("--save-interval", "5")
    ) == (0, 4)
    stored = json.loads((folder / "command.json").read_text())
    (folder / "command.json").write_text(json.dumps({"command": [*stored["command"], "--bf16"]}))
    assert experiment(flags=("--save-interval", "5"))[0] == 1 and "other flags" in capsys.readouterr().err


@pytest.mark.parametrize(
    "harm",
    [
        {"training": [[10, "four"]]},
        {"training": []},
        {"training": [[10]]},
        {"validation": None},
        {"validation": [[20, 1e999]]},
        {"diverged": "no"},
        {"seconds_per_iteration": {}},
        {"command": []},
        {"command": None},
    ],
    ids=str,
)
def test_a_damaged_result_is_named(harm, experiment, capsys):
    assert experiment() == (0, 2)
    file = experiment.out / "runs" / "2bw-lr3e-4-seed1234" / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | harm))
    assert experiment() == (1, 2)
    assert capsys.readouterr().err == (
        f"convergence.py: error: {file}: not what a run leaves; --fresh sets all runs aside\n"
    )


def test_a_run_that_fails_leaves_the_others_alone(experiment, capsys):
    assert experiment("--variant", "bad=--fail", "--max-gap", "5") == (1, 2)
    captured = capsys.readouterr()
    assert "[3/3] bad lr 3e-4 seed 1234: failed, exit code 1: ValueError: as asked" in captured.out
    assert captured.err == (
        "convergence.py: bad at lr 3e-4: the gap is known for 0 of 1 seeds; runs are missing, or vanilla diverged\n"
    )
    assert "- bad lr 3e-4 seed 1234: exit code 1" in (experiment.out / "report.md").read_text()
    assert experiment("--variant", "bad=--fail", "--max-gap", "5", "--max-gap-of", "2bw") == (1, 2)  # it is tried again


def test_nothing_more_is_started_if_the_first_has_not_trained(experiment, capsys):
    """A flag that is wrong for all."""
    assert experiment("--seeds", "1,2", flags=("--fail",)) == (1, 0)
    screen = capsys.readouterr().out
    assert "no other run is started" in screen and "[2/4]" not in screen
    assert "curves.png" not in screen + (experiment.out / "report.md").read_text()
    assert experiment("--seeds", "1,2") == (0, 4)
    folder = experiment.out / "runs" / "vanilla-lr3e-4-seed1"
    assert "ValueError: as asked" in (folder / "train.1.log").read_text()  # it is not taken for one of this run
    assert "ValueError" not in (folder / "train.log").read_text()


def test_a_variant_that_cannot_start_beside_one_that_trains_stops_nothing(experiment):
    assert experiment(
        "--jobs", "2", "--seeds", "1,2", "--variants", "vanilla", "--variant", "bad=--fail", flags=("--slow",)
    ) == (1, 2)


def test_the_reports_flags_are_all_of_them(experiment):
    experiment()
    text = (experiment.out / "report.md").read_text()
    assert "- of this script: `--micro-batch-size 4" in text and "`, `--min-lr` a tenth of `--lr`\n" in text
    assert "1 stage × width 1" in text and "--mock-data" in text and "corpus" not in text
    experiment("--fresh", flags=("--min-lr", "0"))
    assert "a tenth of `--lr`" not in (experiment.out / "report.md").read_text()


def test_two_calls_do_not_meet_in_a_folder(experiment, capsys):
    experiment.out.mkdir()
    with open(experiment.out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert experiment() == (1, 0)
    assert "in use" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_one_line(experiment, tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert experiment() == (1, 0)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--out" in error


def test_the_clone_may_move():
    words = ["python3", "-m", "x", "--nproc-per-node", "1", "/a/pretrain_gpt_2bw.py", "--lr", "1"]
    moved = [word.replace("/a/", "/b/") for word in ["/venv/python", *words[1:]]]
    assert convergence.same(words, moved)
    assert not convergence.same(words, [*words, "--bf16"])
    assert not convergence.same(words, [word.replace("gpt", "bert") for word in words])
    saving = [[*words, "--save", folder, "--load", folder, "--bf16"] for folder in ("/a/x", "/b/x")]
    assert convergence.same(*saving) and not convergence.same(saving[0], saving[1][:-1])


@pytest.mark.parametrize(
    "slot, ranks, most, gpus, expected",
    [
        (0, 1, 1, "", None),
        (0, 1, 1, "a", None),
        (0, 1, 1, "abcd", "a"),
        (3, 1, 1, "abcd", "d"),
        (5, 1, 1, "abcd", "b"),
        (1, 2, 2, "abcd", "c,d"),
        (0, 4, 4, "abcd", None),
        (1, 1, 2, "abcd", "c"),
        (1, 2, 2, "abcde", "c,d"),
    ],
)
def test_runs_side_by_side_share_the_gpus_out(slot, ranks, most, gpus, expected):
    assert convergence.gpus_of(slot, ranks, most, list(gpus)) == expected


@pytest.mark.parametrize(
    "jobs, device, visible, expected",
    [(2, "auto", "3,5", ["3", "5"]), (1, "auto", "3,5", []), (2, "cpu", "3,5", []), (2, "cuda", "", [])],
)
def test_gpus_that_slurm_gives_are_dealt_out(jobs, device, visible, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert convergence.gpus_to_deal(SimpleNamespace(jobs=jobs, device=device)) == expected


@pytest.mark.parametrize("seconds, shown", [(5, "0:05"), (130.4, "2:10"), (3720, "1:02:00")])
def test_durations(seconds, shown):
    assert convergence.duration(seconds) == shown


def test_the_time_that_is_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(convergence.time, "monotonic", lambda: now[0])
    runs = [Run(variant, "1", seed, Path("x"), ()) for seed in (1, 2) for variant in ("vanilla", "2bw")]
    board = convergence.Board(runs, 50)
    board.take(runs[0], result([(25, 7.0)]))
    job = SimpleNamespace(run=runs[1], iteration=25, loss=7.1, first=5)  # went on from a checkpoint
    now[0] += 40
    # 20 iterations in 40 s; 25 of this run and 2 times 50 are left.
    assert board.line(job, []) == (
        "[2/4] 2bw lr 1 seed 1: iteration 25/50, loss 7.100 (vanilla 7.000), 0:40 elapsed, about 4:10 left"
    )


def test_bert_gets_the_corpus_as_sentences_once(tmp_path, monkeypatch):
    calls = []

    def prepare(words, **_):
        calls.append(words)
        Path(value(words, "--output-prefix") + ".idx").touch()
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(convergence_options.subprocess, "run", prepare)
    monkeypatch.setattr(convergence_options, "read_library", lambda size: ["one.\ntwo.", "three"])
    corpus = SimpleNamespace(prefix=tmp_path / "key" / "corpus", vocab_size=512)
    flags = convergence_options.sentences(corpus)
    assert value(flags, "--data-path") == str(tmp_path / "key-sentences" / "corpus")
    lines = (tmp_path / "key-sentences" / "text.jsonl").read_text().splitlines()
    assert [json.loads(text)["text"] for text in lines] == ["one.\ntwo.", "three"]
    assert convergence_options.sentences(corpus) == flags and len(calls) == 1
    assert value(calls[0], "--vocab-size") == "512" and calls[0][1:4] == ["-m", "megatron_2bw.cli", "preprocess"]
    (tmp_path / "key-sentences" / "corpus.idx").unlink()  # as if it had been ended in its middle
    monkeypatch.setattr(convergence_options, "read_library", lambda size: pytest.fail("the input has changed"))
    assert convergence_options.sentences(corpus) == flags and len(calls) == 2


def test_the_window_of_the_smoothed_curve_is_trailing():
    points = [[10, 4.0], [20, 2.0], [30, 1.0]]
    smooth = convergence_report.smooth(points, numpy.array([20.0, 30.0, 25.0]), 10)
    assert list(smooth) == pytest.approx([2.0, 1.0, 1.5])


def test_runs_json_names_no_folder_of_the_machine():
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "/some/clone/pretrain_gpt_2bw.py",
        "--data-path",
        f"{Path.home()}/.cache/corpus",
        "--lr",
        "1",
    ]
    assert convergence.portable(words) == [
        "python",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "pretrain_gpt_2bw.py",
        "--data-path",
        "~/.cache/corpus",
        "--lr",
        "1",
    ]
