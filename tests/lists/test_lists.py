"""Real argument lists, scaled to tiny models: each starts as it is under both schedules
and trains two iterations on the CPU, or is refused with one of the limits that are
named here.

The test trains so many of them under 2bw that each flag is met; `python -m
tests.lists.test_lists` prints how many start, and which limits refused the others, and
with the word `train` behind it trains all.
"""

import contextlib
import functools
import io
import itertools
import math
import os
import re
import shlex
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import yaml

from megatron_2bw.base.argv import groups
from megatron_2bw.base.local_ranks import run_world
from tests.distributed.training import BERT, train

# What 2bw does not do yet, and what Megatron does not do without Transformer Engine, by
# the flag that asks for it.
ON_CPU = ["--multi-latent-attention", "--experimental-attention-variant"]
NOT_YET = """
    --fp8-format --use-megatron-fsdp --use-torch-fsdp2 --fine-grained-activation-offloading
    --num-distributed-optimizer-instances --cuda-graph-impl --use-precision-aware-optimizer
""".split()
LIMITS = {"2bw": NOT_YET + ON_CPU, "megatron": ON_CPU}
# Places, data and services of whoever wrote a list; and numbers that go with the
# original sizes.
LEFT_OUT = """--data-path --train-data-path --valid-data-path --test-data-path --vocab-file --merge-file
--tokenizer-model --wandb-project --wandb-exp-name --wandb-entity --wandb-save-dir --tp-comm-overlap-cfg --train-samples
--lr-decay-samples --lr-warmup-samples --lr-decay-iters --lr-warmup-iters
--exit-interval --use-checkpoint-args --finetune --fim-data --fim-rate --fim-spm-rate""".split()
ALWAYS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --train-iters 2 "
    "--num-workers 0 --device cpu"
)
SMALL = """
    --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64 --kv-channels 8 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --eval-global-batch-size 4
    --make-vocab-size-divisible-by 32 --num-layers 4 --num-experts 4 --expert-model-parallel-size 1
    --expert-tensor-parallel-size 1 --num-layers-per-virtual-pipeline-stage 1
    --microbatch-group-size-per-virtual-pipeline-stage 2 --decoder-first-pipeline-num-layers 1
    --decoder-last-pipeline-num-layers 3 --recompute-num-layers 1 --pipeline-model-parallel-layout E|t*3|t|L
    --lr-wsd-decay-iters 1 --step-batch-size-schedule "0:4 1B:8" --hierarchical-context-parallel-sizes 1 2
    --save-interval 2 --save-retain-interval 2 --eval-interval 2 --eval-iters 1 --log-interval 1
"""
PLACES = ("--save", "--load", "--tensorboard-dir", "--data-cache-path")
RANKS = (
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--tensor-model-parallel-size",
)


def corpus() -> dict[str, list[str]]:
    lists = {}
    for file in sorted(Path(__file__).parent.glob("*.yaml")):
        for name, text in yaml.safe_load(file.read_text()).items():
            lists[name] = shlex.split(text)
    return lists


def values_by_flag(words: list[str]) -> dict[str, list[str]]:
    return {flag: values for flag, *values in groups(words)}


def scaled(words: list[str], folder: str) -> tuple[list[str], int]:
    """The list for a tiny model that has its files in `folder`; and its number of
    processes, at most four."""
    flags = values_by_flag(words)
    flags.setdefault("--eval-iters", [])  # Megatron's default is 100
    small = values_by_flag(shlex.split(SMALL))
    ranks = 1
    for name in RANKS:
        if name in flags:
            size = min(int(flags[name][0]), 2, 4 // ranks)
            small[name] = [str(size)]
            ranks *= size
    if "--num-distributed-optimizer-instances" in flags:
        ranks *= 2
    if "--account-for-embedding-in-pipeline-split" in flags:
        small["--num-layers"] = ["6"]
    for name in PLACES:
        small[name] = [f"{folder}/{name.replace('load', 'save')[2:]}"]
    kept: list[str] = []
    for name, values in flags.items():
        if name not in LEFT_OUT:
            kept += [name, *small.get(name, values)]
    return [*kept, *ALWAYS.split()], ranks


LISTS = corpus()


def refusals(rank: int) -> dict[tuple[str, str], str | None]:
    """What the real parser, the rules and Megatron's validation answer to each list;
    None if they accept it."""
    from megatron.training.global_vars import unset_global_variables

    from megatron_2bw.run.flags import parse, quick_check

    def stop(*lines: str):
        raise InterruptedError(lines[0])

    lines: dict[tuple[str, str], str | None] = {}
    for name, schedule in itertools.product(LISTS, LIMITS):
        argv, ranks = scaled(LISTS[name], os.environ["WORLD_FOLDER"])
        sys.argv[1:] = [*argv, "--pipeline-schedule", schedule]
        os.environ["WORLD_SIZE"] = str(ranks)
        task = "bert" if "bert" in name else "gpt"
        unset_global_variables()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                line = quick_check.mistake(sys.argv[1:], task, ranks)
                parse.parse(parse.parse_early(sys.argv[1:], stop, task), stop)
        except InterruptedError as stopped:
            line = str(stopped)
        lines[name, schedule] = line
    return lines


@functools.cache
def answers() -> dict[tuple[str, str], str | None]:
    return run_world(1, refusals)[0]


def refused_flag(line: str) -> str:
    return re.match(r"--[\w-]+|", line)[0]


def representatives() -> list[tuple[str, str]]:
    """Lists that train under 2bw with each flag of the corpus that it takes."""
    left: set[str] = set()
    able = {}
    for name, words in LISTS.items():
        flags = {word for word in words if word.startswith("--")}
        left |= flags
        if flags.isdisjoint(LIMITS["2bw"]):
            able[name] = flags
    left -= {*LEFT_OUT}
    chosen: list[tuple[str, str]] = []
    while True:
        best = max(able, key=lambda name: len(able[name] & left))
        if not able[best] & left:
            return chosen
        chosen.append((best, "2bw"))
        left -= able[best]


def test_each_list_starts_or_names_a_limit():
    for (name, schedule), line in answers().items():
        assert line is None or refused_flag(line) in LIMITS[schedule], (name, line)


@pytest.mark.nightly
@pytest.mark.parametrize("name, schedule", representatives())
def test_lists_that_start_train(name, schedule, tmp_path):
    argv, ranks = scaled(LISTS[name], str(tmp_path))
    argv += ["--pipeline-schedule", schedule]
    if "bert" in name:
        argv.insert(0, BERT)
    # an asynchronous save starts a process for each rank
    runs = run_world(ranks, train, argv, timeout=280.0)
    assert len(runs[-1].grad_norms) == 2
    assert all(math.isfinite(loss) for loss in runs[-1].losses) and runs[-1].losses


def main(what: str = "") -> None:
    print(f"{len(LISTS)} lists")
    for schedule in LIMITS:
        lines = [line for case, line in answers().items() if case[1] == schedule]
        print(f"{schedule}: {lines.count(None)} start; refused by")
        reasons = Counter(refused_flag(line) or line for line in lines if line)
        for flag, number in reasons.most_common():
            print(f"  {number:3} {flag}")
    if what != "train":
        return
    for case, line in answers().items():
        if line is None:
            with tempfile.TemporaryDirectory() as folder:
                test_lists_that_start_train(*case, folder)
            print("trained:", *case, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
