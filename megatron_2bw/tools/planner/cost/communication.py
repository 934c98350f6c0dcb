"""The servers of a plan's ranks, the links of their messages, and the time of
collectives. Pure Python.

Invariant: all concurrent messages that leave a server share its link.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

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
    """

    tensor: Group
    data: Group
    ends: Group
    boundaries: tuple[int, ...]
    context: Group
    experts: Group
    same: Group


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
    stage_stride = each if pipeline_inside else each * width
    pipeline_stride = each * depth if pipeline_inside else each

    def server(stage: int, pipeline: int, part: int = 0) -> int:
        rank = stage * stage_stride + pipeline * pipeline_stride + part
        return rank // gpus_per_server

    # (pipeline, first part of its tensor group) of each replica of a stage
    parts = range(0, each, tensor)
    replicas = [(pipeline, part) for pipeline in range(width) for part in parts]
    boundaries = []
    for stage in range(depth):
        leaving = Counter[int]()
        for pipeline, part in replicas:
            here = server(stage, pipeline, part)
            if here != server((stage + 1) % depth, pipeline, part):
                leaving[here] += tensor
        most = max(leaving.values(), default=0)
        boundaries.append(min(most, gpus_per_server))
    data = [server(0, *replica) for replica in replicas]
    ends = Group(2, 1, 1)
    if server(0, 0) != server(depth - 1, 0):
        firsts = tensor * data.count(server(0, 0))
        ends = Group(2, 2, min(firsts, gpus_per_server))
    gpus = min(gpus_per_server, each * depth * width)
    # of the first stage's first pipeline
    parts_of_layer = [server(0, 0, part) for part in range(tensor)]
    parts_of_sequence = [server(0, 0, part) for part in parts]
    return Layout(
        tensor=_group(parts_of_layer, gpus),
        data=_group(data, gpus),
        ends=ends,
        boundaries=tuple(boundaries),
        context=_group(parts_of_sequence, gpus),
        experts=_group(data[:expert], gpus),
        same=_group(data[::expert], gpus),
    )


def _group(places: list[int], gpus_per_server: int) -> Group:
    """The group of the ranks on these servers."""
    size = len(places)
    servers = len(set(places))
    sharers = 1
    if servers > 1:
        sharers = max(gpus_per_server * servers // size, 1)
    return Group(size, servers, sharers)


def all_reduce(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds of an all-reduce of `size` bytes: a ring inside servers, a tree between
    servers.

    Each rank sends 2 (n - 1)/n of the bytes; a server's network carries that once per
    group.
    """
    inside = (group.in_server - 1) * cluster.inside.latency_us
    between = math.log2(group.servers) * cluster.between.latency_us
    latency = 2e-6 * (inside + between)
    sent = 2 * _sent(cluster, group, size)
    return sent + latency + _start(cluster, group)


def scatter_or_gather(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds of a reduce-scatter or an all-gather of `size` bytes in total: NCCL has a
    ring of all ranks for them, of whose steps one less than there are servers wait for
    the network (src/graph/tuning.cc)."""
    if cluster.device.name == "cpu":
        return GLOO * all_reduce(cluster, group, size)
    inside = (group.size - group.servers) * cluster.inside.latency_us
    between = (group.servers - 1) * cluster.between.latency_us
    latency = 1e-6 * (inside + between)
    return _sent(cluster, group, size) + latency + _start(cluster, group)


def _sent(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds in which each rank sends (n - 1)/n of the bytes."""
    sent = (group.size - 1) / group.size * size
    seconds = 0.0
    if group.in_server > 1:
        seconds = sent / cluster.inside.among(group.in_server)
    if group.servers > 1:
        rate = cluster.between.rate(group.sharers, group.in_server)
        share = cluster.between.share(group.servers)
        seconds = max(seconds, sent / rate / share)
    return seconds


def all_to_all(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds in which each rank sends each other one its part of `size` bytes."""
    if group.size == 1:
        return 0.0
    part = size / group.size
    neighbours = group.in_server - 1
    seconds = neighbours * part / cluster.inside.among(group.in_server)
    latency = cluster.inside.latency_us
    if group.servers > 1:  # all ranks of a server send concurrently
        rate = cluster.between.rate(group.sharers * group.in_server)
        others = group.size - group.in_server
        seconds = max(seconds, others * part / rate)
        latency = cluster.between.latency_us
    return seconds + latency * 1e-6 + _start(cluster, group)


def ring_step(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds in which each rank of a ring sends `size` bytes to the next: one message
    of the group leaves a server."""
    seconds = size / cluster.inside.among(group.size)
    latency = cluster.inside.latency_us
    if group.servers > 1:
        seconds = max(seconds, size / cluster.between.rate(group.sharers))
        latency = cluster.between.latency_us
    return seconds + latency * 1e-6


def _start(cluster: Cluster, group: Group) -> float:
    """Seconds until NCCL's ranks have found each other in a collective: START on the
    GPUs of a server."""
    if group.in_server == 1 or cluster.device.name == "cpu":
        return 0.0
    return START * 1e-6


class Message(NamedTuple):
    """Seconds of a message to the neighbouring stage, and those for which it occupies
    the link."""

    seconds: float
    occupied: float


def message(cluster: Cluster, leaving: int, size: float) -> Message:
    """leaving: concurrent messages that leave the same server; 0 if this one stays
    inside."""
    link = cluster.between if leaving else cluster.inside
    rate = link.rate(leaving) if leaving else link.message
    occupied = size / rate
    latency = link.latency_us * 1e-6
    return Message(latency + occupied, occupied)
