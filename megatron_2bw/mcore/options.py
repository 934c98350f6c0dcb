"""What a run asks of its runtime."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from megatron_2bw.mcore.correction import Correction
from megatron_2bw.schedules import Schedule


@dataclass(frozen=True)
class RunOptions:
    """The command line, resolved once (run/flags/resolve.py).

    schedule    of --pipeline-schedule, with its options
    transport   see `p2p.connect`
    timeout     see `p2p.connect`
    timed       whether Megatron's timers synchronise with the GPU inside forwards and
                backwards
    trace       the folder of --pipeline-trace
    wants_exit  whether this rank wants the run to end (a signal, its duration), asked
                at each REDUCE; the result reports whether any rank of the world said
                yes
    correction  of --two-bw-correction, by the microbatches of a batch; None without it
    evaluates   whether there may be evaluations
    """

    schedule: Schedule | None = None
    transport: str = "auto"
    timeout: timedelta | None = None
    timed: bool = False
    trace: Path | None = None
    wants_exit: Callable[[], bool] | None = None
    correction: Callable[[int], Correction] | None = None
    evaluates: bool = False
