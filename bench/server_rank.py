"""One rank of bench/slow_links.py: a training run that prints the end time and the sent bytes of each iteration.

    python bench/server_rank.py CORE FORWARD BACKWARD FLAGS...     (environment as torchrun sets it)

It runs on that core; every microbatch's forward and backward also sleep that many seconds. At the end of each iteration
it prints a line of PREFIX and a JSON object.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path

PREFIX = "@iteration "


def main() -> None:
    core, forward, backward, *argv = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})  # before torch starts its threads
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from megatron_2bw import cpu

    cpu.install()  # before Megatron is imported
    from megatron.training import training

    from bench.emulated import train
    from bench.servers import sent_bytes

    step, count = training.train_step, 0

    @functools.wraps(step)
    def counted_step(*args, **kwargs):
        nonlocal count
        result = step(*args, **kwargs)
        count += 1
        line = PREFIX + json.dumps({"iteration": count, "end": time.monotonic(), "sent": sent_bytes()})
        os.write(1, f"\n{line}\n".encode())  # in one write; it fails and ends the run if the reader has exited
        return result

    training.train_step = counted_step
    train(int(os.environ["RANK"]), argv, float(forward), float(backward))


if __name__ == "__main__":
    main()
