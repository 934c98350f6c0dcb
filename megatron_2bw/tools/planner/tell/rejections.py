"""The plans that a search rejected, by cause, and what would fit where nothing does.
Pure Python."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from megatron_2bw.tools.planner.cost.memory import GIB
from megatron_2bw.tools.planner.cost.simulated import Cost, Estimate
from megatron_2bw.tools.planner.descriptions.cluster import GPUS
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.find.advice import ranked
from megatron_2bw.tools.planner.find.search import Search, on_fewer
from megatron_2bw.tools.planner.find.space import Space
from megatron_2bw.tools.planner.tell.explain import (
    ESTIMATED,
    Result,
    gib,
    gpus,
    part_flags,
    rate,
    wrapped,
)

SHORTEST = 512  # tokens of a sequence that is proposed


def rejections(result: Result) -> str:
    """The rejected plans by cause, and the fastest with a name of its own that another
    known GPU would hold."""
    search = result.search
    lines = [
        "Illegal plans by cause:" if search.rejected else "Illegal plans by cause: none"
    ]
    for cause, count in search.rejected.most_common():
        lines.append(f"  {count:6}  {cause}")
    title = "Plans that do not fit and may be faster than plans of the table"
    lines.append(f"{title} ({ESTIMATED}): {len(search.too_large)}")
    large = _faster(result)
    if large is not None:
        need, room = large.fullest
        room -= result.cost.spare_bytes
        text = f"its fullest stage needs {gib(need)}, and {gib(room)} are allowed."
        lines.append(wrapped(f"{rate(large)} does not fit: {text}"))
    return "\n".join(lines)


def _faster(result: Result) -> Estimate | None:
    """The first plan that is faster than one of the table, among nine that do not fit,
    have a name of their own and would fit another known GPU."""
    cost = result.cost
    named = {each.plan.title for each in result.estimates + result.tight}
    largest = GIB * max(gpu.memory_gib for gpu in GPUS.values())
    slowest = min(estimate.throughput for estimate in result.estimates)
    tried = 0
    for plan in result.search.too_large:
        if plan.title not in named and cost.gpu_bytes(plan) <= largest:
            estimate = cost.estimate(plan)
            tried += 1
            if estimate.throughput > slowest:
                return estimate
            if tried == 9:
                break
    return None


def nothing_fits(cost: Cost, space: Space, search: Search) -> str:
    """Why a search found no plan: the least memory that a plan needs, and the remedies
    (choices, memory, GPUs)."""
    if not search.too_large:
        return _nothing_legal(cost, space, search)
    smallest = min(search.too_large, key=cost.gpu_bytes)
    length = f"Nothing fits with --seq-length {cost.model.sequence}."
    plans = f"The smallest of {len(search.too_large)} plans, {smallest.title},"
    need = gib(cost.memory.heaviest(smallest))
    allowed = gib(cost.allowed(smallest) - cost.spare_bytes)
    whole = f"{cost.cluster.device.memory_gib:g} GiB"
    remedies = "; or ".join(_remedies(cost, space, smallest))
    return (
        f"{length} {plans} needs {need} on its heaviest stage ({ESTIMATED}), and {allowed} of {whole} are allowed. "
        f"What would fit: {remedies or 'a smaller model, or a larger batch on more servers'}."
    )


def _nothing_legal(cost: Cost, space: Space, search: Search) -> str:
    causes = [f"{cause} ({count})" for cause, count in search.rejected.most_common()]
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
    )
    other = _fitting(cost, replace(every, extrapolate=space.extrapolate))
    other = other or _fitting(cost, every)
    if other is not None:
        flags = shlex.join(other.flags(cost.precision))
        yield f"on these GPUs the choices that the flags exclude: {flags}"
    size = cost.gpu_bytes(smallest) / GIB
    larger = [gpu for gpu in GPUS.values() if gpu.memory_gib >= size]
    if larger:
        name = min(larger, key=attrgetter("memory_gib", "name")).name
        yield f"GPUs of {math.ceil(10 * size) / 10:g} GiB or more, such as {name}"
    large, *devices = (
        replace(each, host_gib=1e6)
        for each in (cost.cluster.device, *cost.cluster.devices)
    )
    cluster = replace(cost.cluster, device=large, devices=tuple(devices))
    held = _fitting(cost.on(cluster), space)
    if held is not None and held.host:
        size = math.ceil(max(cost.memory.host_bytes(held)) / GIB)
        yield f"{size} GiB of host memory for each GPU (host_gib), with {held.title}"
    if other is None:
        yield from _elsewhere(cost, space)


def _elsewhere(cost: Cost, space: Space) -> Iterator[str]:
    """The fewest servers, and the longest of shorter sequences, with which a plan
    fits."""
    cluster = cost.cluster
    for times in (2, 4, 8, 16, 32, 64):
        larger = replace(
            cluster, servers=times * cluster.servers, devices=times * cluster.devices
        )
        plan = _fitting(cost.on(larger), space)
        if plan:
            yield f"{larger.servers} servers ({larger.gpus} GPUs), with {plan.title}"
            break
    length = cost.model.sequence // 2
    while length >= SHORTEST and not cluster.profile:  # which is of one length
        shorter = cost.on(cluster, replace(cost.model, sequence=length))
        plan = _fitting(shorter, space)
        if plan:
            yield f"--seq-length {length}, with {plan.title}"
            break
        length //= 2


def _fitting(cost: Cost, space: Space) -> Plan | None:
    """The plan that is recommended, if it has a microbatch for each stage."""
    plans, _ = ranked(Search(cost, space), 1)
    if plans and plans[0].microbatches >= plans[0].depth:
        return plans[0]
    return None
