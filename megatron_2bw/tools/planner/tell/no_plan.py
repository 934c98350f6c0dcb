"""Why there is no plan, and what to do. Pure Python."""

import math

from megatron_2bw.tools.planner.cost.memory import GIB
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.find.search import Search
from megatron_2bw.tools.planner.find.space import Space
from megatron_2bw.tools.planner.tell.explain import ESTIMATED, gib, gpus


def nothing_fits(cost: Cost, space: Space) -> str:
    """Why a search finds no plan: the causes if none is legal, else the least memory
    that a plan needs."""
    search = Search(cost, space)
    next(iter(search), None)
    if not search.too_large:
        causes = "; ".join(sorted(search.causes)) or (
            "no product of the sizes that the flags name is their number"
        )
        return f"No plan is legal on {gpus(cost)} with a global batch of {space.batch}: {causes}."
    smallest = min(search.too_large, key=cost.gpu_bytes)
    need = gib(cost.memory.heaviest(smallest))
    allowed = cost.allowed(smallest) / GIB
    device = cost.cluster.device
    text = (
        f"Nothing fits with --seq-length {cost.model.sequence}. The smallest plan, {smallest.title}, needs {need} on "
        f"its heaviest stage ({ESTIMATED}), and {allowed:.2f} GiB of {device.memory_gib:g} GiB are allowed. "
        "Exclude fewer choices, leave less free (--memory-margin), take more GPUs, a shorter sequence, a smaller model"
    )
    tenths = math.ceil(10 * cost.gpu_bytes(smallest) / GIB)
    return f"{text}, or GPUs of {tenths / 10:g} GiB or more."
