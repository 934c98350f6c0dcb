"""docs/finetune.md as it stands there: from a Hugging Face folder to one, for a tiny Llama and a tiny Qwen3."""

from __future__ import annotations

import re

import pytest

from tests.docs.test_quick_start import copy, run  # noqa: F401  (a fixture)
from tests.e2e.launcher import ROOT

BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "finetune.md").read_text(), re.S)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_there_and_back(kind, copy):  # noqa: F811
    make, convert, plan, train, export = (
        block.replace("llama", kind).replace("out/finetune", f"out/{kind}") for block in BLOCKS
    )
    run(make, copy)
    assert ("--qk-layernorm" in run(convert, copy)) == (kind == "qwen3")
    assert "--pipeline-model-parallel-size" in run(plan, copy)
    assert run(train, copy).count("lm loss:") == 5
    assert "2BW keeps two versions of" in run(export, copy)
