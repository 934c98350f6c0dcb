"""The one way to start ranks: torchrun's command, its environment, and running it in
this process."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_2bw.base.errors import report_error

# of the clone, with the entry scripts; of a wheel too
ROOT = Path(__file__).resolve().parents[3]

# A store for each start of the ranks, with --rdzv-backend c10d: its port is chosen long
# before rank 0 listens there, so another process may have taken it. A run that does not
# restart keeps torchrun's own store.
OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def torchrun(
    ranks: int, task: str = "gpt", *options: str, script: str | Path | None = None
) -> list[str]:
    """The command line up to the flags of the entry script of `task`, or of another
    script.

    ranks    on this host
    options  of torchrun; without any, this host alone: other runs on the machine do not
             disturb it
    """
    script = script or ROOT / f"pretrain_{task}_2bw.py"
    options = options or ("--standalone", "--local-addr", "127.0.0.1")
    module = [sys.executable, "-m", "torch.distributed.run"]
    return [*module, *options, "--nproc-per-node", str(ranks), str(script)]


def run_ranks(prog: str, command: Sequence[str]) -> int:
    """Run the ranks of a command of `torchrun` in this process and wait; without
    torchrun's own report.

    The status of the first rank that failed; 128 and its number after a signal, which
    reaches all ranks.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # The ranks get ten minutes for a save after a signal; torchrun's default is half a
    # minute.
    os.environ.update({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"} | environment())
    # torchrun's agent repeats what the ranks have reported
    logging.disable(logging.ERROR)
    options = parse_args(command[3:])
    options.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT,SIGUSR1,SIGUSR2"
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        options.signals_to_handle += ",SIGHUP"
    try:
        run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            report_error(prog, f"rank {rank} was ended by signal {-failure.exitcode}")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


def environment() -> dict[str, str]:
    """A core for each rank, no list of missing libraries; what the user has set
    stays."""
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return defaults | os.environ


def shared_store() -> str | None:
    """A line if torchrun has started the ranks again with the first start's store,
    whose addresses are gone."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not again or os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False":
        return None
    return (
        f"torchrun: --max-restarts works only with {OWN_STORES}=1 in the environment "
        "and --rdzv-backend c10d"
    )


def start(
    command: Sequence[str], stdout: Any = subprocess.PIPE, **options: Any
) -> subprocess.Popen[str]:
    """Start a command in a session of its own, without input; its errors also go to
    `stdout`, as text."""
    options.setdefault("env", environment())
    options.setdefault("stderr", subprocess.STDOUT)
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        start_new_session=True,
        text=True,
        errors="replace",
        **options,
    )


def log_interval(iterations: int) -> int:
    """At most 10, and a divisor: Megatron logs no line after the last whole
    interval."""
    interval = 10
    while iterations % interval:
        interval -= 1
    return interval
