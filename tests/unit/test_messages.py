"""What a user reads: errors of Megatron and argparse in a line, with the name of the flag."""

from __future__ import annotations

import argparse
import json
import sys

import pytest
import torch

from megatron_2bw import cpu
from megatron_2bw.flags import checks, combinations, unsupported
from megatron_2bw.flags.parse import explain, name_flags, parse_early, processes, repeated
from tests.distributed.training import BERT, command
from tests.unit.command_lines import Stopped, complaint, parse, parser_of, stop

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("num_layers (5) must be divisible", "--num-layers (5) must be divisible"),
        ("args.fp16 and not args.bf16", "--fp16 and not --bf16"),
        ("self.num_layers and config.hidden_size", "--num-layers and --hidden-size"),
        ("expected seq-length to be a multiple", "expected --seq-length to be a multiple"),
        ("--num-layers is a flag, save and load are words", "--num-layers is a flag, save and load are words"),
        ("masked_softmax_fusion fails", "--no-masked-softmax-fusion fails"),
        ("fp8 needs fp8_format", "fp8 needs fp8_format"),
        ("unknown_name stays", "unknown_name stays"),
    ],
)
def test_name_flags(text, expected):
    assert name_flags(text, parser_of("2bw", "gpt")) == expected
    assert name_flags(text, None) == text


def caught(action) -> Exception:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_explain_names_the_flag_of_a_value_that_megatron_cannot_convert():
    error = caught(lambda: parse(command(2, 2, "2bw", "--cuda-graph-modules", "nonsense"), 2))
    assert explain(error, parser_of("2bw", "gpt")) == "argument --cuda-graph-modules: invalid value: 'nonsense'"


@pytest.mark.parametrize(
    "flags, start, end",
    [
        (["--fp16-lm-cross-entropy"], "lm cross entropy in fp16", "it must be that --fp16)"),
        (
            ["--weight-decay-incr-style", "linear"],
            "Megatron refuses",
            "it must be that --start-weight-decay is not None)",
        ),
        (["--distribute-saved-activations"], "can distribute", "it must be that --tensor-model-parallel-size > 1)"),
        (["--overlap-param-gather"], "--overlap-param-gather only supported with", "dist_muon"),
        (["--fp32-residual-connection"], "residual connection", "it must be that --fp16 or --bf16)"),
    ],
    ids=" ".join,
)
def test_explain_names_a_flag_in_megatrons_errors(flags, start, end):
    from megatron.training.arguments import validate_args

    args = parse(command(2, 2, "gpipe", *flags), 2)
    args.rank = 0
    message = explain(caught(lambda: validate_args(args)), parser_of("gpipe", "gpt"))
    assert message.startswith(start) and message.endswith(end)


@pytest.mark.parametrize(
    "error, typed, expected",
    [
        (lambda: json.loads("four"), ["--some-json", "four"], "--some-json four: Expecting value"),
        (lambda: open("no/such"), ["--some-file", "no/such"], "--some-file no/such: [Errno 2]"),
        (lambda: torch.empty(2**60), ["--vocab-size", "9" * 20], "the model does not fit into the memory: check --num"),
        (lambda: bytearray(2**62), [], "the model does not fit into the memory: check --num-layers"),
    ],
)
def test_explain_names_the_flag_by_the_value_that_the_error_holds(error, typed, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_2bw.py", "--bf16", *typed])
    assert explain(caught(error), parser_of("2bw", "gpt")).startswith(expected)


def test_explain_says_where_an_error_comes_from_that_names_no_flag():
    error = caught(lambda: sum(["no", "numbers"]))
    line_number = error.__traceback__.tb_next.tb_lineno
    assert explain(error, parser_of("2bw", "gpt")).endswith(f"(TypeError in test_messages.py:{line_number})")


@pytest.mark.parametrize(
    "flags, expected",
    [
        (
            ["--pipeline-schedle", "2bw"],
            "unrecognized arguments: --pipeline-schedle 2bw (did you mean --pipeline-schedule?)",
        ),
        (["--num-layer", "4"], "unrecognized arguments: --num-layer 4 (did you mean --num-layers?)"),
        (["--lr", "fast"], "argument --lr: invalid float value: 'fast'"),
        (["--num-layers"], "argument --num-layers: expected one argument"),
        (["--ckpt-format", "zip"], "argument --ckpt-format: invalid choice: 'zip'"),
    ],
    ids=" ".join,
)
def test_argparse_errors_are_one_line(flags, expected):
    with pytest.raises(Stopped) as stopped:
        parse([*command(2, 2), *flags], 2)
    assert str(stopped.value).startswith(expected) and "\n" not in str(stopped.value)


@pytest.mark.parametrize(
    "argv, line",
    [
        (["--lr", "1", "--lr", "2", "--on"], "--lr 1, then 2"),
        (["--lr=1", "--lr", "2", "--lr", "3"], "--lr 1, then 2, then 3"),
        (["--sizes", "1", "2", "--lr", "1", "--sizes", "1"], "--sizes 1 2, then 1"),
        (["--lr", "1", "--lr", "1", "--on", "--on"], None),
        (["--lr", "1", "--row", "a", "--row", "b", "-v", "-v"], None),
    ],
)
def test_a_flag_that_is_typed_twice(argv, line):
    """The last value counts, as in Megatron, so that a job script's defaults can be overridden; one line says so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    parser.add_argument("--on", action="store_true")
    parser.add_argument("--sizes", nargs="+")
    parser.add_argument("--row", action="append")
    parser.add_argument("-v", action="count")
    assert repeated(parser, argv) == (line and f"typed several times, the last one counts: {line}")


def test_help_can_be_printed():
    text = parser_of("2bw", "bert").format_help()
    assert "--pipeline-schedule" in text and "--bert-no-binary-head" in text


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--pipeline-schedule", "3bw"], "argument --pipeline-schedule: invalid choice: '3bw'"),
        (["--pipeline-schedule"], "argument --pipeline-schedule: expected one argument"),
        (["--two-bw-extra-warmup", "1,x"], "argument --two-bw-extra-warmup: 1,x: must be whole numbers of 0 or more"),
        (["--two-bw-extra-warmup", "1,-1"], "argument --two-bw-extra-warmup: 1,-1: must be whole numbers of 0 or more"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--device", "cuda"], "--device cuda: no GPU is visible to torch; use --device cpu"),
    ],
    ids=" ".join,
)
def test_flags_of_this_project_are_checked_before_megatron_is_imported(flags, expected):
    with pytest.raises(Stopped, match=expected.replace("?", r"\?")):  # the CPU answers for CUDA here
        parse_early(flags, stop)


def test_number_of_processes():
    assert processes({}, stop) == 1 and processes({"RANK": "3", "WORLD_SIZE": "4"}, stop) == 4
    for variables in ({"WORLD_SIZE": "two"}, {"RANK": "-1"}, {"LOCAL_RANK": ""}):
        with pytest.raises(Stopped, match="start the processes with torchrun"):
            processes(variables, stop)


def test_a_missing_package_is_named(monkeypatch):
    for module in (checks, combinations):
        monkeypatch.setattr(module, "installed", lambda package: False)
    for flags, package in (
        (["--tensorboard-dir", "folder"], "tensorboard"),
        (["--log-energy"], "pynvml"),
        (["--wandb-project", "p", "--wandb-save-dir", "folder"], "wandb"),
        (["--optimizer", "muon"], "emerging_optimizers"),
        (["--async-save", "--use-persistent-ckpt-worker"], "nvidia_resiliency_ext"),
        (["--tokenizer-type", "TikTokenizer", "--tokenizer-model", "m"], "tiktoken"),
    ):
        message = complaint(command(2, 2, "gpipe", *flags), 2)
        assert message.startswith(flags[0]) and package in message and "not installed" in message
    monkeypatch.setattr(cpu, "installed", lambda: False)
    message = complaint(command(2, 2, "2bw", "--transformer-impl", "transformer_engine"), 2)
    assert message.startswith("--transformer-impl transformer_engine") and "--transformer-impl local" in message
    assert all(flag in message for flag in ("persist-layer-norm", "gradient-acc", "masked-softmax", "rope-fusion"))


@pytest.mark.parametrize("modules, real", [((), False), (("apex",), False), (("apex", "amp_C"), True)])
def test_apex_is_nvidias(modules, real, tmp_path, monkeypatch):
    """The registry has another package of the name, which Megatron would take for it."""
    for module in modules:
        (tmp_path / f"{module}.py").write_text("raise ImportError('it is only looked for')")
    monkeypatch.syspath_prepend(tmp_path)
    assert unsupported.installed("apex") == real
    for argv, local in ((command(2, 2), "local"), ([BERT, *command(2, 2)], "local")):
        message = complaint(argv, 2)
        assert (message is not None) == (bool(modules) and not real)
        assert message is None or message.startswith(f"--transformer-impl {local}: Megatron takes the installed")


@pytest.mark.parametrize(
    "vocabulary, merges, expected",
    [
        ('{"a": 0, "b": 1, "ab": 2}', "#version: 0.2\na b\n", None),
        ('{"a": 0, "b": 1, "ab": 2}', "#version: 0.2\na b\nb b\n", "line 3, 'b b', makes no token of it"),
        ('{"a": 0, "b": 1, "ab": 2}', "a b\nthree words here\n", "line 2, 'three words here', makes no token of it"),
        ("not JSON", "a b\n", "it is no vocabulary"),
        ("[]", "a b\n", "it is no vocabulary"),
    ],
)
def test_a_vocabulary_and_merges_that_do_not_fit(vocabulary, merges, expected, tmp_path):
    names = tmp_path / "vocab.json", tmp_path / "merges.txt"
    for name, text in zip(names, (vocabulary, merges)):
        name.write_text(text)
    message = complaint(
        command(2, 2, tokenizer_type="GPT2BPETokenizer", vocab_size=None, vocab_file=names[0], merge_file=names[1]), 2
    )
    assert message is None if expected is None else expected in message


def test_a_checkpoint_that_is_cut_short_is_found_before_training(tmp_path):
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    expected = f"--load {tmp_path}: iter_0000004 was not written to its end, or not by Megatron"
    assert expected in complaint(command(2, 2, load=tmp_path), 2)
    assert expected in complaint(command(2, 2, load=tmp_path, save=tmp_path, save_interval=2), 2)
    assert f"--load {tmp_path}: there is no iter_0000002" in complaint(command(2, 2, load=tmp_path, ckpt_step=2), 2)
    message = complaint(
        command(2, 2, "2bw", "--use-distributed-optimizer", load=tmp_path, ckpt_format="torch", ckpt_step=2), 2
    )
    assert message.startswith("--ckpt-step does not work with --ckpt-format torch and --use-distributed-optimizer")
