"""What the server of local_ranks imports once: torch, Megatron and this project; each
rank is forked from that.

The CPU stands in for CUDA, unless MEGATRON_2BW_WORLD_DEVICE is cuda.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import logging
import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

from megatron_2bw.mcore import cpu  # noqa: E402

if os.environ.get("MEGATRON_2BW_WORLD_DEVICE") == "cuda":
    # Imports ask torch.cuda.is_available(). It would start CUDA, and no forked rank
    # could use CUDA then.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
else:
    cpu.install()

import megatron.core.models.mimo.optimizer  # noqa: E402
import megatron.training.training  # noqa: E402
import torch._dynamo.trace_rules  # noqa: E402, F401  (init_process_group's)
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset  # noqa: E402

from megatron_2bw.mcore import patches, runtime  # noqa: E402, F401
from megatron_2bw.mcore.checkpoints import optimizer_state, state  # noqa: E402, F401
from megatron_2bw.run.flags import quick_check  # noqa: E402
from megatron_2bw.run.start import launch  # noqa: E402, F401
from megatron_2bw.run.tasks import bert, gpt  # noqa: E402, F401

# it imports transformers; Megatron 0.20 has it elsewhere
with contextlib.suppress(ModuleNotFoundError):
    importlib.import_module("megatron.core.tokenizers.text.models")

# A run makes these parsers, Megatron's twice, and looks for plugins of
# torch.distributed: a rank finds them made.
add_arguments = megatron.training.arguments.add_megatron_arguments
parsers = []
for _ in range(2):
    parsers.append(add_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def ready_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    ready = parsers.pop() if parsers else add_arguments(parser)
    # which Megatron reads when it makes one
    ready.set_defaults(local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    return ready


megatron.training.arguments.add_megatron_arguments = ready_parser
quick_check.remember(parsers[0])
quick_check.table.cache_clear()
for schedule in ("megatron", "2bw"):
    quick_check.parser_of("gpt", schedule)
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
importlib.metadata.entry_points(group="torch.distributed.backends")
# documents; building the index of 100,000 costs a second a run
MockGPTLowLevelDataset.size = 2000
gc.collect()
# the ranks' collections then neither scan these objects nor copy their pages
gc.freeze()
