"""Ending a rank whose command line cannot run, with one line."""

import os
import sys
import time
from typing import NoReturn

from megatron_2bw.base.errors import report_error
from megatron_2bw.base.files import write_json

PATIENCE = 5  # seconds that a rank with a peer's failure waits to be stopped


def stop(line: str) -> NoReturn:
    """End this rank with status 2; the first rank of a job reports why.

    torchrun then stops the others. A rank that still runs after PATIENCE has an error
    of its own and reports it.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(PATIENCE)
    report_error(program(), line)
    # torchrun ends with a report, and quotes this in it
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {
            "message": f"{program()}: error: {line}",
            "extraInfo": {"timestamp": str(int(time.time()))},
        }
        write_json(file, {"message": message})
    sys.exit(2)


def program() -> str:
    return os.path.basename(sys.argv[0])
