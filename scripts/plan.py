"""The planner, from a clone: python scripts/plan.py is megatron-2bw-plan."""

import sys

from megatron_2bw.planner.cli import main

if __name__ == "__main__":
    sys.exit(main())
