"""The plans that a search rejected, by cause, and what would fit where nothing does. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron_2bw.models.plan import Plan
from megatron_2bw.planner.cost.memory import GIB
from megatron_2bw.planner.cost.simulated import Cost
from megatron_2bw.planner.find.search import Search, on_fewer
from megatron_2bw.planner.find.space import Space
from megatron_2bw.planner.tell.explain import ESTIMATED, Result, part_flags, wrapped

SHORTEST = 512  # tokens of a sequence that is proposed


def rejections(result: Result) -> str:
    """The rejected plans by cause, and the fastest plan that does not fit."""
    cost, search = result.cost, result.search
    lines = [
        "Illegal plans by cause:",
        *(f"  {count:6}  {cause}" for cause, count in search.rejected.most_common()),
        *["  none"] * (not search.rejected),
        f"Plans that need more than {cost.cluster.device.memory_gib:g} GiB ({ESTIMATED}) and may be faster than plans "
        f"of the table: {len(search.too_large)}",
    ]
    for large in map(cost.estimate, search.too_large[:1]):
        lines.append(
            wrapped(
                f"{large.plan.title} would reach {large.throughput:.1f} samples/s (the first plan: "
                f"{result.estimates[0].throughput:.1f}), but its heaviest stage needs {large.heaviest / GIB:.2f} GiB, "
                f"and {large.capacity / GIB:.2f} GiB are allowed."
            )
        )
    return "\n".join(lines)


def nothing_fits(cost: Cost, space: Space, search: Search) -> str:
    """Why a search found no plan: the least memory that a plan needs, and the remedies (choices, memory, GPUs)."""
    if not search.too_large:
        causes = [f"{cause} ({count})" for cause, count in search.rejected.most_common()]
        why = "; ".join(causes) or "the choices are empty"
        fewer = on_fewer(cost, space)
        part = f" Fewer GPUs have one: {part_flags(fewer[0].cluster)}, {fewer[2].title}." if fewer else ""
        return f"No plan is legal on {cost.cluster.gpus} GPUs with a global batch of {space.batch}: {why}.{part}"
    smallest = min(search.too_large, key=cost.gpu_bytes)
    need, device = cost.memory.heaviest(smallest), cost.cluster.device
    text = (
        f"Nothing fits with --seq-length {cost.model.sequence}. The smallest of {len(search.too_large)} plans, "
        f"{smallest.title}, needs {need / GIB:.2f} GiB on its heaviest stage ({ESTIMATED}), and "
        f"{cost.allowed(smallest) / GIB:.2f} GiB of {device.memory_gib:g} GiB are allowed."
    )
    remedies = [f"GPUs of {math.ceil(10 * cost.gpu_bytes(smallest) / GIB) / 10:g} GiB or more"]
    every = Space(space.batch, context=space.context, grad_reduce_in_bf16=space.grad_reduce_in_bf16)
    other = _fitting(cost, replace(every, extrapolate=space.extrapolate)) or _fitting(cost, every)
    if other is not None:
        flags = " ".join(other.flags(cost.precision))
        remedies.insert(0, f"on these GPUs the choices that the flags exclude: {flags}")
    else:
        remedies += _first(_more_servers(cost), space) + _first(_shorter_sequences(cost), space)
    return f"{text} What would fit: {'; or '.join(remedies)}."


def _more_servers(cost: Cost) -> Iterator[tuple[str, Cost]]:
    for times in (2, 4, 8, 16, 32, 64):
        servers, devices = times * cost.cluster.servers, times * cost.cluster.devices
        cluster = replace(cost.cluster, servers=servers, devices=devices)
        yield f"{cluster.servers} servers ({cluster.gpus} GPUs)", cost.on(cluster)


def _shorter_sequences(cost: Cost) -> Iterator[tuple[str, Cost]]:
    length = cost.model.sequence // 2
    while length >= SHORTEST and cost.cluster.profile is None:  # a profile is of one length
        yield f"--seq-length {length}", cost.on(cost.cluster, replace(cost.model, sequence=length))
        length //= 2


def _first(places: Iterator[tuple[str, Cost]], space: Space) -> list[str]:
    """The first of the places where a plan fits, if any."""
    found = ((words, _fitting(there, space)) for words, there in places)
    return next(([f"{words}, for example with {plan.title}"] for words, plan in found if plan), [])


def _fitting(cost: Cost, space: Space) -> Plan | None:
    """Any plan that fits, with the choices of the space that need the least memory."""
    lean = replace(
        space,
        microbatch=(min(space.microbatch or (1,)),),
        gradient_slots=(min(space.gradient_slots),),
        distributed_optimizer=(max(space.distributed_optimizer),),
        pipeline_inside=space.pipeline_inside[:1],
    )
    search = Search(cost, lean)
    splits = (split for shape in search.shapes() for split in search.split(shape))
    plans = (plan for split in splits for scheduled in search.scheduled(split) for plan in search.variants(scheduled))
    return next((plan for plan in plans if cost.fits(plan)), None)
