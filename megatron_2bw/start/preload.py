"""What the server of local_ranks imports once: torch, Megatron and this project; each rank is forked from that.

The CPU stands in for CUDA, unless MEGATRON_2BW_WORLD_DEVICE is cuda.
"""

import argparse
import atexit
import functools
import gc
import logging
import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

from megatron_2bw import cpu  # noqa: E402

if os.environ.get("MEGATRON_2BW_WORLD_DEVICE") == "cuda":
    # Imports ask torch.cuda.is_available(). It would start CUDA, and no forked rank could use CUDA then.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
else:
    cpu.install()

import megatron.core.models.mimo.optimizer  # noqa: E402
import megatron.core.tokenizers.text.models  # noqa: E402  (it imports transformers)
import megatron.training.training  # noqa: E402
import torch._dynamo.trace_rules  # noqa: E402, F401  (init_process_group's)
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset  # noqa: E402
from megatron.training.argument_utils import ArgumentGroupFactory as Factory  # noqa: E402

import megatron_2bw.checkpoints.optimizer_state  # noqa: E402
import megatron_2bw.checkpoints.state  # noqa: E402
import megatron_2bw.mcore.patches  # noqa: E402
import megatron_2bw.mcore.runtime  # noqa: E402
import megatron_2bw.start.launch  # noqa: E402
import megatron_2bw.tasks.bert  # noqa: E402
import megatron_2bw.tasks.gpt  # noqa: E402, F401

# Each of Megatron's two parsers reads the source of its classes.
docstrings = functools.cache(functools.partial(Factory._get_field_docstrings, Factory.__new__(Factory)))
Factory._get_field_docstrings = lambda self, of_class: docstrings(of_class)
megatron.training.training.ft_integration.arguments.add_megatron_arguments(argparse.ArgumentParser())
MockGPTLowLevelDataset.size = 2000  # documents; building the index of 100,000 costs a second a run
gc.collect()
gc.freeze()  # the ranks' collections then neither scan these objects nor copy their pages
atexit.register(gc.unfreeze)
