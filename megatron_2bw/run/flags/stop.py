"""Ending a rank whose command line cannot run, with one line."""

import os
import sys
import time
from typing import NoReturn

from megatron_2bw.base.errors import report_error

PATIENCE = 5  # seconds that a rank with a peer's failure waits to be stopped


def stop(line: str) -> NoReturn:
    """End this rank with status 2; the first rank of a job reports why.

    torchrun then stops the others. A rank that still runs after PATIENCE has an error
    of its own and reports it.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(PATIENCE)
    report_error(program(), line)
    sys.exit(2)


def program() -> str:
    return os.path.basename(sys.argv[0])
