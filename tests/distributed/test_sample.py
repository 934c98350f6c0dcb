"""megatron-2bw sample: the text that transformers generates from the same weights, and
how a token is chosen."""

from types import SimpleNamespace

import pytest
import torch

from megatron_2bw.base.local_ranks import own_output, run_world
from megatron_2bw.cli import main
from megatron_2bw.tools.convert.sample import generate, printable
from tests.distributed.test_convert import convert, folder, made  # noqa: F401  (folder is a fixture)

pytestmark = pytest.mark.cpu

PROMPT = [5, 17, 900, 3]
CHANCES = torch.tensor([0.0, 0.6, 0.3, 0.1])


def sampled(rank: int, words: list[str]) -> list[int]:
    assert main(["sample", *words, "--device", "cpu"]) == 0
    return list(map(int, own_output().splitlines()[-1].split()))


def test_the_likeliest_tokens_are_those_of_transformers(folder):  # noqa: F811
    """Exact: no two tokens of these random models are nearly as likely. Without a
    tokenizer words are numbers."""
    model = made("llama")
    prompt = torch.tensor([PROMPT])
    model.generation_config.eos_token_id = None
    (expected,) = model.generate(prompt, do_sample=False, max_new_tokens=12)
    words = f"{folder('llama')}/ckpt --tokens 12 --temperature 0 --prompt".split()
    (text,) = run_world(1, sampled, [*words, " ".join(map(str, PROMPT))])
    assert text == expected.tolist()


def test_no_row_of_padding_is_drawn(folder, tmp_path):  # noqa: F811
    """The first 1001 of 2048 rows are tokens; at this temperature all are nearly as
    likely."""
    pad = "--make-vocab-size-divisible-by 2048"
    convert(f"import {folder('gpt2')}/hf --save {tmp_path}/ckpt {pad}")
    words = f"{tmp_path}/ckpt --prompt 5 --tokens 30 --temperature 1000"
    (text,) = run_world(1, sampled, words.split())
    assert len(text) == 31 and max(text) < 1001


def chosen(number: int, temperature: float, end=None, **more):
    """The texts that a model sees whose next token has CHANCES after any text, and the
    tokens after [0]."""
    seen = []

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens[0].tolist())
        return CHANCES.log().expand(1, tokens.shape[1], 4).clone()

    words = dict(tokens=number, temperature=temperature, top_k=None, seed=1) | more
    options = SimpleNamespace(**words)
    return seen, list(generate(logits, [0], 3, end, options))


def test_how_a_token_is_chosen(cpu_layer):
    assert chosen(5, 0.0)[1] == [1] * 5
    _, tokens = chosen(4000, 1.0)
    counts = torch.bincount(torch.tensor(tokens), minlength=4)
    # seed 1: four standard deviations
    assert torch.allclose(counts / 4000, CHANCES, atol=0.03)
    assert set(chosen(400, 1.0, top_k=2)[1]) == {1, 2}
    again = chosen(50, 1.0, seed=2)
    assert chosen(50, 1.0, seed=2) == again
    assert chosen(50, 1.0, seed=3) != again


def test_the_end_and_a_text_that_is_longer_than_the_model(cpu_layer):
    seen, tokens = chosen(6, 0.0)
    assert len(tokens) == 6
    assert seen == [[0], [0, 1], [0, 1, 1]] + [[1, 1, 1]] * 3
    assert chosen(6, 0.0, end=1)[1] == []


def test_the_text_does_not_control_the_terminal():
    text = "ein Wört\tof 日本\n\x1b[2J\r\x85\u2028\x00 end"
    assert printable(text) == "ein Wört\tof 日本\n\\x1b[2J\\r\\x85\\u2028\\x00 end"
