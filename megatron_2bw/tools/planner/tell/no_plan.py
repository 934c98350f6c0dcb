"""What would fit where no plan does. Pure Python."""

import math
import shlex
from collections.abc import Iterator
from operator import attrgetter

from megatron_2bw.tools.planner.cost.memory import GIB
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions.cluster import GPUS
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.find.advice import ranked
from megatron_2bw.tools.planner.find.search import Search, on_fewer
from megatron_2bw.tools.planner.find.space import Space
from megatron_2bw.tools.planner.tell.explain import ESTIMATED, gib, gpus, part_flags


def nothing_fits(cost: Cost, space: Space, search: Search) -> str:
    """Why a search found no plan: the least memory that a plan needs, and the remedies
    (choices, memory)."""
    if not search.too_large:
        return _nothing_legal(cost, space, search)
    smallest = min(search.too_large, key=cost.gpu_bytes)
    need = gib(cost.memory.heaviest(smallest))
    allowed = gib(cost.allowed(smallest) - cost.spare_bytes)
    remedies = "; or ".join(_remedies(cost, space, smallest))
    return (
        f"Nothing fits with --seq-length {cost.model.sequence}. The smallest plan, {smallest.title}, needs {need} on "
        f"its heaviest stage ({ESTIMATED}), and {allowed} of {cost.cluster.device.memory_gib:g} GiB are allowed. "
        f"What would fit: {remedies or 'more GPUs, a shorter sequence or a smaller model'}."
    )


def _nothing_legal(cost: Cost, space: Space, search: Search) -> str:
    causes = []
    for cause, count in search.rejected.most_common():
        causes.append(f"{cause} ({count})")
    if not causes:
        causes = ["no product of the sizes that the flags name divides the GPUs"]
    where = f"on {gpus(cost)} with a global batch of {space.batch}"
    text = f"No plan is legal {where}: {'; '.join(causes)}."
    fewer = on_fewer(cost, space)
    if fewer:
        on, _, plan = fewer
        text += f" Fewer GPUs have one: {part_flags(on.cluster)}, {plan.title}."
    return text


def _remedies(cost: Cost, space: Space, smallest: Plan) -> Iterator[str]:
    """What would make a plan fit."""
    every = Space(
        space.batch,
        context=space.context,
        grad_reduce_in_bf16=space.grad_reduce_in_bf16,
        max_gap=space.max_gap,
    )
    plans, _ = ranked(Search(cost, every), 1)
    for plan in plans:
        flags = shlex.join(plan.flags(cost.precision))
        yield f"on these GPUs the choices that the flags exclude: {flags}"
    size = cost.gpu_bytes(smallest) / GIB
    larger = []
    for gpu in GPUS.values():
        if gpu.memory_gib >= size:
            larger.append(gpu)
    if larger:
        name = min(larger, key=attrgetter("memory_gib", "name")).name
        rounded = math.ceil(10 * size) / 10
        yield f"GPUs of {rounded:g} GiB or more, such as {name}"
