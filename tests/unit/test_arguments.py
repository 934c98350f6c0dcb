"""Mistakes on the command line are answered in a line; what is right is accepted.

`MISTAKEN` is used by the end-to-end test too.
"""

from __future__ import annotations

import pytest

from megatron_2bw.flags.parse import check
from megatron_2bw.schedules import SCHEDULE_NAMES
from tests.distributed.training import command
from tests.unit.command_lines import UNTIED, complaint, parse, stop

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def line(
    expected: str, *flags: str, world: int = 2, stages: int = 2, microbatches: int = 2, schedule: str = "2bw", **changes
):
    """A wrong command line and what the answer must contain."""
    name = " ".join((*flags, *(f"{key}={value}" for key, value in changes.items()))) or expected
    return pytest.param(command(stages, microbatches, schedule, *flags, **changes), world, expected, id=name)


MISTAKEN = [
    line("--lr is missing", lr=None),
    line("--num-layers is missing", num_layers=None),
    line("--micro-batch-size is missing", micro_batch_size=None),
    line("--seq-length is missing", seq_length=None),
    line("--train-iters is missing", train_iters=None),
    line("--train-iters -3: it must be greater than 0", train_iters=-3),
    line("--num-layers 0: it must be greater than 0", num_layers=0),
    line("--eval-iters -1: it must not be negative", eval_iters=-1),
    line("--hidden-dropout 1.5: it must be", hidden_dropout=1.5),
    line("--log-interval 0: it must be greater than 0", log_interval=0),
    line("--lr inf: it must be less than 1e38", lr="inf"),
    line("--lr 1e+308: it must be less than 1e38", lr="1e308"),
    line("--weight-decay inf: it must be less than 1e38", weight_decay="inf"),
    line("--adam-eps inf: it must be less than 1e38", adam_eps="inf"),
    line("--init-method-std nan: it must not be negative", init_method_std="nan"),
    line("--num-workers 1000000: it must be at most 1000", num_workers=1000000),
    line("--loss-scale inf: it must be finite", "--fp16", loss_scale="inf"),
    line("--seed 0: it must be from 1 to 4e9", seed=0),
    line("--seed 99999999999: it must be from 1 to 4e9", seed=99999999999),
    line("--expert-model-parallel-size -1: it must be greater than 0", expert_model_parallel_size=-1),
    line("--save xxxx", save="x" * 300, save_interval=2),
    line(": File name too long", save="x" * 300, save_interval=2, train_iters=7),
    line("--load xxxx", load="x" * 300),
    line("--tensorboard-dir xxxx", tensorboard_dir="x" * 300),
    line("--vocab-file xxxx", tokenizer_type="GPT2BPETokenizer", vocab_file="x" * 300, merge_file="no.txt"),
    line("--fp16 and --bf16 exclude each other", "--fp16", "--bf16"),
    line("--train-iters and --train-samples exclude each other", train_samples=64),
    line("--mock-data and --data-path exclude each other", data_path="some/data"),
    line("--lr-warmup-fraction and --lr-warmup-iters exclude each other", lr_warmup_fraction=0.1),
    line("--swiglu and --squared-relu exclude each other", "--swiglu", "--squared-relu"),
    line("--save needs --save-interval", save="folder"),
    line("--full-validation needs --multiple-validation-sets", "--full-validation"),
    line("--use-pytorch-profiler needs --profile", "--use-pytorch-profiler"),
    line("--num-query-groups 2 needs --group-query-attention", num_query_groups=2),
    line("--no-initialization needs --load", "--no-initialization"),
    line("--no-pad-vocab-size needs --padded-vocab-size", "--no-pad-vocab-size"),
    line("--wandb-project needs --wandb-save-dir", wandb_project="project"),
    line(
        "--num-distributed-optimizer-instances needs --use-dist",
        schedule="gpipe",
        num_distributed_optimizer_instances=2,
    ),
    line("--pipeline-model-parallel-size 3 needs a multiple of 3 processes, but there are 2", stages=3, microbatches=3),
    line("--tensor-model-parallel-size 2 needs a multiple of 4 processes", tensor_model_parallel_size=2),
    line("--global-batch-size 5 is not a multiple of --micro-batch-size 2 x 1 pipelines", global_batch_size=5),
    line(
        "--train-samples 3 is less than one --global-batch-size 4",
        train_iters=None,
        lr_warmup_iters=None,
        train_samples=3,
    ),
    line(
        "--eval-micro-batch-size 1 must equal --micro-batch-size 2",
        world=4,
        tensor_model_parallel_size=2,
        eval_micro_batch_size=1,
    ),
    line("--full-validation takes one sample at a time", "--full-validation", "--multiple-validation-sets"),
    line("--window-size takes two numbers", window_size=2),
    line("--padded-vocab-size 100 is less than --vocab-size 127", padded_vocab_size=100),
    line("--num-attention-heads 5 does not divide --hidden-size 32", num_attention_heads=5),
    line("--num-query-groups 3 does not divide --num-attention-heads 4", "--group-query-attention", num_query_groups=3),
    line(
        "--tensor-model-parallel-size 8 does not divide --num-attention-heads 4", world=16, tensor_model_parallel_size=8
    ),
    line("--seq-length 32 is more than --max-position-embeddings 16", seq_length=32),
    line("--num-layers 5 cannot be split over --pipeline-model-parallel-size 2", num_layers=5),
    line(
        "--decoder-first-pipeline-num-layers 2: 3 other stages cannot share the other 2 of --num-layers 4",
        world=4,
        stages=4,
        microbatches=4,
        decoder_first_pipeline_num_layers=2,
    ),
    line("--recompute-granularity full needs --recompute-method", recompute_granularity="full"),
    line("--recompute-method uniform needs --recompute-granularity full", recompute_method="uniform"),
    line(
        "--recompute-method block needs --recompute-num-layers", recompute_granularity="full", recompute_method="block"
    ),
    line("--min-lr 0.1 is more than --lr 0.01", min_lr=0.1),
    line("--lr-warmup-init 0.1 is more than --lr 0.01", lr_warmup_init=0.1),
    line("--lr-warmup-iters 6 must be less than --lr-decay-iters 6", lr_warmup_iters=6),
    line("--lr-decay-style WSD needs --lr-wsd-decay-iters", lr_decay_style="WSD"),
    line("--load no/such: there is no checkpoint", load="no/such"),
    line(
        "--load new: there is no checkpoint", "--exit-on-missing-checkpoint", load="new", save="./new", save_interval=2
    ),
    line("--save /dev/null/x: /dev/null is not a folder", save="/dev/null/x", save_interval=2),
    line("--split 98,x,1: give three shares", split="98,x,1"),
    line("--split 0,0,100 leaves nothing to train on", split="0,0,100"),
    line("--tokenizer-type NullTokenizer needs --vocab-size", vocab_size=None),
    line("--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file", tokenizer_type=None),
    line("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model", tokenizer_type="HuggingFaceTokenizer"),
    line(
        "--tokenizer-model ./no/such: there is no such",
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model="./no/such",
    ),
    line(
        "--vocab-file no.json: there is no such",
        tokenizer_type="GPT2BPETokenizer",
        vocab_file="no.json",
        merge_file="no.txt",
    ),
    line("--spec no.module layer: No module named", "--spec", "no.module", "layer"),
    line("--spec one: give a module", "--spec", "one"),
    line("--two-bw-exchange nccl needs --distributed-backend nccl", two_bw_exchange="nccl", distributed_backend="gloo"),
    line(
        "--two-bw-exchange has no effect with --pipeline-schedule megatron", schedule="megatron", two_bw_exchange="gloo"
    ),
    line("--two-bw-trace has no effect with --pipeline-schedule megatron", schedule="megatron", two_bw_trace="folder"),
    line("--two-bw-trace /proc/version/trace: /proc/version is not a folder", two_bw_trace="/proc/version/trace"),
    line(
        "--two-bw-gradient-slots has no effect without --pipeline-schedule 2bw",
        schedule="gpipe",
        two_bw_gradient_slots=1,
    ),
    line(
        "--two-bw-sync-iterations has no effect without --pipeline-schedule 2bw",
        schedule="pipedream-flush",
        two_bw_sync_iterations=3,
    ),
    line("--two-bw-sync-iterations: -1: must be a whole number", two_bw_sync_iterations=-1),
    line("--two-bw-sync-iterations: 1.5: must be a whole number", two_bw_sync_iterations=1.5),
    line("--two-bw-sync-iterations: 101%: must be a whole number of 0 or more, or", two_bw_sync_iterations="101%"),
    line("--two-bw-sync-iterations: 1.5%: must be a whole number of 0 or more, or", two_bw_sync_iterations="1.5%"),
    line("--two-bw-sync-iterations: %: must be a whole number of 0 or more, or", two_bw_sync_iterations="%"),
    line(
        "--two-bw-correction has no effect without --pipeline-schedule 2bw",
        schedule="megatron",
        two_bw_correction="extrapolate",
    ),
    line(
        "--two-bw-correction-factor has no effect without --two-bw-correction extrapolate", two_bw_correction_factor=0.5
    ),
    line(
        "--two-bw-correction extrapolate has no effect: --two-bw-sync-iterations 6 is not below --train-iters 6",
        two_bw_correction="extrapolate",
        two_bw_sync_iterations=6,
    ),
    line(
        "--two-bw-sync-iterations 100% is not below --train-iters 6",
        two_bw_correction="extrapolate",
        two_bw_sync_iterations="100%",
    ),
    line(
        "--two-bw-sync-iterations 3 is not below --train-samples / --global-batch-size 3",
        train_iters=None,
        lr_warmup_iters=None,
        train_samples=12,
        two_bw_correction="extrapolate",
        two_bw_sync_iterations=3,
    ),
    line(
        "--two-bw-correction-factor: 2.5: must be between 0 and 2",
        two_bw_correction="extrapolate",
        two_bw_correction_factor=2.5,
    ),
    line(
        "--two-bw-correction-factor: 1:sine:0: must be a number such as 1, or a schedule such as 1.5:cosine:0.9",
        two_bw_correction="extrapolate",
        two_bw_correction_factor="1:sine:0",
    ),
    line(
        "--two-bw-correction-gradient has no effect without --two-bw-correction extrapolate",
        two_bw_correction="auto",
        two_bw_correction_gradient=1,
    ),
    line(
        "--two-bw-correction-gradient nan must be between 0 and 10",
        two_bw_correction="extrapolate",
        two_bw_correction_gradient="nan",
    ),
    line(
        "--two-bw-correction-gradient has no effect with --muon-scalar-optimizer lion",
        optimizer="muon",
        muon_scalar_optimizer="lion",
        two_bw_correction="extrapolate",
        two_bw_correction_gradient=2,
    ),
    line(
        "--two-bw-correction auto has no effect: --two-bw-sync-iterations 6 is not below --train-iters 6",
        two_bw_correction="auto",
        two_bw_sync_iterations=6,
    ),
    line(
        "--two-bw-extra-warmup has no effect without --pipeline-schedule 2bw and several stages",
        schedule="gpipe",
        two_bw_extra_warmup=1,
    ),
    line("--two-bw-extra-warmup has no effect without", stages=1, world=1, two_bw_extra_warmup=1),
    line(
        "--two-bw-extra-warmup has 2 numbers: give one, or one for each of the 1 boundaries",
        microbatches=8,
        two_bw_extra_warmup="1,1",
    ),
    line(
        "gives 3 microbatches on each of 1 pipeline, but --pipeline-schedule 2bw with --two-bw-extra-warmup needs 4: "
        "use --global-batch-size 8 or more",
        microbatches=3,
        two_bw_extra_warmup="2",
    ),
    line("use --global-batch-size 4 or more", microbatches=1),
    line("--gpipe-round has no effect without --pipeline-schedule gpipe: leave it out", gpipe_round=2),
    line("--gpipe-round has no effect without", schedule="megatron", gpipe_round=1),
    line("--gpipe-round: 0: must be a whole number of 1 or more", schedule="gpipe", gpipe_round=0),
    line("--gpipe-round: -1: must be a whole number of 1 or more", schedule="gpipe", gpipe_round=-1),
    line("--gpipe-round: 1.5: must be a whole number of 1 or more", schedule="gpipe", gpipe_round=1.5),
    line(
        "--gpipe-round 4 is more than the 3 microbatches of a batch on each pipeline: give at most 3, or leave it out",
        schedule="gpipe",
        microbatches=3,
        gpipe_round=4,
    ),
]


@pytest.mark.parametrize("argv, world, expected", MISTAKEN)
def test_a_mistake_is_answered_with_its_flag(argv, world, expected):
    message = complaint(argv, world)
    assert message is not None and expected in message and "\n" not in message


# What does work, and must stay accepted.
ACCEPTED = [
    ["--bf16"],
    ["--fp16", "--loss-scale", "128"],
    [UNTIED],
    ["--calculate-per-token-loss"],
    ["--overlap-grad-reduce"],
    ["--recompute-granularity", "selective"],
    ["--recompute-activations"],
    ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
    [
        "--position-embedding-type",
        "rope",
        "--rotary-percent",
        "0.5",
        "--normalization",
        "RMSNorm",
        "--swiglu",
        "--disable-bias-linear",
        "--group-query-attention",
        "--num-query-groups",
        "2",
    ],
    ["--save", "folder", "--save-interval", "2", "--load", "folder"],
    ["--exit-interval", "3"],
    ["--exit-signal-handler"],
    ["--exit-duration-in-mins", "5"],
    ["--dataloader-type", "cyclic"],
    ["--decoder-first-pipeline-num-layers", "3"],
    ["--skip-train"],
    ["--log-params-norm", "--log-num-zeros-in-grad"],
    ["--timing-log-level", "2", "--no-barrier-with-level-1-timing", "--log-throughput"],
    ["--use-mcore-models"],
    ["--optimizer", "sgd", "--sgd-momentum", "0.5"],
    ["--optimizer", "muon", "--muon-tp-mode", "duplicated"],
    ["--optimizer", "muon", "--bf16"],
    ["--optimizer", "lion", "--adam-beta1", "0.8"],
    ["--check-weight-hash-across-dp-replicas-interval", "2"],
    ["--attention-softmax-in-fp32"],
    ["--manual-gc"],
    ["--distributed-backend", "gloo", "--transformer-impl", "local"],
    ["--rerun-mode", "disabled"],
    ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"],
]

ACCEPTED_BY_2BW = [
    ["--two-bw-sync-iterations", "3"],
    ["--two-bw-sync-iterations", "1000"],
    ["--two-bw-sync-iterations", "100%"],
    ["--two-bw-correction", "extrapolate", "--two-bw-sync-iterations", "20%"],
    ["--two-bw-correction", "none"],
    ["--two-bw-correction", "auto"],
    ["--two-bw-correction", "extrapolate", "--two-bw-correction-gradient", "2"],
    ["--two-bw-correction", "extrapolate", "--two-bw-correction-factor", "1.5:cosine:0.9"],
    ["--two-bw-correction", "extrapolate", "--two-bw-correction-factor", "0.9", "--two-bw-sync-iterations", "3"],
]


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("flags", [[], *ACCEPTED], ids=" ".join)
def test_sane_command_lines_are_accepted(schedule, flags):
    if schedule == "pipedream":
        flags = [*flags, UNTIED]
    assert complaint(command(2, 2, schedule, *flags), 2) is None


DISTRIBUTED = ["--use-distributed-optimizer"]
OVERLAPPED = [*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather"]


@pytest.mark.parametrize(
    "flags",
    [
        DISTRIBUTED,
        OVERLAPPED,
        *ACCEPTED_BY_2BW,
        ["--two-bw-gradient-slots", "1"],
        ["--two-bw-trace", "folder"],
        ["--two-bw-exchange", "gloo"],
    ],
    ids=" ".join,
)
def test_flags_of_2bw_are_accepted(flags):
    assert complaint(command(2, 2, "2bw", *flags), 2) is None


def test_the_late_step_gathers_in_megatrons_stead():
    """Megatron's hooks, which would gather a second time, are not installed."""
    for schedule, hooks in (("2bw", False), ("pipedream-flush", True), ("megatron", True)):
        argv = command(2, 2, schedule, *OVERLAPPED)
        args = parse(argv, 2)
        check(args, stop)
        assert args.overlap_param_gather is hooks


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("stages, width, tensor", [(1, 1, 1), (1, 2, 2), (2, 3, 1), (4, 1, 2)])
def test_all_shapes_of_the_world_are_accepted(schedule, stages, width, tensor):
    argv = command(stages, 4, schedule, UNTIED, width=width, tensor_model_parallel_size=tensor)
    assert complaint(argv, stages * width * tensor) is None


@pytest.mark.parametrize(
    "stages, width, micro, batch, needed",
    [(2, 1, 2, 2, 4), (4, 1, 2, 6, 8), (4, 3, 2, 18, 24), (2, 2, 1, None, 4), (4, 1, 5, 5, 20)],
)
def test_too_few_microbatches_says_which_batch_would_do(stages, width, micro, batch, needed):
    def answer(size, schedule="2bw"):
        changes = dict(micro_batch_size=micro, global_batch_size=size)
        return complaint(command(stages, 1, schedule, width=width, **changes), stages * width)

    message = answer(batch)
    assert message.endswith(f"use --global-batch-size {needed} or more") and f"there are stages, {stages}" in message
    assert answer(needed) is None
    assert f"use --global-batch-size {needed} or more" in answer(needed - micro * width)
    assert answer(batch, "pipedream-flush") is None
