"""megatron-2bw sample: the text that transformers generates from the same weights, and
how a token is chosen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_2bw.base.local_ranks import own_output, run_world
from megatron_2bw.cli import main
from megatron_2bw.tools.convert.sample import generate, printable
from tests.distributed.test_convert import convert, folder, made  # noqa: F401  (folder is a fixture)

pytestmark = pytest.mark.cpu

PROMPT = [5, 17, 900, 3]


def sampled(rank: int, words: list[str]) -> list[int]:
    assert main(["sample", *words]) == 0
    return [int(word) for word in own_output().splitlines()[-1].split()]


def test_the_likeliest_tokens_are_those_of_transformers(folder):  # noqa: F811
    """Exact: no two tokens of these random models are nearly as likely. Without a
    tokenizer words are numbers."""
    expected = made("llama").generate(
        torch.tensor([PROMPT]),
        do_sample=False,
        max_new_tokens=12,
        eos_token_id=None,
        pad_token_id=0,
    )
    words = [
        "--prompt",
        " ".join(map(str, PROMPT)),
        *"--tokens 12 --temperature 0 --device cpu".split(),
    ]
    assert run_world(1, sampled, [str(folder("llama") / "ckpt"), *words]) == [
        expected[0].tolist()
    ]


def test_no_row_of_padding_is_drawn(folder, tmp_path):  # noqa: F811
    """Of 2048 rows, all nearly as likely at this temperature, the first 1001 are
    tokens."""
    pad = ["--make-vocab-size-divisible-by", "2048"]
    convert("import", folder("gpt2") / "hf", "--save", tmp_path / "ckpt", *pad)
    words = [
        str(tmp_path / "ckpt"),
        "--prompt",
        "5",
        "--tokens",
        "30",
        "--temperature",
        "1000",
        "--device",
        "cpu",
    ]
    assert (
        len([token for token in run_world(1, sampled, words)[0] if token < 1001]) == 31
    )


def chosen(
    number: int,
    temperature: float,
    top_k: int | None = None,
    seed: int = 1,
    end: int | None = None,
):
    """Tokens after [0], from a model whose next token is likely 1 (60 %), 2 (30 %) or 3
    (10 %) after any text."""
    seen: list[list[int]] = []

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens[0].tolist())
        return (
            torch.tensor([0.0, 0.6, 0.3, 0.1])
            .log()
            .expand(1, tokens.shape[1], 4)
            .clone()
        )

    options = SimpleNamespace(
        tokens=number, temperature=temperature, top_k=top_k, seed=seed
    )
    return list(generate(logits, [0], 3, end, options)), seen


def test_how_a_token_is_chosen(cpu_layer):
    assert chosen(5, 0.0)[0] == [1] * 5
    counts = torch.bincount(torch.tensor(chosen(4000, 1.0)[0]), minlength=4) / 4000
    # seed 1: four standard deviations
    assert torch.allclose(counts, torch.tensor([0.0, 0.6, 0.3, 0.1]), atol=0.03)
    assert set(chosen(400, 1.0, top_k=2)[0]) == {1, 2} and set(chosen(400, 5.0)[0]) == {
        1,
        2,
        3,
    }
    assert (
        chosen(50, 1.0, seed=2)[0]
        == chosen(50, 1.0, seed=2)[0]
        != chosen(50, 1.0, seed=3)[0]
    )


def test_the_end_and_a_text_that_is_longer_than_the_model(cpu_layer):
    found, seen = chosen(6, 0.0)
    assert len(found) == 6 and seen == [
        [0],
        [0, 1],
        [0, 1, 1],
        [1, 1, 1],
        [1, 1, 1],
        [1, 1, 1],
    ]
    assert chosen(6, 0.0, end=1)[0] == []


def test_the_text_does_not_control_the_terminal():
    text = "ein Wört\tof 日本\n\x1b[2J\r\x85\u2028\x00 end"
    assert printable(text) == "ein Wört\tof 日本\n\\x1b[2J\\r\\x85\\u2028\\x00 end"
