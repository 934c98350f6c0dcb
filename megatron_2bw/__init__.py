"""PipeDream-2BW: schedules in pure Python, an engine on plain torch, an extension of
Megatron-core.

Importing the package changes nothing and loads nothing; a public name is loaded when it
is asked for (PEP 562).
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "megatron_2bw.schedules": (
        "SCHEDULES Action Schedule ScheduleError Shape TwoBW parse schedule_of validate"
    ),
    "megatron_2bw.tools.timelines.simulator": "Times simulate",
    "megatron_2bw.engine.process_groups": "StepGroup",
    "megatron_2bw.engine.p2p": "Neighbours connect",
    "megatron_2bw.engine.pipeline": "Pipeline Stage Update",
    "megatron_2bw.engine.updates": "InPlaceUpdate LateUpdate StashedUpdate",
    "megatron_2bw.engine.weights": "WeightStores",
    "megatron_2bw.engine.worker": "Worker",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
