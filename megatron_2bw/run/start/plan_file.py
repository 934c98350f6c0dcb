"""A plan file (megatron-2bw plan --json) as a run reads it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FirstPlan:
    """The first plan of a file, which is the fastest.

    flags  of the model, the plan and a first training
    """

    model: str
    kind: str
    flags: list[str]
    mock_data: list[str]
    save_interval: list[str]
    gpus: int


def first_plan(content: Any) -> FirstPlan:
    """LookupError or TypeError if the content is that of another file."""
    plan = content["plans"][0]
    run = content["run"]
    words = [*run["model"], *plan["flags"], *plan["training"]]
    return FirstPlan(
        model=content["model"]["name"],
        kind=content["model"]["kind"],
        flags=[*map(str, words)],
        mock_data=[*map(str, run["data"])],
        save_interval=["--save-interval", str(plan["save_interval"])],
        gpus=plan["tensor"] * plan["context"] * plan["depth"] * plan["width"],
    )
