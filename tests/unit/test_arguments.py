"""Own flags, data and checkpoints: a mistake is answered in one line with its flag;
what is right is accepted."""

import pytest

from megatron_2bw.base.errors import UserError
from megatron_2bw.mcore import cpu
from megatron_2bw.mcore.checkpoints.folder import TRACKER
from megatron_2bw.run.flags import checks, combinations, project_flags, unsupported
from megatron_2bw.run.flags.parse import parse_early
from tests.distributed.training import BERT, command
from tests.unit.command_lines import Stopped, complaint, dataset, parse, parser_of, stop

pytestmark = pytest.mark.usefixtures("on_the_cpu")

SIZES = "--step-batch-size-schedule"


@pytest.mark.parametrize(
    "line, flags, stages, microbatches, schedule",
    [
        (f"{SIZES}: Megatron", f"{SIZES} 0:8,64:4", 2, None, "2bw"),
        (f"{SIZES}: a batch of 7", f"{SIZES} 0:4,64:7", 2, None, "2bw"),
        ("argument --two-bw-sync", "--two-bw-sync-iterations 1.5%", 2, 2, "2bw"),
        ("--two-bw-correction", "--two-bw-correction none", 2, 2, "megatron"),
        ("--gpipe-round 4", "--gpipe-round 4", 2, 3, "gpipe"),
    ],
)
def test_a_mistake_is_answered_with_its_flag(
    line, flags, stages, microbatches, schedule
):
    changes = {} if microbatches else dict(global_batch_size=None)
    argv = command(stages, microbatches or 2, schedule, flags, **changes)
    message = complaint(argv, stages)
    assert message.startswith(line) and "\n" not in message


def test_the_rules_name_arguments_that_exist():
    args = parse(command(2, 2), 2)
    tables = (combinations._TABLES["mistakes"], unsupported._TABLES["when"])
    for table in tables:
        for settings in table.values():
            assert settings.keys() <= vars(args).keys()


RAMPED = dict(train_iters=None, train_samples=4000, lr_warmup_iters=None, seq_length=16)


def test_a_rampup_becomes_megatrons_batch_schedule():
    """The sizes are those of Megatron before 0.19: consumed samples over the samples of
    an increment, rounded down."""
    from megatron.core.num_microbatches_calculator import (
        StepBatchsizeNumMicroBatchesCalculator,
    )

    argv = command(2, 8, "2bw", "--rampup-batch-size", "4", "4", "1000", **RAMPED)
    args = parse(argv, 2)
    line = project_flags.use_rampup(args)
    calculator = StepBatchsizeNumMicroBatchesCalculator(
        2, 1, False, 1, args.step_batch_size_schedule, args.seq_length
    )
    for samples in range(2000):
        calculator.update(samples, consistency_check=True)
        expected = 16 if samples > 1000 else 4 + 4 * int(samples / (1000 / 3))
        assert calculator.get_current_global_batch_size() == expected, samples
    assert args.step_batch_size_schedule in line and args.eval_global_batch_size == 16
    args.rampup_batch_size, args.global_batch_size = [4, 4, 1000], 18
    with pytest.raises(UserError, match="--global-batch-size 18"):
        project_flags.use_rampup(args)


@pytest.mark.parametrize(
    "extra, level, exchange, fits",
    [
        (2, 2, "nccl", False),
        (1, 2, "nccl", True),
        (2, 1, "nccl", True),
        (2, 2, "gloo", True),
    ],
)
def test_timers_that_wait_for_the_gpu_allow_one_more_forward_ahead(
    extra, level, exchange, fits, monkeypatch
):
    monkeypatch.setattr(cpu, "installed", lambda: False)
    flags = (
        f"--two-bw-extra-warmup {extra} --timing-log-level {level} --pipeline-exchange "
        f"{exchange} --transformer-impl local"
    )
    message = complaint(command(2, 6, "2bw", flags), 2)
    assert message is None if fits else message.startswith("--two-bw-extra-warmup")
    message = complaint(command(2, 2, distributed_backend="gloo"), 2)
    assert message.startswith("--distributed-backend gloo")


# --- data, checkpoints, packages
# --------------------------------------------------------------------------------------


def with_data(*flags: object, bert: bool = False, **changes) -> list[str]:
    words = command(2, 2, script=BERT if bert else None, **changes)
    words.remove("--mock-data")
    return [*words, *map(str, flags)]


def test_data_must_be_given_and_there(tmp_path):
    def answer(*flags, **changes):
        return complaint(with_data(*flags, **changes), 2)

    assert answer().startswith("--data-path is missing")
    line = answer("--train-data-path", "no/such", split=None)
    assert line.startswith("--train-data-path no/such: ")
    assert answer("--data-path", "1.0", "msc://bucket/data") is None
    data = dataset(tmp_path / "one")
    file = tmp_path / "list"
    file.write_text(f"0.5 {data} 0.5 {data}")
    assert answer("--data-args-path", file) is None
    line = answer("--data-args-path", file, "--sft-data")
    assert line.startswith(f"--data-args-path {data}: ")


@pytest.mark.parametrize(
    "flags, line",
    [
        ("--data-path 0.5 A 0.5", "--data-path 0.5 A 0.5: give only prefixes"),
        ("--train-data-path A --split 98,1,1", "--split does not work with"),
        ("--per-split-data-args-path good", None),
        ("--per-split-data-args-path bad", "--per-split-data-args-path bad: it has no"),
    ],
)
def test_blends(flags, line, tmp_path, monkeypatch):
    """What Megatron finds only when it builds the datasets."""
    monkeypatch.chdir(tmp_path)
    for name in "AB":
        dataset(tmp_path / name)
    (tmp_path / "good").write_text(
        '{"train": "0.5 A 0.5 B", "valid": ["A"], "test": null}'
    )
    (tmp_path / "bad").write_text('{"train": "A", "validation": "B"}')
    split = "100,0,0" if "--data-path" in flags else None
    message = complaint(with_data(*flags.split(), split=split), 2)
    assert message is None if line is None else message.startswith(line)


SPLITS = {
    "98,1,1": True,
    "1,1,1": False,
    "2/1/0": False,
    "1,100,100": True,
    "100": False,
}


@pytest.mark.parametrize("split, empty", SPLITS.items())
@pytest.mark.parametrize("bert", [False, True])
def test_a_split_that_leaves_a_share_without_documents(split, empty, bert, tmp_path):
    """Megatron 0.19 would look for its first token for ever."""
    data = dataset(tmp_path / "data")  # three documents
    argv = with_data("--data-path", "0.5", data, bert=bert, split=split)
    message = complaint(argv, 2)
    assert message.startswith(f"--split {split}") if empty else message is None


def test_a_checkpoint_that_is_cut_short_is_found_before_training(tmp_path):
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / TRACKER).write_text("4")
    for changes in ({}, {"save": tmp_path, "save_interval": 2}, {"ckpt_step": 2}):
        message = complaint(command(2, 2, load=tmp_path, **changes), 2)
        assert message.startswith(f"--load {tmp_path}: ")


def test_a_gpu_host_without_transformer_engine_has_a_line_with_what_to_type(
    monkeypatch,
):
    monkeypatch.setattr(checks, "installed", lambda package: False)
    argv = command(2, 2, transformer_impl="transformer_engine")
    assert complaint(argv, 2) is None
    monkeypatch.setattr(cpu, "installed", lambda: False)
    message = complaint(argv, 2)
    assert message.startswith("--transformer-impl transformer_engine")
    assert "--transformer-impl local" in message
    monkeypatch.setattr(checks, "installed", lambda package: True)
    assert complaint(argv, 2) is None
    local = command(2, 2, transformer_impl="local", context_parallel_size=2)
    assert complaint(local, 4).startswith("--context-parallel-size 2 needs")


# --- argparse's
# --------------------------------------------------------------------------------------


def test_help_can_be_printed():
    text = parser_of("2bw", "bert").format_help()
    assert "--pipeline-schedule" in text and "--bert-no-binary-head" in text


@pytest.mark.parametrize(
    "flags", ["--pipeline-schedule 3bw", "--two-bw-extra-warmup 1,x", "--device cuda"]
)
def test_flags_of_this_project_are_checked_before_megatron_is_imported(flags):
    # the CPU answers for CUDA here
    with pytest.raises(Stopped, match=flags.split()[0]):
        parse_early(flags.split(), stop)
