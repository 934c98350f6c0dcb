"""The planner, from a clone: python scripts/plan.py is megatron-2bw-plan."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this clone, not the installed one

from megatron_2bw.planner.cli import main

if __name__ == "__main__":
    sys.exit(main())
