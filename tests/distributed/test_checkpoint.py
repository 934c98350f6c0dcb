"""A run that is saved and resumed is the uninterrupted run: bit for bit at the same
sizes, to rounding at others."""

from __future__ import annotations

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
from tests.distributed.compare import run_pipeline
from tests.distributed.test_update_rule import poison
from tests.distributed.training import BERT, Run, command, train

DROPOUT = dict(hidden_dropout=0.1, attention_dropout=0.1)
RECOMPUTE = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
ASYNCHRONOUS = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"
SHARDED, EVALUATED = "--use-distributed-optimizer", "--eval-interval 1 --eval-iters 1"
SAVED = 3


def interrupted(folder, ranks: int, argv, prepare=None):
    """A run that saves after iteration SAVED and goes on, and another that starts from
    there."""
    whole = run_pipeline(
        [*argv, "--save", str(folder), "--save-interval", str(SAVED)], ranks, prepare
    )
    (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    return whole, run_pipeline([*argv, "--load", str(folder)], ranks)


def assert_goes_on(whole: list[Run], rest: list[Run]) -> None:
    """Bit for bit, rank by rank."""
    for before, after in zip(whole, rest, strict=True):
        assert after.iterations == list(range(SAVED + 1, 7))
        assert (
            after.scales == before.scales[SAVED:]
            and after.skipped == before.skipped[SAVED:]
        )
        skipped = SAVED * (len(before.losses) // 6)  # a BERT has two losses
        assert [float(loss) for loss in after.losses] == [
            float(loss) for loss in before.losses[skipped:]
        ]
        assert before.weights.keys() == after.weights.keys()
        for name, weight in before.weights.items():
            assert torch.equal(after.weights[name], weight), name


# Stages, microbatches, width and flags.
CASES = {
    "one stage, fully reshardable": (
        1,
        2,
        2,
        f"{SHARDED} --dist-ckpt-optim-fully-reshardable",
    ),
    "four stages, bf16, recompute": (4, 4, 1, f"--bf16 {RECOMPUTE}"),
    "asynchronous, distributed optimizer": (
        2,
        2,
        2,
        f"--bf16 {SHARDED} --overlap-grad-reduce {ASYNCHRONOUS}",
    ),
    "tensor parallel, sgd, further ahead": (
        *(2, 4, 1),
        (
            "--tensor-model-parallel-size 2 --optimizer sgd --sgd-momentum 0.9 --lr "
            "0.1 --two-bw-extra-warmup 2"
        ),
    ),
    "torch format, distributed optimizer": (
        2,
        2,
        2,
        f"--bf16 {SHARDED} --ckpt-format torch --two-bw-gradient-slots 1",
    ),
}


@pytest.mark.proof(
    "four stages, bf16, recompute", "asynchronous, distributed optimizer"
)
@pytest.mark.parametrize("name", CASES)
def test_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    check_resumed(tmp_path, *CASES[name])


def check_resumed(
    folder: Path, stages: int, microbatches: int, width: int, flags: str
) -> None:
    argv = command(stages, microbatches, "2bw", *flags.split(), width=width, **DROPOUT)
    assert_goes_on(
        *interrupted(
            folder,
            stages * width * (1 + ("--tensor-model-parallel-size" in argv)),
            argv,
        )
    )


LLAMA = ("--swiglu", "--group-query-attention", "--disable-bias-linear")
# by Megatron's --use-checkpoint-args
LEFT_OUT = ("--norm-epsilon", "0.125", "--qk-layernorm", "--openai-gelu")
MODELS = {
    "grouped queries, Megatron's schedule": command(
        2,
        2,
        "megatron",
        *LLAMA,
        position_embedding_type="rope",
        num_query_groups=2,
        **DROPOUT,
    ),
    "other norms and activation": command(2, 2, "2bw", *LEFT_OUT, **DROPOUT),
    "BERT": [BERT, *command(2, 2, "2bw", **DROPOUT)],
}
OF_THE_MODEL = (
    "num-layers",
    "hidden-size",
    "num-attention-heads",
    "seq-length",
    "max-position-embeddings",
    *DROPOUT,
)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_of_the_checkpoint(name, tmp_path):
    """With --use-checkpoint-args the checkpoint gives the flags of the model."""
    argv = MODELS[name]
    whole = run_pipeline(
        [*argv, "--save", str(tmp_path), "--save-interval", str(SAVED)], 2
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    given = {
        "--" + flag.replace("_", "-")
        for flag in (*OF_THE_MODEL, "position_embedding_type", "num_query_groups")
    }
    kept = [
        word
        for i, word in enumerate(argv)
        if not given & {word, argv[i - 1]} and word not in (*LLAMA, *LEFT_OUT)
    ]
    assert len(kept) < len(argv) - 10
    assert_goes_on(
        whole,
        run_pipeline([*kept, "--use-checkpoint-args", "--load", str(tmp_path)], 2),
    )


@pytest.mark.proof
def test_dynamic_loss_scale(tmp_path):
    """The step before the save is skipped: the next batch has the scale of before, the
    one after it half of it."""
    argv = command(
        4, 4, "2bw", "--fp16", initial_loss_scale=4096, hysteresis=1, **DROPOUT
    )
    whole, rest = interrupted(
        tmp_path, 4, argv, partial(poison, stage=1, poisoned=(SAVED - 1,))
    )
    assert_goes_on(whole, rest)
    assert whole[0].skipped == [0, 0, 1, 0, 0, 0]


def test_saved_before_the_first_step(tmp_path):
    """fp16 runs begin with skipped steps: the optimizer has no state yet."""
    argv = command(
        2, 2, "2bw", "--fp16", initial_loss_scale=4096, hysteresis=1, **DROPOUT
    )
    whole, rest = interrupted(
        tmp_path, 2, argv, partial(poison, poisoned=tuple(range(SAVED)))
    )
    assert whole[0].skipped == [1, 1, 1, 0, 0, 0]
    assert_goes_on(whole, rest)


def drop_empty_groups(model, optimizer) -> None:
    """Megatron's fault, of which optimizer_state.number_groups takes care."""
    from megatron_2bw.mcore.checkpoints import state

    state.number_groups = lambda content: None


def test_what_no_run_could_load_is_not_saved(tmp_path):
    argv = command(
        3, 3, "2bw", "--bf16", "--swiglu", "--decoupled-lr", "0.005", num_layers=6
    )
    line = r"--save .*: no run could load this checkpoint \(rank 1: Dict key 2 out of bound"
    with pytest.raises(WorldError, match=line):
        run_pipeline(
            [*argv, "--save", str(tmp_path), "--save-interval", "1"],
            3,
            drop_empty_groups,
        )
    assert (
        not list(tmp_path.glob("iter_*"))
        and not (tmp_path / "latest_checkpointed_iteration.txt").exists()
    )


EXTRAPOLATE = ("--two-bw-correction", "extrapolate")
RESHARDABLE = (SHARDED, "--dist-ckpt-optim-fully-reshardable")


def layout(stages: str) -> dict:
    """Flags of stages with the layers that `stages` gives each."""
    return dict(stages=stages.count("|") + 1, pipeline_model_parallel_layout=stages)


# The flags of all runs; and where each other run starts, with its sizes.
SIZES = {
    "stages 2 4 1": ((), [(2, dict(stages=4)), (4, dict(stages=1))]),
    "pipelines 1 2": ((SHARDED,), [(2, dict(stages=2, width=2))]),
    "extrapolated, sharded": (
        (*RESHARDABLE, *EXTRAPOLATE),
        [
            (2, dict(stages=2, tensor_model_parallel_size=2)),
            (4, dict(stages=1, width=2)),
        ],
    ),
    "extrapolated, layouts": (
        EXTRAPOLATE,
        [(2, layout("Et*2|t|tL")), (4, layout("Et|t|t*2L"))],
    ),
}


@pytest.mark.proof("stages 2 4 1")
@pytest.mark.parametrize("flags, resumed", SIZES.values(), ids=SIZES)
def test_other_sizes(flags, resumed, tmp_path):
    """Sums are rounded in another order, nothing else."""

    def run(stages: int, load: int | None = None, width: int = 1, **sizes) -> Run:
        argv = command(stages, 4 // width, "2bw", *flags, width=width, **sizes)
        argv += ["--save", str(tmp_path), "--save-interval", "2"]
        argv += (
            [] if load is None else ["--load", str(tmp_path), "--ckpt-step", str(load)]
        )
        return run_pipeline(
            argv, stages * width * sizes.get("tensor_model_parallel_size", 1)
        )[-1]

    whole = run(2).losses
    for start, sizes in resumed:  # the second from what the first has saved
        rest = run(load=start, **sizes)
        assert rest.iterations == list(range(start + 1, 7))
        torch.testing.assert_close(
            torch.stack(rest.losses), torch.stack(whole[start:]), rtol=2e-6, atol=0
        )


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
    run = run_pipeline([*argv, "--save", str(folder), "--save-interval", str(SAVED)], 2)
    return Saved(argv, run, folder)


def test_what_a_checkpoint_holds(saved):
    """Shadow weights of the model's global shapes, whatever the stages, and what 2BW
    goes on from."""
    from megatron.core import dist_checkpointing

    checkpoint = saved.folder / f"iter_{SAVED:07d}"
    own = dist_checkpointing.load_common_state_dict(checkpoint)["two_bw"]
    own.pop("shadow", None)
    flags = {
        "has_shadow": True,
        "has_working": False,
        "factor": None,
        "gradient": None,
        "sync_iterations": 0,
    }
    assert own == {"schedule": "2bw", "version": SAVED, "loss_scale": 1.0} | flags
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    sizes = {
        name: entry.size for name, entry in entries.items() if hasattr(entry, "size")
    }
    prefix = "two_bw.shadow."
    shadow = {
        name.removeprefix(prefix): size
        for name, size in sizes.items()
        if name.startswith(prefix)
    }
    assert shadow == {
        name: size
        for name, size in sizes.items()
        if not name.startswith(("two_bw", "optimizer"))
    }
    assert shadow["decoder.layers.mlp.linear_fc1.weight"] == (4, 128, 32), (
        "all layers of both stages"
    )


def resume(saved: Saved, *flags: str, schedule: str = "2bw") -> Run:
    argv = [schedule if word == "2bw" else word for word in saved.argv]
    return run_pipeline(
        [*argv, "--load", str(saved.folder), "--ckpt-step", str(SAVED), *flags], 2
    )[-1]


def without_our_checkpoints(rank: int, argv: list[str]) -> Run:
    """Megatron's own functions read the checkpoint."""
    from megatron_2bw.mcore import patches

    patches.for_checkpoints = patches.for_reading = lambda runtime=None: []
    return train(rank, argv)


@pytest.mark.proof
def test_plain_megatron_reads_it_and_2bw_starts_from_a_plain_one(saved, tmp_path):
    argv = [
        "megatron" if word == "2bw" else word
        for word in [*saved.argv, "--hidden-dropout", "0"]
    ]
    argv = [*argv, "--attention-dropout", "0", "--ckpt-step", str(SAVED), "--load"]
    keep = ["--save", str(tmp_path), "--save-interval", str(SAVED)]
    plain = run_world(2, without_our_checkpoints, [*argv, str(saved.folder), *keep])
    ours = run_pipeline([*argv, str(saved.folder)], 2)
    assert plain[-1].iterations == ours[-1].iterations == [4, 5, 6]
    assert plain[-1].losses == ours[-1].losses
    # From the plain checkpoint of iteration 6 both go on with the same weights: as many
    # iterations again.
    flags = [
        "--load",
        str(tmp_path),
        "--train-iters",
        "8",
        "--override-opt-param-scheduler",
    ]
    runs = {
        name: run_pipeline(
            [name if word == "megatron" else word for word in argv[:-3]] + flags, 2
        )[-1]
        for name in ("2bw", "megatron")
    }
    assert runs["2bw"].iterations == runs["megatron"].iterations == [7, 8]
    assert (
        runs["2bw"].losses[0] == runs["megatron"].losses[0]
        and runs["2bw"].losses[1] != runs["megatron"].losses[1]
    )


def test_without_the_optimizer_state_both_weight_versions_are_loaded(saved):
    losses, whole = (
        resume(saved, "--no-load-optim").losses,
        saved.run[-1].losses[SAVED:],
    )
    assert losses[:2] == whole[:2], "batches 3 and 4 run on the saved W(2) and W(3)"
    assert losses[2] != whole[2], "batch 5 runs on what the fresh optimizer has made"


def test_fine_tuning_starts_from_the_newest_weights(saved):
    runs = [
        resume(saved, "--finetune", schedule=schedule)
        for schedule in ("2bw", "megatron")
    ]
    assert runs[0].iterations == runs[1].iterations == [1, 2, 3, 4, 5, 6]
    assert runs[0].losses[0] == runs[1].losses[0], (
        "Megatron's own first batch runs on them"
    )
    argv = [
        *saved.argv,
        "--pretrained-checkpoint",
        str(saved.folder),
        "--ckpt-step",
        str(SAVED),
    ]
    assert run_pipeline(argv, 2)[-1].losses == runs[0].losses, "without --load"


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
    keep = ["--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "1000"]
    first = run_pipeline([*saved.argv, *keep, *flags.split()], 2, prepare)[-1]
    last = first.iterations[-1]
    assert 1 <= last < 6 and first.losses == saved.run[-1].losses[:last]
    second = run_pipeline([*saved.argv, *keep], 2)
    assert second[-1].losses == saved.run[-1].losses[last:]
    for before, after in zip(saved.run, second):
        assert all(
            torch.equal(after.weights[name], weight)
            for name, weight in before.weights.items()
        )


def test_a_run_counted_in_samples_goes_on(tmp_path):
    samples = dict(
        train_iters=None, train_samples=36, lr_warmup_iters=None, lr_warmup_samples=12
    )
    whole, rest = interrupted(tmp_path, 2, command(2, 3, "2bw", **samples, **DROPOUT))
    assert_goes_on(whole, rest)


def test_a_folder_that_another_run_saves_to(tmp_path):
    """Here the tests' own process."""
    owner.hold(tmp_path)
    with pytest.raises(
        WorldError, match=rf"--save {tmp_path}: the run of process {os.getpid()} on "
    ):
        run_pipeline(command(2, 2, "2bw", save=tmp_path, save_interval=SAVED), 2)
    # what the other rank has printed
    assert {path.name for path in tmp_path.iterdir()} <= {owner.OWNER, "output"}
