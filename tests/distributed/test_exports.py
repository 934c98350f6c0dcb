"""Exports by flag of the architecture: transformers' loss is Megatron's, or a line
names the flag."""

import argparse
import json
import re
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_2bw.base.errors import UserError
from megatron_2bw.base.local_ranks import run_world
from megatron_2bw.mcore.checkpoints.folder import TRACKER
from tests.session import once_a_session

pytestmark = pytest.mark.cpu

SIZES = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 "
    "--tokenizer-type NullTokenizer --vocab-size 128 --padded-vocab-size 128 "
)
LLAMA = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm "
    "--disable-bias-linear "
)
# Runs of a family, by the flags that are added.
EXACT = """
gpt2
gpt2 --openai-gelu
gpt2 --untie-embeddings-and-output-weights
gpt2 --norm-epsilon 1e-4
gpt2 --ffn-hidden-size 48
llama
llama --untie-embeddings-and-output-weights
llama --group-query-attention --num-query-groups 2
llama --kv-channels 16
llama --rotary-base 50000
llama --use-rope-scaling --rope-scaling-factor 32
qwen2 --add-qkv-bias
qwen3 --qk-layernorm
megatron-bert
megatron-bert --openai-gelu
megatron-bert --bert-no-binary-head
megatron-bert --untie-embeddings-and-output-weights
""".strip().splitlines()
# the last flag is named
REFUSED = """
gpt2 --position-embedding-type none
gpt2 --swiglu
gpt2 --num-experts 2
gpt2 --window-size 4,0 --window-attn-skip-freq 2
llama --no-rope-freq 2
llama --qk-layernorm --add-qkv-bias
llama --qk-l2-norm
megatron-bert --position-embedding-type rope
""".strip().splitlines()


@once_a_session
def outcomes() -> dict[str, tuple | str]:
    """The losses of both, and the model_type that was written; or the line with which
    the export ended."""
    with tempfile.TemporaryDirectory() as folder:
        return run_world(1, exports, Path(folder), timeout=500)[0]


@pytest.mark.parametrize("case", EXACT)
def test_what_the_family_holds_is_exact(case):
    ours, theirs, written = outcomes()[case]
    assert written == case.split()[0]
    assert ours > 5 and theirs == pytest.approx(ours, abs=2e-6)


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_family_holds_is_refused_by_name(case):
    flag = re.findall(r"--\S+", case)[-1]
    line = outcomes()[case]
    assert re.match(rf"(--[\w-]+, )*{flag}\b.*: transformers' ", line), line


def exports(rank: int, folder: Path) -> dict[str, tuple | str]:
    from megatron_2bw.tools.convert import megatron

    megatron.use_cpu()
    results = {}
    for number, case in enumerate(EXACT + REFUSED):
        path = folder / str(number)
        kind, _, flags = case.partition(" ")
        try:
            results[case] = exported(path, kind, flags)
        except UserError as error:
            results[case] = str(error)
            assert not list(path.glob("*hf*"))
    return results


def exported(folder: Path, kind: str, flags: str) -> tuple[float, float, str]:
    import transformers
    from megatron.core import dist_checkpointing

    from megatron_2bw.tools.convert import megatron, work

    bert = kind == "megatron-bert"
    if kind not in ("gpt2", "megatron-bert"):
        flags += f" {LLAMA}"
    args = megatron.arguments((SIZES + flags).split(), "bert" if bert else "gpt")
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(5))
    inputs = {}
    if bert and args.bert_binary_head:
        inputs["token_type_ids"] = (torch.arange(16) >= 8).long().expand(2, -1)
        inputs["next_sentence_label"] = torch.tensor([0, 1])
    # the model as a run builds it
    as_built = mock.patch.object(megatron, "of_one_rank", lambda args: args)
    with as_built, megatron.whole_model(args, "cpu") as (model, state):
        torch.manual_seed(3)
        for parameter in model.eval().parameters():
            parameter.data += torch.randn_like(parameter) * 0.2
        with torch.no_grad():
            if bert:
                ours = loss_of_bert(model, tokens, **inputs)
            else:
                mask = torch.ones(1, 1, 16, 16).triu(1) > 0
                places = torch.arange(16).expand(2, -1)
                losses = model(tokens, places, mask, labels=tokens.roll(-1, 1))
                ours = losses[:, :-1].mean()
        checkpoint = folder / "run" / "iter_0000001"
        checkpoint.mkdir(parents=True)
        content = {"args": args, "iteration": 1, "model": state}
        dist_checkpointing.save(content, str(checkpoint))
    (folder / "run" / TRACKER).write_text("1")
    out = folder / "hf"
    work.export_model(
        argparse.Namespace(source=folder / "run", ckpt_step=None, like=None, out=out)
    )
    config = json.loads((out / "config.json").read_text())
    architecture = getattr(transformers, config["architectures"][0])
    with torch.no_grad():
        loaded = architecture.from_pretrained(out).eval()
        theirs = loaded(tokens, labels=tokens, **inputs).loss
    return float(ours), float(theirs), config["model_type"]


def loss_of_bert(model, tokens, token_type_ids=None, next_sentence_label=None):
    mask = torch.ones_like(tokens)
    words, order = model(tokens, mask, token_type_ids, tokens)
    loss = words.mean()
    if next_sentence_label is not None:
        loss += torch.nn.functional.cross_entropy(order.float(), next_sentence_label)
    return loss
