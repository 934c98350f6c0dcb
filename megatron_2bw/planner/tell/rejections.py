"""The plans that a search rejected, by cause, and the nearest change that is legal and fits. Pure Python."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import replace

from megatron_2bw.models.plan import RECOMPUTE, Plan
from megatron_2bw.planner.cost.memory import GIB
from megatron_2bw.planner.cost.simulated import Cost, Estimate
from megatron_2bw.planner.find.legality import is_legal
from megatron_2bw.planner.find.search import Search, on_fewer
from megatron_2bw.planner.find.space import Space
from megatron_2bw.planner.tell.explain import ESTIMATED, Result, part_flags, wrapped
from megatron_2bw.planner.tell.jobs import by_flag

SHORTEST = 512  # tokens of a sequence that is proposed
MAX_CHANGED_PLANS = 1000  # plans that do not fit, of which one may fit after a single change


def rejections(result: Result) -> str:
    """The rejected plans by cause, and the smallest change with which the fastest plan that does not fit would fit."""
    cost, search = result.cost, result.search
    lines = ["Illegal plans by cause, with the change that the smallest of them needs:"]
    for cause, count in search.rejected.most_common():
        lines.append(f"  {count:6}  {cause}")
        example = search.examples.get(cause, "")
        lines += textwrap.wrap(example, 118, initial_indent=" " * 10, subsequent_indent=" " * 10)
    lines += [
        *["  none"] * (not search.rejected),
        f"Plans that need more than {cost.cluster.device.memory_gib:g} GiB ({ESTIMATED}) and may be faster than plans "
        f"of the table: {len(search.too_large)}",
    ]
    large, change = too_large(result)
    if large is None:
        return "\n".join(lines)
    first = f" (the first plan: {result.estimates[0].throughput:.1f})" if result.estimates else ""
    text = (
        f"{large.plan.title} would reach {large.throughput:.1f} samples/s{first}, but its heaviest stage needs "
        f"{large.heaviest / GIB:.2f} GiB, and {large.capacity / GIB:.2f} GiB are allowed. "
    )
    if change is None:
        text += "No single change of it is legal and fits."
    else:
        text += (
            f"The nearest change that fits: {changed_flags(large.plan, change.plan, cost.precision)} "
            f"({change.throughput:.1f} samples/s, {change.heaviest / GIB:.2f} GiB)."
        )
    return "\n".join([*lines, wrapped(text)])


def too_large(result: Result) -> tuple[Estimate | None, Estimate | None]:
    """The fastest plan that does not fit but would after one change, and the changed plan; or the fastest, and None."""
    plans, cost = result.search.too_large, result.cost
    for plan in plans[:MAX_CHANGED_PLANS]:
        change = nearest(cost, plan)
        if change is not None:
            return cost.estimate(plan), change
    return (cost.estimate(plans[0]) if plans else None), None


def changes(plan: Plan) -> Iterator[Plan]:
    """Plans that need less memory per GPU and differ from `plan` in one choice, with the same global batch."""
    whole = replace(plan, recompute_modules=(), recompute_block=0)
    yield from (replace(whole, recompute=kind) for kind in RECOMPUTE[RECOMPUTE.index(plan.recompute) + 1 :])
    if not plan.distributed_optimizer:
        yield replace(plan, distributed_optimizer=True)
    if plan.schedule == "2bw" and plan.gradient_slots == 2:
        yield replace(plan, gradient_slots=1)
    if any(plan.extra):
        yield replace(plan, extra_warmup=())
    if plan.extrapolate:
        yield replace(plan, extrapolate=False)
    if plan.schedule != "pipedream-flush":
        flush = {"schedule": "pipedream-flush", "gradient_slots": 2, "virtual": 1, "gpipe_round": None}
        yield replace(plan, **flush, extra_warmup=(), extrapolate=False)
    if plan.microbatch % 2 == 0:
        yield replace(plan, microbatch=plan.microbatch // 2, microbatches=2 * plan.microbatches)
    deeper = replace(plan, depth=2 * plan.depth, first=0, last=0, stages=(), extra_warmup=())
    if plan.width % 2 == 0:
        yield replace(deeper, width=plan.width // 2, microbatches=2 * plan.microbatches)
    if plan.tensor % 2 == 0:
        tensor = plan.tensor // 2
        yield replace(deeper, tensor=tensor, sequence_parallel=plan.sequence_parallel and tensor > 1)


def nearest(cost: Cost, plan: Plan) -> Estimate | None:
    """The fastest of the `changes` that is legal and fits."""
    cluster = cost.cluster
    fitting = (
        cost.estimate(change)
        for change in changes(plan)
        if is_legal(change, cost.model, cluster.gpus, cost.precision, cluster.device.bf16) and cost.fits(change)
    )
    return max(fitting, key=lambda estimate: estimate.throughput, default=None)


def changed_flags(before: Plan, after: Plan, precision: str) -> str:
    """The flags to give instead, and the flags to leave out."""
    old, new = ({flag[0]: flag for flag in by_flag(plan.flags(precision))} for plan in (before, after))
    given = " ".join(" ".join(words) for flag, words in new.items() if old.get(flag) != words)
    without = " and ".join(flag for flag in old if flag not in new)
    return f"{given} without {without}".strip() if without else given


def nothing_fits(cost: Cost, space: Space, search: Search) -> str:
    """Why a search found no plan: the least memory that a plan needs, and the remedies (choices, memory, GPUs)."""
    if not search.too_large:
        counted = search.rejected.most_common()
        causes = [f"{cause} ({count}; {search.examples.get(cause, 'no other size')})" for cause, count in counted]
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
    every = Space(space.batch, context=space.context, numerics=space.numerics)
    other = _fitting(cost, replace(every, extrapolate=space.extrapolate)) or _fitting(cost, every)
    if other is not None:
        flags = " ".join(other.flags(cost.precision))
        remedies.insert(0, f"on these GPUs the choices that the flags exclude: {flags}")
    else:
        remedies += _more_servers(cost, space) + _shorter_sequences(cost, space)
    return f"{text} What would fit: {'; or '.join(remedies)}."


def _more_servers(cost: Cost, space: Space) -> list[str]:
    """The smallest cluster of 2, 4, ... 64 times as many servers on which a plan fits."""
    for times in (2, 4, 8, 16, 32, 64):
        devices = times * cost.cluster.devices
        cluster = replace(cost.cluster, servers=times * cost.cluster.servers, devices=devices)
        plan = _fitting(cost.on(cluster), space)
        if plan is not None:
            return [f"{cluster.servers} servers ({cluster.gpus} GPUs), for example with {plan.title}"]
    return []


def _shorter_sequences(cost: Cost, space: Space) -> list[str]:
    """A half, a quarter ... of the sequence, but not less than SHORTEST tokens, with which a plan fits."""
    length = cost.model.sequence // 2
    while length >= SHORTEST and cost.cluster.profile is None:  # a profile is of one length
        if plan := _fitting(cost.on(cost.cluster, replace(cost.model, sequence=length)), space):
            return [f"--seq-length {length}, for example with {plan.title}"]
        length //= 2
    return []


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
