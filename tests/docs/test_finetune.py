"""docs/finetune.md as it stands there: from a Hugging Face folder to one, for a tiny
Llama."""

from __future__ import annotations

import re

from tests.docs.test_quick_start import copy, run  # noqa: F401  (a fixture)
from tests.e2e.launcher import ROOT

BLOCKS = re.findall(
    r"```bash\n(.*?)```", (ROOT / "docs" / "finetune.md").read_text(), re.S
)


def test_there_and_back(copy):  # noqa: F811
    make, convert, plan, train, export, finetune = BLOCKS
    run(make, copy)
    run(convert, copy)
    assert "--pipeline-model-parallel-size" in run(plan, copy)
    assert run(train, copy).count("lm loss:") == 5
    assert "2BW keeps two versions of" in run(export, copy)
    assert "adapter_model.safetensors" in run(finetune, copy)
