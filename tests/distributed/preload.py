"""Imported once by the fork server: torch and Megatron, with the CPU answering for CUDA (not for a bench on a GPU)."""

import logging
import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

from megatron_2bw import cpu  # noqa: E402

if os.environ.get("MEGATRON_2BW_WORLD_DEVICE") != "cuda":
    cpu.install()

import megatron.core.tokenizers.text  # noqa: E402, F401  (it imports transformers)
import megatron.training.training  # noqa: E402, F401

import megatron_2bw.bert  # noqa: E402, F401
import megatron_2bw.gpt  # noqa: E402, F401
import megatron_2bw.launch  # noqa: E402, F401
import megatron_2bw.runtime  # noqa: E402, F401
