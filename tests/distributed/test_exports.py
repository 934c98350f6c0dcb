"""Exports by flag of the architecture: transformers' loss is Megatron's, or a line
names the flag."""

from __future__ import annotations

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
from tests.session import once_a_session

pytestmark = pytest.mark.cpu

SIZES = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 "
    "--tokenizer-type NullTokenizer --vocab-size 128 --padded-vocab-size 128"
)
LLAMA = "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear"
FAMILY = {"gpt2": "", "megatron-bert": ""} | dict.fromkeys(
    ("llama", "qwen2", "qwen3"), LLAMA
)
# One run for each |, with the flags of its family and these.
EXACT = {
    "gpt2": (
        " | --openai-gelu | --untie-embeddings-and-output-weights | --norm-epsilon "
        "1e-4 | --ffn-hidden-size 48"
    ),
    "llama": " | --untie-embeddings-and-output-weights | --group-query-attention "
    "--num-query-groups 2 | "
    "--kv-channels 16 | --rotary-base 50000 | --use-rope-scaling --rope-scaling-factor 32",
    "qwen2": "--add-qkv-bias",
    "qwen3": "--qk-layernorm",
    "megatron-bert": (
        " | --openai-gelu | --bert-no-binary-head | "
        "--untie-embeddings-and-output-weights"
    ),
}
REFUSED = {  # the last flag is named
    "gpt2": (
        "--position-embedding-type none | --swiglu | --num-experts 2 | --window-size "
        "4,0 --window-attn-skip-freq 2"
    ),
    "llama": "--no-rope-freq 2 | --qk-layernorm --add-qkv-bias | --qk-l2-norm",
    "megatron-bert": "--position-embedding-type rope",
}


def cases(table: dict[str, str]) -> list[tuple[str, str]]:
    return [
        (kind, flags.strip())
        for kind, rows in table.items()
        for flags in rows.split("|")
    ]


@once_a_session
def outcomes() -> dict[tuple, tuple | str]:
    """The losses of both, and the model_type that was written; or the line with which
    the export ended."""
    with tempfile.TemporaryDirectory() as folder:
        return run_world(1, exports, Path(folder), timeout=500)[0]


@pytest.mark.parametrize("kind, flags", cases(EXACT))
def test_what_the_family_holds_is_exact(kind, flags):
    ours, theirs, written = outcomes()[kind, flags]
    assert written == kind and ours > 5 and theirs == pytest.approx(ours, abs=2e-6)


@pytest.mark.parametrize("kind, flags", cases(REFUSED))
def test_what_no_family_holds_is_refused_by_name(kind, flags):
    *_, flag = (word for word in flags.split() if word.startswith("--"))
    line = outcomes()[kind, flags]
    assert re.match(rf"(--[\w-]+, )*{flag}\b.*: transformers' ", line), line


def exports(rank: int, folder: Path) -> dict[tuple, tuple | str]:
    from megatron_2bw.tools.convert import megatron

    megatron.use_cpu()
    found: dict[tuple, tuple | str] = {}
    for number, case in enumerate([*cases(EXACT), *cases(REFUSED)]):
        try:
            found[case] = exported(folder / str(number), *case)
        except UserError as error:
            found[case] = str(error)
            assert not list((folder / str(number)).glob("*hf*"))
    return found


def exported(folder: Path, kind: str, flags: str) -> tuple[float, float, str]:
    import transformers
    from megatron.core import dist_checkpointing

    from megatron_2bw.tools.convert import megatron, work

    bert = kind == "megatron-bert"
    args = megatron.arguments(
        f"{SIZES} {FAMILY[kind]} {flags}".split(), "bert" if bert else "gpt"
    )
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(5))
    types, order = (torch.arange(16) >= 8).long().expand(2, -1), torch.tensor([0, 1])
    # the model as a run builds it
    whole = mock.patch.object(megatron, "of_one_rank", lambda args: args)
    with whole, megatron.whole_model(args, "cpu") as (model, state):
        torch.manual_seed(3)
        for parameter in model.eval().parameters():
            parameter.data += torch.randn_like(parameter) * 0.2
        with torch.no_grad():
            if bert:
                output = model(
                    tokens,
                    torch.ones_like(tokens),
                    types if args.bert_binary_head else None,
                    tokens,
                )
                ours = output[0].mean()
                if args.bert_binary_head:
                    ours += torch.nn.functional.cross_entropy(output[1].float(), order)
            else:
                mask = torch.ones(1, 1, 16, 16).triu(1) > 0
                ours = model(
                    tokens,
                    torch.arange(16).expand(2, -1),
                    mask,
                    labels=tokens.roll(-1, 1),
                )[:, :-1].mean()
        checkpoint = folder / "run" / "iter_0000001"
        checkpoint.mkdir(parents=True)
        dist_checkpointing.save(
            {"args": args, "iteration": 1, "model": state}, str(checkpoint)
        )
    (folder / "run" / "latest_checkpointed_iteration.txt").write_text("1")
    out = folder / "hf"
    work.export_model(
        argparse.Namespace(source=folder / "run", ckpt_step=None, like=None, out=out)
    )
    config = json.loads((out / "config.json").read_text())
    loaded = (
        getattr(transformers, config["architectures"][0]).from_pretrained(out).eval()
    )
    asked = (
        dict(token_type_ids=types, next_sentence_label=order)
        if bert and args.bert_binary_head
        else {}
    )
    with torch.no_grad():
        return (
            float(ours),
            float(loaded(tokens, labels=tokens, **asked).loss),
            config["model_type"],
        )
