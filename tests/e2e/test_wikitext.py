"""The word perplexity of scripts/table2.py --gpt, by lm-eval, equals a direct
computation. Needs lm-eval."""

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
    python = Path(sys.executable)
    if (ORACLES / ".installed").exists():
        python = ORACLES / "bin" / "python"
    elif not find_spec("lm_eval"):
        pytest.skip("`make oracles` or pip install 'megatron_2bw[eval]'")
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pages = ["one two three two one", "three one two", "two two"]
    text = tmp_path / "wikitext.jsonl"
    text.write_text("".join(json.dumps({"page": page}) + "\n" for page in pages))
    words = {"<end>": 0, "one": 1, "two": 2, "three": 3}
    core = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", bos_token="<end>"
    )
    folder = tmp_path / "vanilla"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=8,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(folder)

    # Page by page from the end token on, over the words of all pages.
    total = 0.0
    for page in pages:
        ids = torch.tensor([[0, *tokenizer(page)["input_ids"]]])
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].log_softmax(-1)
        total -= float(scores.gather(1, ids[0, 1:, None]).sum())
    expected = math.exp(total / len(" ".join(pages).split()))

    out = tmp_path / "out"
    words = f"--gpt vanilla={folder} --wikitext {text} --out {out}".split()
    command = [python, ROOT / "scripts" / "table2.py", *words]
    subprocess.run(command, check=True, timeout=250)
    rows = json.loads((out / "table2.json").read_text())["rows"]
    (row,) = [row for row in rows if row["label"] == "vanilla"]
    assert row["task"] == "wikitext" and row["paper"] == 19.28
    assert row["mean"] == pytest.approx(expected, rel=1e-5)
