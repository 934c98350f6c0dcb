"""Data preparation: text to Megatron's .bin and .idx. docs/data.md has the commands."""

import sys

from megatron_2bw.data.preprocess_cli import main

if __name__ == "__main__":
    sys.exit(main())
