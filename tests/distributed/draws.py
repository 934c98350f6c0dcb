"""Random legal configurations of both entry scripts, and what must hold for each of
them without a reference.

    python -m tests.distributed.draws --minutes 60
    python -m tests.distributed.draws --case '{"check": "depth", "base": {...},
    "change": {...}}'

A draw is two command lines: a base and the base with a change, and a check names what
they must have in common. The command line's own rules say which draws are legal; the
others are drawn again, and counted.

Differences are bitwise, but for `rounding`: other additions of gradients (tied
embeddings over stages, tensor ranks, pipelines, larger microbatches) or of the norm's
squares (clipping over other stages or shards).
"""

import argparse
import contextlib
import functools
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_2bw.base.local_ranks import WorldError, run_world
from megatron_2bw.mcore.checkpoints.folder import TRACKER
from tests.distributed.compare import UNTIED, assert_equal_weights
from tests.distributed.training import BERT, TINY, Run, full_weights, train

# Flags and their values as typed, and three words of our own: task, width and
# microbatches. None takes a flag away.
Config = dict[str, Any]

STAGES = "--pipeline-model-parallel-size"
TENSOR = "--tensor-model-parallel-size"
SCHEDULE = "--pipeline-schedule"
FLUSH = ("pipedream-flush", "gpipe", "no-pipelining")
ASYNC = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"
FORMATS = ["", "", "--ckpt-format torch", ASYNC, "--dist-ckpt-optim-fully-reshardable"]

# Each row: how often, and the alternatives.
MODEL = """
0.6 --untie-embeddings-and-output-weights
0.5 --disable-bias-linear
0.4 --swiglu | --squared-relu | --swiglu --ffn-hidden-size 48
0.3 --group-query-attention --num-query-groups 1 | --group-query-attention --num-query-groups 2
0.3 --position-embedding-type rope | --position-embedding-type none
0.1 --position-embedding-type rope --rotary-percent 0.5
0.3 --normalization RMSNorm
0.2 --qk-layernorm | --add-qkv-bias | --kv-channels 16 | --hidden-size 48 | --use-cpu-initialization
0.3 --seq-length 8 | --micro-batch-size 1 | --micro-batch-size 3 | --vocab-size 61 | --bert-no-binary-head
0.4 --num-layers 2 | --num-layers 3 | --num-layers 6 | --num-layers 8
0.2 --decoder-first-pipeline-num-layers 1 | --decoder-last-pipeline-num-layers 1
0.1 --init-method-std 0.1 | --use-mup | --window-size 4,0 | --no-rope-freq 2"""
RULE = """
0.5 --bf16 | --fp16 --initial-loss-scale 4096 | --fp16 --initial-loss-scale 4294967296 | --fp16 --loss-scale 256
0.1 --attention-softmax-in-fp32 | --accumulate-allreduce-grads-in-fp32 | --calculate-per-token-loss
0.5 --clip-grad 0 | --clip-grad 0.1
0.4 --optimizer sgd --sgd-momentum 0 --lr 0.1 | --optimizer sgd --sgd-momentum 0.9 --lr 0.1
0.3 --optimizer muon | --optimizer lion | --optimizer soap | --optimizer muon --muon-scalar-optimizer lion
0.2 --weight-decay 0 | --adam-beta1 0.5 | --adam-eps 1e-5 | --decoupled-lr 0.005 | --calculate-per-token-loss
0.3 --lr-decay-style constant | --lr-decay-style cosine | --lr-decay-style inverse-square-root
0.2 --lr-warmup-iters 0 | --lr-decay-iters 4 | --seed 11
0.3 --two-bw-sync-iterations 1 | --two-bw-sync-iterations 2 | --two-bw-sync-iterations 4 | --two-bw-sync-iterations 6
0.5 --two-bw-late 0 | --two-bw-late 1 | --two-bw-late 2 | --two-bw-late 3 | --two-bw-late 50%
0.3 --two-bw-correction 1 | --two-bw-correction auto"""
# It depends on the depth: each stage knows another part of the gradient.
PREDICTED = "--two-bw-late all --two-bw-correction predict"
# Of a GPT. None takes the flag away.
KINDS = """
0.6 --num-experts 4 --moe-ffn-hidden-size 32 --disable-bias-linear --moe-token-dispatcher-type allgather
0.2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall
0.5 --moe-aux-loss-coeff 1e-2 | --moe-z-loss-coeff 1e-3 --moe-aux-loss-coeff 1e-3 | --moe-router-topk 1
0.2 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 | --moe-shared-expert-intermediate-size 16
0.3 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1
0.3 --mtp-num-layers 1 --position-embedding-type rope
0.2 --hybrid-layer-pattern *-*-*-*- --num-layers None | --hybrid-layer-pattern *E*-*E*- --num-layers None"""
LORA = (
    "--lora-rank 4",
    "--lora-rank 2 --lora-alpha 1 --lora-targets linear_qkv linear_fc2",
)
DROPOUT = "0.4 --hidden-dropout 0.1 --attention-dropout 0.1 | --hidden-dropout 0.3"
# What must not change a bit, but for clipping with the distributed optimizer.
NEUTRAL = f"""
0.3 --recompute-granularity full --recompute-num-layers 1 --recompute-method uniform | --recompute-activations
0.1 --recompute-granularity full --recompute-num-layers 1 --recompute-method block | --recompute-granularity selective
0.3 --two-bw-memory one-slot
0.3 --two-bw-extra-warmup 1 | --two-bw-extra-warmup 2 | --two-bw-extra-warmup 0,1 | --two-bw-extra-warmup 1,0,2
0.3 --use-distributed-optimizer | --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
0.2 --overlap-grad-reduce | --overlap-grad-reduce --ddp-bucket-size 5000
0.3 --eval-interval 1 --eval-iters 1 | --eval-interval 2 --eval-iters 3 | --eval-interval 5 --eval-iters 2
0.3 --log-interval 2 | --log-interval 3 | --log-interval 6
0.2 {" | ".join("--save {folder}/kept --save-interval 2 " + each for each in FORMATS)}
0.2 --pipeline-trace {{folder}}/trace | --tensorboard-dir {{folder}}/board | --log-params-norm | --log-throughput
0.2 --log-num-zeros-in-grad | --manual-gc | --num-workers 1 | --exit-signal-handler
0.2 --timing-log-level 2 --no-barrier-with-level-1-timing | --no-check-for-nan-in-loss-and-grad"""
CHECKS = """
    again width tensor microbatch-size megatron megatron kill kill resized resized
    depth depth depth neutral neutral neutral neutral resume resume resume resume
""".split()
RESUMED = ("resume", "resized")  # resized: at other sizes


@dataclass
class Draw:
    check: str
    base: Config
    change: Config
    at: float = 0  # the iteration to resume after, or the seconds before the kill


def config(text: str) -> Config:
    """The flags of a text such as "--bf16 --clip-grad 0"."""
    flags = {}
    for part in re.split(r"(?=--)", text):
        flag, _, value = part.strip().partition(" ")
        if flag:
            flags[flag] = None if value == "None" else value
    return flags


def some(draw: random.Random, table: str, often: float = 1.0) -> Config:
    chosen = {}
    for line in table.strip().splitlines():
        share, row = line.split(" ", 1)
        if draw.random() < float(share) * often:
            chosen |= config(draw.choice(row.split("|")))
    return chosen


def without(one: Config, *flags: str) -> Config:
    return {flag: value for flag, value in one.items() if flag not in flags}


def size(one: Config, name: str) -> int:
    return int(one.get(name) or 1)


def ranks(one: Config) -> int:
    return size(one, STAGES) * size(one, TENSOR) * size(one, "width")


def replicas(one: Config) -> int:
    """Ranks of a stage."""
    return size(one, TENSOR) * size(one, "width")


def new_base(draw: random.Random, check: str) -> Config:
    schedules = ("2bw",) * 8 + (*FLUSH, "pipedream", "megatron")
    schedule = draw.choice(FLUSH if check == "megatron" else schedules)
    base = {
        "task": draw.choice(("gpt", "gpt", "bert")),
        SCHEDULE: schedule,
        STAGES: draw.choice((1, 2, 2, 3, 4)),
        "microbatches": draw.randint(1, 6),
    }
    if draw.random() < 0.2 or check == "tensor":
        base[TENSOR] = 2
    if draw.random() < 0.3 or check == "width":
        base["width"] = 2
    base |= some(draw, MODEL) | some(draw, RULE) | some(draw, NEUTRAL, 0.4)
    # else the masks are others
    if check in ("again", "neutral", "megatron", "resume", "kill"):
        base |= some(draw, DROPOUT)
    if check in ("again", "resume", "kill") and draw.random() < 0.3:
        base |= config(PREDICTED)
    if base["task"] == "gpt" and draw.random() < 0.4:
        base |= some(draw, KINDS)
        if "--num-experts" not in base:
            base = without(base, *re.findall(r"--moe-[\w-]+|--expert-[\w-]+", KINDS))
    if draw.random() < 0.2:
        base |= config(f"--lora-base {{folder}}/base {draw.choice(LORA)}")
    return base


LOAD = "--load {folder}/saved"


def new_draw(draw: random.Random) -> Draw:
    """Legal or not."""
    check = draw.choice(CHECKS)
    base = new_base(draw, check)
    microbatches = base["microbatches"]
    at = draw.randint(1, 5)
    depth = {STAGES: draw.choice((1, 2, 3, 4))}
    for flag in base:  # what goes with a number of stages
        if flag.endswith("-pipeline-num-layers") or flag == "--two-bw-extra-warmup":
            depth[flag] = None
    save = f"--save {{folder}}/saved --save-interval {at} {draw.choice(FORMATS)}"
    if check in (*RESUMED, "kill"):
        base = without(base, *config(ASYNC), "--ckpt-format") | config(save)
    change = {}
    match check:
        case "depth":
            change = depth
        case "neutral":
            change = some(draw, NEUTRAL) or config("--log-interval 2")
            base = without(base, *change)
        case "megatron":
            change = config(f"{SCHEDULE} megatron --pipeline-trace None")
        case "width":
            change = config("--expert-model-parallel-size None")
            change |= {"width": 1, "microbatches": 2 * microbatches}
        case "tensor":
            base = without(base, "--swiglu")  # its two halves lie in one matrix
            change = {TENSOR: None}
        case "microbatch-size":
            # a BERT's microbatches have masked words of different numbers
            base |= {"task": "gpt", "microbatches": 2 * microbatches}
            base |= config("--micro-batch-size 2")
            change = config("--micro-batch-size 4") | {"microbatches": microbatches}
        case "resume" | "resized":
            change = dict.fromkeys(("--save", "--save-interval", *config(ASYNC)))
            change |= config(LOAD)
            if check == "resized":
                base = without(base, "--ckpt-format")
                change |= depth | {TENSOR: draw.choice((None, None, 2))}
        case "kill":
            base |= config(f"{LOAD} --train-iters 20")
            at = round(draw.random(), 3)
    return Draw(check, base, change, at)


def words(one: Config, folder: Path) -> list[str]:
    """The command line; a BERT's begins with its script, as `train` takes it."""
    flags = TINY | one | {"--mock-data": ""}
    samples = size(one, "microbatches") * size(one, "width")
    flags["--global-batch-size"] = samples * int(flags["--micro-batch-size"])
    argv = [BERT] if one.get("task") == "bert" else []
    for flag, value in flags.items():
        if flag.startswith("--") and value is not None:
            argv += f"{flag} {value}".replace("{folder}", str(folder)).split()
    return argv


# --- what the rules say, and what must hold
# --------------------------------------------------------------------------------------


def megatron_lacks(one: Config) -> str:
    """What Megatron 0.19 finds wrong only when it builds the model or the optimizer, or
    when it saves; or nothing."""
    optimizer = one.get("--optimizer")
    saves = one.get("--save")
    stages = size(one, STAGES)
    if optimizer in ("muon", "lion", "soap") and "--fp16" in one:
        return "its optimizer has not both"
    if optimizer == "sgd" and "--use-distributed-optimizer" in one:
        return "its optimizer has not both"
    if optimizer == "soap" and saves and one.get("--ckpt-format") != "torch":
        return "the state of soap in this format"
    if "--num-experts" in one and size(one, TENSOR) > 1:
        return "sequence parallelism without Apex, which experts on tensor ranks need"
    if "--mtp-num-layers" in one and UNTIED not in one and saves and stages > 1:
        return "a save of tied embeddings with --mtp-num-layers"
    layers = size(TINY | one, "--num-layers")
    uneven = False
    for flag in one:
        if flag.endswith("-pipeline-num-layers") and one[flag]:
            uneven = True
            layers -= int(one[flag])
            stages -= 1
    if uneven and (stages < 1 or layers < stages or layers % stages):
        return "an uneven split"
    return ""


def refusals(_rank: int, draws: list[Draw], folder: Path) -> list[str]:
    """For each draw the line that refuses one of its commands, or nothing."""
    from megatron.training import global_vars

    from megatron_2bw.run.flags.parse import parse, parse_early

    def stop(line: str) -> None:
        raise SystemExit(line)

    unread = ("--load", "--tensorboard-dir", "--lora-base", *config(" ".join(LORA)))

    def refusal(one: Config) -> str:
        lack = megatron_lacks(one)
        if lack:
            return lack
        argv = words(without(one, "task", *unread), folder)
        os.environ["WORLD_SIZE"] = str(ranks(one))
        sys.argv[1:] = argv
        try:
            parse(parse_early(argv, stop, one.get("task", "gpt")), stop)
        except SystemExit as end:
            return str(end.code)
        finally:
            global_vars.unset_global_variables()
        return ""

    lines = []
    for draw in draws:
        lines.append(refusal(draw.base) or refusal(draw.base | draw.change))
    return lines


class Refused(Exception):
    """A draw is not legal, with the line that says so."""


BASE = (
    "--save {folder}/base --save-interval 1 --train-iters 1 --lr-warmup-iters 0 "
    "--pipeline-schedule megatron"
)


def is_exact(draw: Draw) -> bool:
    """Whether nothing is added in another order."""
    clips = float(draw.base.get("--clip-grad", 1)) > 0
    if draw.check == "depth":
        stages = (size(draw.base, STAGES), size(draw.base | draw.change, STAGES))
        tied = UNTIED not in draw.base or "--mtp-num-layers" in draw.base
        return not clips and (not tied or min(stages) > 1 or max(stages) == 1)
    if draw.check == "neutral":
        return not (clips and "--use-distributed-optimizer" in draw.change)
    return draw.check in ("again", "megatron", "resume", "kill")


def tolerance(draw: Draw) -> float:
    """The difference of losses, relative to the largest; 0: bitwise, weights too. Refused if the
    rounding has no bound."""
    base = draw.base
    same_rule = ("again", "neutral", "tensor")
    if base.get(SCHEDULE) == "pipedream" and draw.check not in same_rule:
        raise Refused(
            "pipedream's losses depend on depth and microbatches, and it resumes "
            "with the newest weights"
        )
    experts = any(flag.startswith("--moe-") for flag in base)
    if experts and draw.check == "microbatch-size":
        raise Refused("routers' losses and biases are of one microbatch")
    if is_exact(draw):
        return 0
    optimizer = base.get("--optimizer", "adam")
    if "--bf16" in base or "--fp16" in base:  # an ulp flips the rounding of a weight
        bounds = {"adam": 2e-3, "sgd": 2e-3}
    else:
        bounds = {"adam": 2e-6, "sgd": 2e-6}
        # by default Muon orthogonalizes each tensor rank's part
        if size(base, TENSOR) == size(base | draw.change, TENSOR):
            bounds["muon"] = 1e-3
    if optimizer not in bounds:
        raise Refused(f"the rounding of {optimizer} has no bound here")
    return bounds[optimizer]


def refusal_of(error: WorldError, one: Config) -> Exception:
    # Megatron ends with status 16, too
    if "--loss-scale" in one and "Unexpected result inf" in str(error):
        return Refused("the constant loss scale is too large: a gradient is infinite")
    # it finds some mistakes while it builds the model
    line = re.search(r"py: error: (.*)", str(error))
    if line and "SystemExit: 2" in str(error):
        return Refused(line[1])
    return error


def run(one: Config, folder: Path, prepare: Any = None) -> list[Run]:
    """By rank. Copies of a weight must be equal. WorldError if the run fails."""
    try:
        runs = run_world(ranks(one), train, words(one, folder), prepare)
    except WorldError as error:
        raise refusal_of(error, one) from None
    tensor = size(one, TENSOR)
    weights = []
    for rank in range(replicas(one)):
        weights.append(full_weights(runs[rank :: replicas(one)]))  # tied copies too
        first = weights[rank % tensor]
        for name in weights[rank].keys() & first.keys():  # experts may be apart
            equal = torch.equal(weights[rank][name], first[name])
            assert equal, f"{name} of pipeline {rank // tensor} differs"
    return runs


def distance_of_losses(draw: Draw, first: list[Run], second: list[Run]) -> float:
    """The iterations that the second run has, too; their skipped steps are the
    same."""
    iterations = len(first[-1].iterations)
    done = iterations - len(second[-1].iterations)
    if draw.check != "kill":
        expected = int(draw.at) if draw.check in RESUMED else 0
        assert done == expected, f"{done} iterations are missing"
    losses = torch.stack(first[-1].losses)
    assert losses.isfinite().all()
    assert len(losses.unique()) > len(losses) // 2, "the losses stand still"
    if first[-1].skipped[done:] != second[-1].skipped:
        fp16_sums = {"--fp16", "--calculate-per-token-loss"} <= draw.base.keys()
        if draw.check == "width" and fp16_sums:
            raise Refused("sums in fp16 overflow in one order only, as Megatron's")
        raise AssertionError("other steps are skipped")
    expected = losses[len(losses) * done // iterations :]
    found = torch.stack(second[-1].losses)
    assert found.shape == expected.shape, f"{len(found)} losses, not {len(expected)}"
    return float((found - expected).abs().max() / expected.abs().max())


def compare(draw: Draw, limit: float, first: list[Run], second: list[Run]) -> None:
    """AssertionError if the losses are too far apart, or a weight or a skipped step
    differs."""
    far = distance_of_losses(draw, first, second)
    assert far <= limit, f"relative distance {far:.2g}"
    if limit == 0:
        step = replicas(draw.base)
        for rank in range(step):
            found = Run(weights=full_weights(second[rank::step]))
            expected = Run(weights=full_weights(first[rank::step]))
            assert_equal_weights(found, expected)


def kill_later(rank: int, seconds: float, model: Any, optimizer: Any) -> None:
    if os.environ["RANK"] == str(rank):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def save_base(base: Config, folder: Path) -> None:
    """The model that --lora-base names."""
    model = {"task": base["task"]}
    for flag, value in base.items():
        if flag in MODEL + KINDS and "-pipeline-" not in flag:
            model[flag] = value
    run(model | config(BASE), folder)


def check(draw: Draw) -> None:
    """AssertionError says what is wrong; a WorldError is one."""
    limit = tolerance(draw)
    with tempfile.TemporaryDirectory(prefix="draws_") as name:
        folder = Path(name, "first")
        other = folder if draw.check in RESUMED else Path(name, "second")
        if "--lora-base" in draw.base:
            for each in {folder, other}:
                save_base(draw.base, each)
        first = run(draw.base, folder)
        if draw.check in RESUMED:
            (folder / "saved" / TRACKER).write_text(str(int(draw.at)))
        if draw.check == "kill":
            victim = int(1000 * draw.at) % ranks(draw.base)
            kill = functools.partial(kill_later, victim, draw.at)
            with contextlib.suppress(WorldError):
                run(draw.base, other, kill)
        compare(draw, limit, first, run(draw.base | draw.change, other))


# --- many draws
# --------------------------------------------------------------------------------------


def legal(source: random.Random, refused: list[str]) -> Iterator[Draw]:
    """Endless. The lines that refuse others go to `refused`."""
    with tempfile.TemporaryDirectory(prefix="draws_") as folder:
        while True:
            draws = [new_draw(source) for _ in range(40)]
            (lines,) = run_world(1, refusals, draws, Path(folder))
            for draw, line in zip(draws, lines):
                if line:
                    refused.append(line)
                else:
                    yield draw


def try_draws(seed: int, number: int, minutes: float = 1e9) -> int:
    """How many of them fail. Each failure is printed at once, with its command."""
    begin = time.monotonic()
    failures = 0
    drawn = 0
    refused = []
    for draw in legal(random.Random(seed), refused):
        try:
            check(draw)
        except Refused as line:
            refused.append(str(line))
            continue
        except AssertionError as error:
            failures += 1
            case = json.dumps(asdict(draw))
            print(f"FAILED: {str(error)[-4000:]}\n  --case '{case}'")
        drawn += 1
        seconds = time.monotonic() - begin
        counts = f"{len(refused)} refused, {failures} failures"
        print(f"seed {seed}: {drawn} draws in {seconds:.0f} s, {counts}", flush=True)
        if drawn >= number or seconds >= 60 * minutes:
            break
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6)
    )
    parser.add_argument("--case", type=json.loads, help="one draw, as printed")
    options = parser.parse_args()
    if options.case:
        check(Draw(**options.case))
        return 0
    return 1 if try_draws(options.seed, 10**9, options.minutes) else 0


if __name__ == "__main__":
    sys.exit(main())
