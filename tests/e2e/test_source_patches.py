"""patches/ on a Megatron source tree: it applies, and any entry script of the tree then
has --pipeline-schedule.

The tree is a copy of the installed package; a source checkout of the tag holds the same
files.
"""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_2bw.base import run_log
from tests.distributed.training import command
from tests.e2e.launcher import ROOT, forked, output_of, torchrun

PATCH = ROOT / "patches" / "megatron-lm-core_v0.19.patch"

# As the entry scripts of a checkout begin; only the lines on the CPU are this test's.
ENTRY = """
from megatron_2bw.mcore import cpu, patches, rebinding
cpu.install()
import megatron.training.training as training
assert training.__file__.startswith({tree!r}), training.__file__
rebinding.apply(patches.repairs() + patches.for_cpu())
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
args = parse_and_validate_args()
from megatron_2bw.run.tasks import gpt
config = pretrain_cfg_container_from_args(args, gpt.model_config(args))
pretrain(config, gpt.datasets_provider, ModelType.encoder_or_decoder, gpt.forward_step)
"""

# On a host without CUDA `pretrain_gpt_2bw.py` sets these; an entry script of a checkout
# is given them.
CPU_FLAGS = """
    --distributed-backend gloo --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion
    --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --rerun-mode disabled
""".split()


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    installed = Path(importlib.util.find_spec("megatron.training").origin).parents[1]
    copy = tmp_path_factory.mktemp("checkout")
    shutil.copytree(installed, copy / "megatron")
    apply = ["git", "apply", str(PATCH)]
    subprocess.run(apply, cwd=copy, check=True, capture_output=True)
    (copy / "pretrain.py").write_text(ENTRY.format(tree=str(copy)))
    return copy


def losses(output: str) -> list[str]:
    return [line.fields["lm loss"] for line in run_log.training(output)]


def test_two_iterations_of_2bw_in_the_patched_tree(tree):
    """The losses are those of pretrain_gpt_2bw.py, which rebinds names instead."""
    short = {"train_iters": 2, "lr_warmup_iters": 0}
    # the device is the entry script's choice
    words = [*command(2, 2, "2bw", device=None, **short), *CPU_FLAGS]
    paths = f"{tree}:{ROOT}"
    patched = torchrun(2, "pretrain.py", words, cwd=tree, PYTHONPATH=paths)
    found = losses(output_of(patched))
    rebound = forked(2, command(2, 2, "2bw", **short), documents=100_000)
    assert found == losses(rebound)
    assert len(found) == 2
