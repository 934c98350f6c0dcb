"""A run that is saved and resumed is the uninterrupted run: bit for bit at the same
sizes, to rounding at others."""

import os
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_2bw.base.local_ranks import WorldError, run_world
from megatron_2bw.mcore.checkpoints import owner
from megatron_2bw.mcore.checkpoints.folder import TRACKER
from tests.distributed.compare import (
    DROPOUT,
    assert_close_losses,
    assert_equal_weights,
    run_pipeline,
)
from tests.distributed.test_update_rule import SCALE, poison
from tests.distributed.training import BERT, Run, command, train

RECOMPUTE = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
ASYNCHRONOUS = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"
SHARDED = "--use-distributed-optimizer"
EVALUATED = "--eval-interval 1 --eval-iters 1"
SAVED = 3


def run_saving(folder, ranks: int, argv, prepare=None, program=train) -> list[Run]:
    """A run that saves after iteration SAVED and goes on; another will start there."""
    saves = f"--save {folder} --save-interval {SAVED}"
    runs = run_world(ranks, program, argv + saves.split(), prepare)
    (folder / TRACKER).write_text(str(SAVED))
    return runs


def run_loading(folder, ranks: int, argv, prepare=None, program=train) -> list[Run]:
    load = f"--load {folder}"
    return run_world(ranks, program, argv + load.split(), prepare)


def interrupted(folder, ranks: int, argv, prepare=None):
    """An uninterrupted run, and the rest of it by another."""
    whole = run_saving(folder, ranks, argv, prepare)
    return whole, run_loading(folder, ranks, argv)


def moved(folder, argv: list[str], to_host: bool, **device) -> tuple:
    """`interrupted` on four ranks, whose optimizer moves to the host, or from there.
    device: how the run that keeps it on the device is trained."""
    on_host = argv + ["--two-bw-memory", "host"]
    if to_host:
        whole = run_saving(folder, 4, argv, **device)
        return whole, run_loading(folder, 4, on_host)
    whole = run_saving(folder, 4, on_host)
    return whole, run_loading(folder, 4, argv, **device)


def assert_goes_on(whole: list[Run], rest: list[Run]) -> None:
    """Bit for bit, rank by rank."""
    for before, after in zip(whole, rest, strict=True):
        assert after.iterations == list(range(SAVED + 1, 7))
        assert after.scales == before.scales[SAVED:]
        assert after.skipped == before.skipped[SAVED:]
        done = SAVED * (len(before.losses) // 6)  # a BERT has two losses
        assert after.losses == before.losses[done:]
        assert_equal_weights(before, after)


# Stages, microbatches, width; flags.
CASES = {
    "one stage, fully reshardable": (
        (1, 2, 2),
        f"{SHARDED} --dist-ckpt-optim-fully-reshardable",
    ),
    "four stages, bf16, recompute": ((4, 4, 1), f"--bf16 {RECOMPUTE}"),
    "asynchronous, distributed optimizer": (
        (2, 2, 2),
        f"--bf16 {SHARDED} --overlap-grad-reduce {ASYNCHRONOUS}",
    ),
    "tensor parallel, sgd, further ahead": (
        (2, 4, 1),
        "--tensor-model-parallel-size 2 --optimizer sgd --sgd-momentum 0.9 --lr 0.1 "
        "--two-bw-extra-warmup 2",
    ),
    "torch format, distributed optimizer": (
        (2, 2, 2),
        f"--bf16 {SHARDED} --ckpt-format torch --two-bw-memory one-slot",
    ),
}


@pytest.mark.proof("asynchronous, distributed optimizer")
@pytest.mark.parametrize("name", CASES)
def test_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    check_resumed(tmp_path, *CASES[name])


def check_resumed(folder: Path, sizes: tuple[int, int, int], flags: str) -> None:
    stages, microbatches, width = sizes
    argv = command(stages, microbatches, "2bw", flags, width=width, **DROPOUT)
    ranks = stages * width
    if "--tensor-model-parallel-size" in argv:
        ranks *= 2
    assert_goes_on(*interrupted(folder, ranks, argv))


# The schedule, and flags that --use-checkpoint-args takes from the checkpoint.
MODELS = {
    "grouped queries, Megatron's schedule": (
        "megatron",
        "--swiglu --group-query-attention --disable-bias-linear "
        "--position-embedding-type rope --num-query-groups 2",
    ),
    "other norms and activation": (
        "2bw",
        "--norm-epsilon 0.125 --qk-layernorm --openai-gelu",
    ),
    "BERT": ("2bw", ""),
}
OF_THE_MODEL = dict.fromkeys(
    "num_layers hidden_size num_attention_heads seq_length max_position_embeddings "
    "hidden_dropout attention_dropout".split()
)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_of_the_checkpoint(name, tmp_path):
    """With --use-checkpoint-args the checkpoint gives the flags of the model."""
    schedule, flags = MODELS[name]
    script = BERT if name == "BERT" else None
    argv = command(2, 2, schedule, flags, script=script, **DROPOUT)
    whole = run_saving(tmp_path, 2, argv)
    flags = "--use-checkpoint-args"
    argv = command(2, 2, schedule, flags, script=script, **OF_THE_MODEL)
    assert_goes_on(whole, run_loading(tmp_path, 2, argv))


@pytest.mark.proof("4-poisoned0")
@pytest.mark.parametrize("stages, poisoned", [(4, (2,)), (2, (0, 1, 2))])
def test_dynamic_loss_scale(stages, poisoned, tmp_path):
    """The step before the save is skipped: the next batch has the scale of before, the
    one after it half of it. fp16 runs begin with skipped steps: the optimizer has no
    state yet."""
    argv = command(stages, stages, "2bw", "--fp16", **SCALE, **DROPOUT)
    prepare = partial(poison, stage=1, poisoned=poisoned)
    whole, rest = interrupted(tmp_path, stages, argv, prepare)
    skipped = [int(batch in poisoned) for batch in range(6)]
    assert whole[0].skipped == skipped
    assert_goes_on(whole, rest)


def drop_empty_groups(model, optimizer) -> None:
    """Megatron's fault, of which optimizer_state.number_groups takes care."""
    from megatron_2bw.mcore.checkpoints import state

    state.number_groups = lambda content: None


def test_what_no_run_could_load_is_not_saved(tmp_path):
    flags = f"--bf16 --swiglu --decoupled-lr 0.005 --save {tmp_path} --save-interval 1"
    argv = command(3, 3, "2bw", flags, num_layers=6)
    line = r"--save .*: no run could load this checkpoint \(rank 1: Dict key 2 out of"
    with pytest.raises(WorldError, match=line):
        run_pipeline(argv, 3, drop_empty_groups)
    assert not list(tmp_path.glob("iter_*"))
    assert not (tmp_path / TRACKER).exists()


FEEDBACK = "--two-bw-correction 1"


def layout(stages: str) -> dict:
    """Flags of stages with the layers that `stages` gives each."""
    return dict(stages=stages.count("|") + 1, pipeline_model_parallel_layout=stages)


# The flags of all runs; and where each other run starts, with its sizes.
SIZES = {
    "stages 2 4 1": ("", [(2, dict(stages=4)), (4, dict(stages=1))]),
    "pipelines 1 2": (SHARDED, [(2, dict(stages=2, width=2))]),
    "extrapolated, sharded": (
        f"{SHARDED} --dist-ckpt-optim-fully-reshardable {FEEDBACK}",
        [
            (2, dict(stages=2, tensor_model_parallel_size=2)),
            (4, dict(stages=1, width=2)),
        ],
    ),
    "extrapolated, layouts": (
        FEEDBACK,
        [(2, layout("Et*2|t|tL")), (4, layout("Et|t|t*2L"))],
    ),
}


@pytest.mark.proof("stages 2 4 1")
@pytest.mark.parametrize("flags, resumed", SIZES.values(), ids=SIZES)
def test_other_sizes(flags, resumed, tmp_path):
    """Sums are rounded in another order, nothing else."""

    def run(stages: int, load: str = "", width: int = 1, **sizes) -> Run:
        save = f"--save {tmp_path} --save-interval 2"
        words = (flags, save, load)
        argv = command(stages, 4 // width, "2bw", *words, width=width, **sizes)
        tensor = sizes.get("tensor_model_parallel_size", 1)
        return run_pipeline(argv, stages * width * tensor)[-1]

    whole = run(2).losses
    for start, sizes in resumed:  # the second from what the first has saved
        rest = run(load=f"--load {tmp_path} --ckpt-step {start}", **sizes)
        assert rest.iterations == list(range(start + 1, 7))
        assert_close_losses(rest.losses, whole[start:], 2e-6)


# --- flags that say what is loaded, and ways to leave
# --------------------------------------------------------------------------------------


@dataclass
class Saved:
    """An uninterrupted run, and where it was saved after iteration SAVED."""

    argv: list[str]
    run: list[Run]
    folder: Path


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    argv = command(2, 3, "2bw", **DROPOUT)
    return Saved(argv, run_saving(folder, 2, argv), folder)


def test_what_a_checkpoint_holds(saved):
    """Shadow weights of the model's global shapes, whatever the stages, and what 2BW
    goes on from."""
    from megatron.core import dist_checkpointing

    checkpoint = saved.folder / f"iter_{SAVED:07d}"
    content = dist_checkpointing.load_common_state_dict(checkpoint)["two_bw"]
    assert content["schedule"] == "2bw" and content["version"] == SAVED
    model = {}
    shadow = {}
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    for name, entry in entries.items():
        if not hasattr(entry, "size"):
            continue
        if name.startswith("two_bw.shadow."):
            shadow[name.removeprefix("two_bw.shadow.")] = entry.size
        elif not name.startswith(("two_bw", "optimizer")):
            model[name] = entry.size
    assert shadow == model
    all_layers = (4, 128, 32)  # of both stages
    assert shadow["decoder.layers.mlp.linear_fc1.weight"] == all_layers


def resume(saved: Saved, *flags: str, schedule: str = "2bw") -> Run:
    words = f"--ckpt-step {SAVED} --pipeline-schedule {schedule}"
    if schedule != "2bw":
        words += " --two-bw-late 25% --two-bw-correction auto"  # the defaults
    return run_loading(saved.folder, 2, [*saved.argv, *words.split(), *flags])[-1]


def without_our_checkpoints(rank: int, argv: list[str], prepare=None) -> Run:
    """Megatron's own functions read the checkpoint."""
    from megatron_2bw.mcore import patches

    patches.for_checkpoints = patches.for_reading = lambda runtime=None: []
    return train(rank, argv)


@pytest.mark.proof
def test_plain_megatron_reads_it_and_2bw_starts_from_a_plain_one(saved, tmp_path):
    step = f"--ckpt-step {SAVED}"
    argv = command(2, 3, "megatron", step)
    save = f"--save {tmp_path} --save-interval {SAVED}".split()
    program = without_our_checkpoints
    plain = run_loading(saved.folder, 2, argv + save, program=program)[-1]
    ours = run_loading(saved.folder, 2, argv)[-1]
    assert plain.iterations == ours.iterations == [4, 5, 6]
    assert plain.losses == ours.losses
    # From the plain checkpoint of iteration 6 both go on with the same weights: as many
    # iterations again.
    runs = []
    for schedule in ("2bw", "megatron"):
        flag = "--override-opt-param-scheduler"
        argv = command(2, 3, schedule, flag, train_iters=8)
        runs.append(run_loading(tmp_path, 2, argv)[-1])
        assert runs[-1].iterations == [7, 8]
    assert runs[0].losses[0] == runs[1].losses[0]
    assert runs[0].losses[1] != runs[1].losses[1]


def test_without_the_optimizer_state_both_weight_versions_are_loaded(saved):
    losses = resume(saved, "--no-load-optim").losses
    whole = saved.run[-1].losses[SAVED:]
    assert losses[:2] == whole[:2], "batches 3 and 4 run on the saved W(2) and W(3)"
    assert losses[2] != whole[2], "batch 5 runs on what the fresh optimizer has made"


def test_fine_tuning_starts_from_the_newest_weights(saved):
    ours = resume(saved, "--finetune")
    megatrons = resume(saved, "--finetune", schedule="megatron")
    assert ours.iterations == megatrons.iterations == [1, 2, 3, 4, 5, 6]
    assert ours.losses[0] == megatrons.losses[0], "their first batch runs on them"
    words = f"--pretrained-checkpoint {saved.folder} --ckpt-step {SAVED}"
    runs = run_pipeline(saved.argv + words.split(), 2)
    assert runs[-1].losses == ours.losses, "without --load"


def no_time_left(model, optimizer) -> None:
    from megatron.training import training

    training._TRAIN_START_TIME -= 600


def terminated(model, optimizer) -> None:
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.proof("--exit-signal-handler-terminated")
@pytest.mark.parametrize(
    "flags, prepare",
    [
        ("--exit-signal-handler", terminated),
        ("--exit-duration-in-mins 5", no_time_left),
    ],
)
def test_a_run_that_leaves_early_goes_on(flags, prepare, saved, tmp_path):
    argv = saved.argv + f"--save {tmp_path} --save-interval 1000".split()
    whole = saved.run[-1].losses
    first = run_loading(tmp_path, 2, argv + flags.split(), prepare)[-1]
    last = first.iterations[-1]
    assert 1 <= last < 6
    assert first.losses == whole[:last]
    second = run_loading(tmp_path, 2, argv)
    assert second[-1].losses == whole[last:]
    for before, after in zip(saved.run, second):
        assert_equal_weights(before, after)


def test_a_run_counted_in_samples_goes_on(tmp_path):
    samples = dict(
        train_iters=None, train_samples=36, lr_warmup_iters=None, lr_warmup_samples=12
    )
    argv = command(2, 3, "2bw", **samples, **DROPOUT)
    assert_goes_on(*interrupted(tmp_path, 2, argv))


def test_a_folder_that_another_run_saves_to(tmp_path):
    """Here the tests' own process."""
    owner.hold(tmp_path)
    line = rf"--save {tmp_path}: the run of process {os.getpid()} on "
    with pytest.raises(WorldError, match=line):
        run_saving(tmp_path, 2, command(2, 2, "2bw"))
    # what the other rank has printed
    assert {path.name for path in tmp_path.iterdir()} <= {owner.OWNER, "output"}
