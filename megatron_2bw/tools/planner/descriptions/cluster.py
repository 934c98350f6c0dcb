"""The machines: GPUs per server, memory, compute, links inside and between servers;
presets. Pure Python.

Invariant: every number has its source (`calibration`, `measured`), so that each term of
a plan is marked MEASURED or ESTIMATED.
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Le

from megatron_2bw.base.errors import UserError
from megatron_2bw.tools.planner.descriptions.reading import (
    Amount,
    Count,
    Described,
    Positive,
    Share,
    named,
    plain,
    presets,
)


@dataclass(frozen=True)
class Link(Described):
    """The rate of one GPU (inside a server) or of one server's network (between
    servers), in one direction."""

    # 10⁹ bytes per second that messages reach, over all cards; in a server, in a ring
    # of all its GPUs
    gb_s: Positive
    latency_us: Amount  # of one message
    rails: Count = 1  # network cards of the server; one message uses one of them
    measured: bool = False  # on these machines, as with nccl-tests
    pair_gb_s: Amount = 0.0  # inside a server, in a ring of 2 of its GPUs; 0: as gb_s
    four_gb_s: Amount = 0.0  # in a ring of 3 or 4 of them; 0: as gb_s
    # inside a server, of one message between two GPUs; 0: as in a ring of 2
    message_gb_s: Amount = 0.0
    # between servers, of a collective over 16 of them or more; 0: as gb_s
    many_gb_s: Amount = 0.0

    def rate(self, sharers: int, cards: int = 1) -> float:
        """Bytes per second of one of `sharers` concurrent messages, each over `cards`
        cards."""
        share = min(1 / sharers, cards / self.rails, 1)
        return self.gb_s * 1e9 * share

    def share(self, servers: int) -> float:
        """The part of the rate that a collective over so many servers reaches; between
        2 and 16 servers by their logarithm."""
        if not self.many_gb_s:
            return 1
        least = self.many_gb_s / self.gb_s
        between = math.log2(servers / 2) / 3
        return least ** min(between, 1)

    def among(self, gpus: int) -> float:
        """Bytes per second of one of `gpus` GPUs of a server in their ring."""
        rate = 0.0
        if gpus == 2:
            rate = self.pair_gb_s
        elif gpus <= 4:
            rate = self.four_gb_s
        return (rate or self.gb_s) * 1e9

    @property
    def message(self) -> float:
        """Bytes per second of one message between two GPUs of a server."""
        return self.message_gb_s * 1e9 or self.among(2)

    @property
    def channels(self) -> int:
        """Channels of a collective of NCCL among a server's GPUs, by the rate of its
        links (github.com/NVIDIA/nccl): 2 over PCIe (issue 1358), 12 over a V100's
        NVLink (713), 24 over later ones (1781)."""
        if self.gb_s < 50:
            return 2
        return 12 if self.gb_s < 200 else 24

    def __str__(self) -> str:
        return f"{self.gb_s:.4g} GB/s, {self.latency_us:.4g} us"


@dataclass(frozen=True)
class Device(Described):
    """One GPU. The host's times are typical values until `calibrate` fits them."""

    name: str
    memory_gib: Annotated[Positive, Le(2000)]  # capacity that the driver reports
    # peak of the matrix units in the 16-bit floats that the planner's precision uses
    tflops: Positive
    memory_gb_s: Positive  # memory bandwidth
    tflops_fp32: Amount = 0.0  # peak in 32-bit floats
    bf16: bool = True
    flash: bool = True
    # streaming multiprocessors: half of them idle in the last round of a matrix product
    units: Count = 100
    gemm_efficiency: Share = 0.6  # share of the peak that large matrix products reach
    # that flash attention reaches, forward and backward; 0: as gemm_efficiency
    attention_efficiency: Share = 0.0
    # share of the bandwidth that the other kernels reach
    memory_efficiency: Share = 0.8
    # of the host for one layer's forward; a shorter layer waits for the host
    layer_launch_us: Amount = 500.0
    collective_launch_us: Amount = 60.0  # of the host for one collective
    # of the host for a blocking exchange between stages, beside the message's time
    exchange_us: Amount = 200.0
    # of the host for an iteration outside its forwards and backwards
    step_us: Amount = 5000.0
    capability: Positive = 8.0  # CUDA's compute capability
    # source of the shares of the peak
    calibration: str = "not calibrated: typical values"
    # of a memory-bound kernel beside its bytes' time; 0 where memory_efficiency
    # includes it
    kernel_us: Amount = 0.0
    # for one GPU: memory of its server (0: twice the GPU's, at most 240),
    host_gib: Amount = 0.0
    host_gb_s: Positive = 20.0  # bandwidth of that memory,
    pcie_gb_s: Positive = 12.0  # and of copies between it and the GPU
    # 90 % of the predicted times differ from measured ones by a smaller share, on runs
    # that chose no constant (docs/planner.md has them for A100, H100, B200 and
    # GB200), else assumed; `calibrate` measures it.
    error: Share = 0.25

    @property
    def host_memory_gib(self) -> float:
        """Memory of the server for one GPU. (An assumption: servers of 8 V100 to H100
        have 3 to 4 times the GPU's.)"""
        return self.host_gib or min(2 * self.memory_gib, 240)


@dataclass(frozen=True)
class Cluster:
    """`servers` servers with `gpus_per_server` GPUs each."""

    name: str
    servers: int
    gpus_per_server: int
    device: Device
    inside: Link
    between: Link

    def part(self, servers: int, gpus_per_server: int) -> Cluster:
        """The first `servers` servers, with so many GPUs each."""
        return replace(self, servers=servers, gpus_per_server=gpus_per_server)

    @property
    def gpus(self) -> int:
        return self.servers * self.gpus_per_server


_DATA = presets("clusters.toml")
GPUS = {}
for _name, _entry in _DATA["gpus"].items():
    GPUS[_name] = Device(_name, **_entry)
LINKS = {}
for _name, _entry in _DATA["links"].items():
    LINKS[_name] = Link(**_entry)


PRESETS = {}
for _name, _entry in _DATA["clusters"].items():
    PRESETS[_name] = Cluster(
        name=_name,
        servers=1,
        gpus_per_server=_entry["gpus"],
        device=GPUS[_entry["gpu"]],
        inside=LINKS[_entry["inside"]],
        between=LINKS[_entry["between"]],
    )

# Gbit/s of a card
INFINIBAND = {"ib-fdr": 56, "ib-edr": 100, "ib-hdr": 200, "ib-ndr": 400}


def network(text: str) -> Link:
    """The value of --link: the network of a server, such as 100gbit, 25gbe, 8x400gbit
    (cards x rate) or 4xib-hdr."""
    pattern = r"(?:(\d+)x)?(?:(\d+(?:\.\d+)?)(?:gbit|gbe)|(ib-\w+))"
    match = re.fullmatch(pattern, text.lower())
    cards, rate, name = match.groups() if match else (None, None, None)
    count = int(cards or 1)
    each = INFINIBAND.get(name or "", 0) or float(rate or 0)
    total = count * each
    if not total:
        raise argparse.ArgumentTypeError(
            f"{text}: give a rate, 100gbit or 8x400gbit, or {', '.join(INFINIBAND)}"
        )
    latency = 20 if name else 50
    return Link(0.8 * total / 8, latency, count)


def preset(name: str, servers: int) -> Cluster:
    """A preset with that many servers."""
    return replace(named(PRESETS, name, "--cluster"), servers=servers)


def of_gpus(name: str, count: int) -> Cluster:
    """The preset whose GPU the name means, with so many of them."""
    found = []
    for cluster in PRESETS.values():
        gpu = plain(cluster.device.name)
        if gpu == plain(name):
            found = [cluster]
            break
        if plain(name) in gpu:
            found.append(cluster)
    if len(found) != 1:
        known = ", ".join(each.device.name for each in found or PRESETS.values())
        raise UserError(f"--gpu {name}: give one of {known}, or --cluster")
    each = min(count, found[0].gpus_per_server)
    if count % each:
        raise UserError(f"--gpus {count}: give a multiple of {each}, or --cluster")
    return found[0].part(count // each, each)


# a link's other rates, scaled with gb_s
OF_FEWER = ("pair_gb_s", "four_gb_s", "message_gb_s", "many_gb_s")
