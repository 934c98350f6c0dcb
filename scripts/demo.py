"""Trains a small GPT for about two minutes: `megatron-2bw demo`, from a clone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, not the installed one

from megatron_2bw.demo import main
from megatron_2bw.processes import exit_on_signals

if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
