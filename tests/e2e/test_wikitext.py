"""The word perplexity of scripts/table2.py --gpt, by lm-eval, equals a direct
computation. Needs lm-eval."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORACLES = ROOT / "build" / "oracles"


def test_the_word_perplexity_equals_a_direct_computation(tmp_path, monkeypatch):
    python = (
        ORACLES / "bin" / "python"
        if (ORACLES / ".installed").exists()
        else Path(sys.executable)
    )
    if python == Path(sys.executable) and not find_spec("lm_eval"):
        pytest.skip("`make oracles` or pip install 'megatron_2bw[eval]'")
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pages = ["one two three two one", "three one two", "two two"]
    text = tmp_path / "wikitext.jsonl"
    text.write_text("".join(json.dumps({"page": page}) + "\n" for page in pages))
    tokenizer = Tokenizer(
        models.WordLevel(
            {"<end>": 0, "one": 1, "two": 2, "three": 3}, unk_token="<end>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", bos_token="<end>"
    )
    folder = tmp_path / "vanilla"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=8,
            n_positions=32,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    model.save_pretrained(folder)
    model.eval()

    # Page by page from the end token on, over the words of all pages.
    total = 0.0
    with torch.no_grad():
        for page in pages:
            ids = torch.tensor([[0, *tokenizer(page)["input_ids"]]])
            logits = model(ids).logits[0, :-1].log_softmax(-1)
            total -= float(logits.gather(1, ids[0, 1:, None]).sum())
    expected = math.exp(total / sum(len(page.split()) for page in pages))

    out = tmp_path / "out"
    words = ["--gpt", f"vanilla={folder}", "--wikitext", str(text), "--out", str(out)]
    subprocess.run(
        [python, ROOT / "scripts" / "table2.py", *words], check=True, timeout=250
    )
    (row,) = [
        row
        for row in json.loads((out / "table2.json").read_text())["rows"]
        if row["label"] == "vanilla"
    ]
    assert row["task"] == "wikitext" and row["mean"] == pytest.approx(
        expected, rel=1e-5
    )
    assert row["paper"] == 19.28
