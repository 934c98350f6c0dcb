"""What a user reads: an error of Megatron's, of argparse or of a rule is one line with its flag."""

from __future__ import annotations

import pytest

from megatron_2bw import cpu
from megatron_2bw.flags import checks
from megatron_2bw.flags.parse import explain, parse_early
from megatron_2bw.flags.rule import installed
from tests.distributed.training import command
from tests.unit.command_lines import Stopped, complaint, parse, parser_of, stop

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--fp16-lm-cross-entropy"], "lm cross entropy in fp16"),  # the assertion's text
        (["--weight-decay-incr-style", "linear"], "args.start_weight_decay is not None (AssertionError in arguments"),
        (["--overlap-param-gather"], "--overlap-param-gather only supported with"),
        (["--save", "folder"], "args.save_interval is not None"),
    ],
    ids=" ".join,
)
def test_megatrons_assertion_is_a_line(flags, expected):
    from megatron.training.arguments import validate_args

    args = parse(command(2, 2, "gpipe", *flags), 2)
    args.rank = 0
    with pytest.raises(AssertionError) as raised:
        validate_args(args)
    assert explain(raised.value).startswith(expected)


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--pipeline-schedle", "2bw"], "unrecognized arguments: --pipeline-schedle 2bw (did you mean --pipeline-s"),
        (["--lr", "fast"], "argument --lr: invalid float value: 'fast'"),
        (["--num-layers"], "argument --num-layers: expected one argument"),
    ],
    ids=" ".join,
)
def test_argparse_errors_are_one_line(flags, expected):
    with pytest.raises(Stopped) as stopped:
        parse([*command(2, 2), *flags], 2)
    assert str(stopped.value).startswith(expected) and "\n" not in str(stopped.value)


def test_help_can_be_printed():
    text = parser_of("2bw", "bert").format_help()
    assert "--pipeline-schedule" in text and "--bert-no-binary-head" in text


@pytest.mark.parametrize(
    "flags",
    [["--pipeline-schedule", "3bw"], ["--two-bw-extra-warmup", "1,x"], ["--device", "tpu"], ["--device", "cuda"]],
    ids=" ".join,
)
def test_flags_of_this_project_are_checked_before_megatron_is_imported(flags):
    with pytest.raises(Stopped, match=flags[0]):  # the CPU answers for CUDA here
        parse_early(flags, stop)


def test_a_gpu_host_without_transformer_engine_has_a_line_with_what_to_type(monkeypatch):
    monkeypatch.setattr(checks, "installed", lambda package: False)
    argv = command(2, 2, transformer_impl="transformer_engine")
    assert complaint(argv, 2) is None
    monkeypatch.setattr(cpu, "installed", lambda: False)
    message = complaint(argv, 2)
    assert message.startswith("--transformer-impl transformer_engine") and "--transformer-impl local" in message
    monkeypatch.setattr(checks, "installed", lambda package: True)
    assert complaint(argv, 2) is None


@pytest.mark.parametrize("modules, real", [((), False), (("apex",), False), (("apex", "amp_C"), True)])
def test_apex_is_nvidias(modules, real, tmp_path, monkeypatch):
    """The registry has another package of the name."""
    for module in modules:
        (tmp_path / f"{module}.py").write_text("raise ImportError('it is only looked for')")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed("apex") == real
