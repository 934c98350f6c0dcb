"""The servers of a plan's ranks, the links of their messages, and the time of
collectives. Pure Python.

Invariant: all concurrent messages that leave a server share its link.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

from megatron_2bw.tools.planner.descriptions.cluster import Cluster

# All-reduces that a reduce-scatter or an all-gather of gloo takes on average: 2.4 to
# 2.9, and 1.3 to 1.8, of 64 MB on 2 and 4 CPU ranks.
GLOO = 2
# us: what a collective takes apart from bytes and steps (SimuMax, B200: 22;
# bench/measured/all_reduce.csv)
START = 20


@dataclass(frozen=True)
class Group:
    """Ranks of one collective.

    size      number of ranks
    servers   number of servers with ranks of the group
    sharers   groups of this kind that send concurrently from the same server
    """

    size: int
    servers: int
    sharers: int

    @property
    def in_server(self) -> int:
        return self.size // self.servers


@dataclass(frozen=True)
class Layout:
    """Groups and boundaries of tensor × context × depth × width ranks in one of
    Megatron's two rank orders.

    tensor, data   the group of one layer's parts, and the group of replicas
    context        the group of one sequence's parts
    experts        the group of one layer's experts, and `same` that of the replicas of
                   an expert
    ends           the first and the last stage of one pipeline (tied embeddings)
    boundaries     concurrent messages that leave one server over the boundary behind
                   each stage; 0 if all stay inside
    servers        of the ranks of each stage
    """

    tensor: Group
    data: Group
    ends: Group
    boundaries: tuple[int, ...]
    context: Group
    experts: Group
    same: Group
    servers: tuple[tuple[int, ...], ...] = field(compare=False)


@lru_cache(maxsize=4096)
def layout(
    tensor: int,
    depth: int,
    width: int,
    pipeline_inside: bool,
    gpus_per_server: int,
    context: int = 1,
    expert: int = 1,
) -> Layout:
    """Megatron numbers ranks by tensor, context, data, pipeline; with
    --use-tp-pp-dp-mapping by tensor, context, pipeline, data."""
    each = tensor * context
    stage_stride, pipeline_stride = (
        (each, each * depth) if pipeline_inside else (each * width, each)
    )

    def server(stage: int, pipeline: int, part: int = 0) -> int:
        return (
            stage * stage_stride + pipeline * pipeline_stride + part
        ) // gpus_per_server

    # (pipeline, first part of its tensor group) of each replica of a stage
    replicas = [
        (pipeline, part) for pipeline in range(width) for part in range(0, each, tensor)
    ]
    boundaries, servers = [], []
    for stage in range(depth):
        places = [
            (server(stage, *replica), server((stage + 1) % depth, *replica))
            for replica in replicas
        ]
        leaving = Counter(here for here, there in places if here != there)
        boundaries.append(
            min(tensor * max(leaving.values(), default=0), gpus_per_server)
        )
        both = {
            server(stage, pipeline, part + end)
            for pipeline, part in replicas
            for end in (0, tensor - 1)
        }
        servers.append(tuple(sorted(both)))
    on = min(gpus_per_server, each * depth * width)
    tensors, chunks = (
        [server(0, 0, part) for part in parts]
        for parts in (range(tensor), range(0, each, tensor))
    )
    data = [server(0, *replica) for replica in replicas]
    apart = server(0, 0) != server(depth - 1, 0)
    firsts = min(tensor * data.count(server(0, 0)), gpus_per_server)
    ends = Group(2, 2, firsts) if apart else Group(2, 1, 1)
    groups = _group(tensors, on), _group(data, on), ends
    routed = _group(data[:expert], on), _group(data[::expert], on)
    return Layout(
        *groups, tuple(boundaries), _group(chunks, on), *routed, tuple(servers)
    )


def _group(servers: list[int], gpus_per_server: int) -> Group:
    apart = len(set(servers))
    return Group(
        len(servers),
        apart,
        max(gpus_per_server * apart // len(servers), 1) if apart > 1 else 1,
    )


def all_reduce(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds of an all-reduce of `size` bytes: a ring inside servers, a tree between
    servers.

    Each rank sends 2 (n - 1)/n of the bytes; a server's network carries that once per
    group.
    """
    inside, between = cluster.inside.latency_us, cluster.between.latency_us
    latency = 2e-6 * (
        (group.in_server - 1) * inside + math.log2(group.servers) * between
    )
    return 2 * _sent(cluster, group, size) + latency + _start(cluster, group)


def half(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds of a reduce-scatter or an all-gather of `size` bytes in total: NCCL has a
    ring of all ranks for them, of whose steps one less than there are servers wait for
    the network (src/graph/tuning.cc)."""
    if cluster.device.name == "cpu":
        return GLOO * all_reduce(cluster, group, size)
    inside, between = cluster.inside.latency_us, cluster.between.latency_us
    latency = 1e-6 * (
        (group.size - group.servers) * inside + (group.servers - 1) * between
    )
    return _sent(cluster, group, size) + latency + _start(cluster, group)


def _sent(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds in which each rank sends (n - 1)/n of the bytes."""
    sent, inside, between = (
        (group.size - 1) / group.size * size,
        cluster.inside,
        cluster.between,
    )
    seconds = sent / inside.among(group.in_server) if group.in_server > 1 else 0.0
    if group.servers > 1:
        seconds = max(
            seconds,
            sent
            / between.rate(group.sharers, group.in_server)
            / between.share(group.servers),
        )
    return seconds


def all_to_all(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds in which each rank sends each other one its part of `size` bytes."""
    if group.size == 1:
        return 0.0
    each, inside, between = size / group.size, cluster.inside, cluster.between
    seconds, latency = (
        (group.in_server - 1) * each / inside.among(group.in_server),
        inside.latency_us,
    )
    if group.servers > 1:  # all ranks of a server send concurrently
        rate = between.rate(group.sharers * group.in_server)
        seconds, latency = (
            max(seconds, (group.size - group.in_server) * each / rate),
            between.latency_us,
        )
    return seconds + latency * 1e-6 + _start(cluster, group)


def ring_step(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds in which each rank of a ring sends `size` bytes to the next: one message
    of the group leaves a server."""
    seconds, latency = (
        size / cluster.inside.among(group.size),
        cluster.inside.latency_us,
    )
    if group.servers > 1:
        seconds, latency = (
            max(seconds, size / cluster.between.rate(group.sharers)),
            cluster.between.latency_us,
        )
    return seconds + latency * 1e-6


def _start(cluster: Cluster, group: Group) -> float:
    """Seconds until NCCL's ranks have found each other in a collective: START on the
    GPUs of a server."""
    return START * 1e-6 if group.in_server > 1 and cluster.device.name != "cpu" else 0.0


def message(cluster: Cluster, leaving: int, size: float) -> tuple[float, float]:
    """(seconds, seconds for which it occupies the link) of one message to the
    neighbouring stage.

    leaving: concurrent messages that leave the same server; 0 if the message stays
    inside.
    """
    link = cluster.between if leaving else cluster.inside
    taken = size / (link.rate(leaving) if leaving else link.message)
    return link.latency_us * 1e-6 + taken, taken
