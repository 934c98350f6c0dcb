"""Data preparation: text to Megatron's .bin and .idx. docs/data.md has the commands."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, not the installed one

from megatron_2bw.data.preprocess_cli import main

if __name__ == "__main__":
    sys.exit(main())
