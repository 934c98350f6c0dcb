"""The plans that a search rejected, by cause, and what would fit where nothing does.
Pure Python."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterator
from dataclasses import replace

from megatron_2bw.tools.planner.cost.memory import GIB
from megatron_2bw.tools.planner.cost.simulated import Cost
from megatron_2bw.tools.planner.descriptions.cluster import GPUS
from megatron_2bw.tools.planner.descriptions.plan import Plan
from megatron_2bw.tools.planner.find.advice import ranked
from megatron_2bw.tools.planner.find.search import Search, on_fewer
from megatron_2bw.tools.planner.find.space import Space
from megatron_2bw.tools.planner.tell.explain import (
    ESTIMATED,
    Result,
    gpus,
    part_flags,
    rate,
    wrapped,
)

SHORTEST = 512  # tokens of a sequence that is proposed


def rejections(result: Result) -> str:
    """The rejected plans by cause, and the fastest with a name of its own that another
    known GPU would hold."""
    cost, search, known = (
        result.cost,
        result.search,
        {e.plan.title for e in result.estimates + result.tight},
    )
    lines = [
        "Illegal plans by cause:" + " none" * (not search.rejected),
        *(f"  {count:6}  {cause}" for cause, count in search.rejected.most_common()),
        (
            "Plans that do not fit and may be faster than plans of the table "
            f"({ESTIMATED}): {len(search.too_large)}"
        ),
    ]
    largest = GIB * max(gpu.memory_gib for gpu in GPUS.values())
    others = (
        plan
        for plan in search.too_large
        if plan.title not in known and cost.gpu_bytes(plan) <= largest
    )
    slowest = min(estimate.throughput for estimate in result.estimates)
    faster = (
        large
        for large in map(cost.estimate, itertools.islice(others, 9))
        if large.throughput > slowest
    )
    for large in itertools.islice(faster, 1):
        need, room = (
            f"{size / GIB:.2f} GiB"
            for size in (large.fullest[0], large.fullest[1] - cost.spare_bytes)
        )
        lines.append(
            wrapped(
                f"{rate(large)} does not fit: its fullest stage needs {need}, and "
                f"{room} are allowed."
            )
        )
    return "\n".join(lines)


def nothing_fits(cost: Cost, space: Space, search: Search) -> str:
    """Why a search found no plan: the least memory that a plan needs, and the remedies
    (choices, memory, GPUs)."""
    if not search.too_large:
        causes = [
            f"{cause} ({count})" for cause, count in search.rejected.most_common()
        ]
        why = (
            "; ".join(causes)
            or "no product of the sizes that the flags name divides the GPUs"
        )
        fewer = on_fewer(cost, space)
        part = (
            f" Fewer GPUs have one: {part_flags(fewer[0].cluster)}, {fewer[2].title}."
            if fewer
            else ""
        )
        return (
            f"No plan is legal on {gpus(cost)} with a global batch of {space.batch}: "
            f"{why}.{part}"
        )
    smallest = min(search.too_large, key=cost.gpu_bytes)
    need, size, device = (
        cost.memory.heaviest(smallest),
        cost.gpu_bytes(smallest) / GIB,
        cost.cluster.device,
    )
    text = (
        f"Nothing fits with --seq-length {cost.model.sequence}. The smallest of "
        f"{len(search.too_large)} plans, "
        f"{smallest.title}, needs {need / GIB:.2f} GiB on its heaviest stage ({ESTIMATED}), and "
        f"{(cost.allowed(smallest) - cost.spare_bytes) / GIB:.2f} GiB of "
        f"{device.memory_gib:g} GiB are allowed."
    )
    larger = sorted(
        (gpu.memory_gib, gpu.name) for gpu in GPUS.values() if gpu.memory_gib >= size
    )
    remedies = [
        f"GPUs of {math.ceil(10 * size) / 10:g} GiB or more, such as {name}"
        for _, name in larger[:1]
    ]
    large, *devices = (
        replace(each, host_gib=1e6) for each in (device, *cost.cluster.devices)
    )
    held = _fitting(
        cost.on(replace(cost.cluster, device=large, devices=tuple(devices))), space
    )
    if held is not None and held.host:
        size = math.ceil(max(cost.memory.host_bytes(held)) / GIB)
        remedies.append(
            f"{size} GiB of host memory for each GPU (host_gib), with {held.title}"
        )
    every = Space(
        space.batch,
        context=space.context,
        grad_reduce_in_bf16=space.grad_reduce_in_bf16,
    )
    other = _fitting(cost, replace(every, extrapolate=space.extrapolate)) or _fitting(
        cost, every
    )
    if other is not None:
        flags = shlex.join(other.flags(cost.precision))
        remedies.insert(0, f"on these GPUs the choices that the flags exclude: {flags}")
    else:
        remedies += [
            f"{words}, with {plan.title}" for words, plan in _elsewhere(cost, space)
        ]
    return (
        f"{text} What would fit: "
        f"{'; or '.join(remedies) or 'a smaller model, or a larger batch on more servers'}."
    )


def _elsewhere(cost: Cost, space: Space) -> Iterator[tuple[str, Plan]]:
    """The fewest servers, and the longest of shorter sequences, with which a plan fits;
    with that plan."""
    cluster, model = cost.cluster, cost.model
    more = [
        replace(cluster, servers=2**k * cluster.servers, devices=2**k * cluster.devices)
        for k in range(1, 7)
    ]
    # A profile is of one length.
    shorter = [
        model.sequence >> k
        for k in range(1, 32)
        if model.sequence >> k >= SHORTEST and not cluster.profile
    ]
    for places in (
        ((f"{on.servers} servers ({on.gpus} GPUs)", cost.on(on)) for on in more),
        (
            (
                f"--seq-length {length}",
                cost.on(cluster, replace(model, sequence=length)),
            )
            for length in shorter
        ),
    ):
        yield from itertools.islice(
            (
                (words, plan)
                for words, there in places
                if (plan := _fitting(there, space))
            ),
            1,
        )


def _fitting(cost: Cost, space: Space) -> Plan | None:
    """The plan that is recommended, if it has a microbatch for each stage."""
    return next(
        (
            plan
            for plan in ranked(Search(cost, space), 1)[0]
            if plan.microbatches >= plan.depth
        ),
        None,
    )
