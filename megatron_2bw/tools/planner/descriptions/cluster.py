"""The machines: GPUs per server, memory, compute, links inside and between servers;
presets. Pure Python.

Invariant: every number has its source (`calibration`, `measured`), so that each term of
a plan is marked MEASURED or ESTIMATED.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from megatron_2bw.base.errors import UserError, did_you_mean
from megatron_2bw.tools.planner.descriptions.reading import (
    Amount,
    Count,
    Described,
    Positive,
    Share,
)

if TYPE_CHECKING:
    from megatron_2bw.tools.planner.descriptions.profile import Profile


@dataclass(frozen=True)
class Link(Described):
    """The rate of one GPU (inside a server) or of one server's network (between
    servers), in one direction."""

    # 10⁹ bytes per second that messages reach, over all cards; in a server, in a ring
    # of all its GPUs
    gb_s: Positive
    latency_us: Amount  # of one message
    rails: Count = 1  # network cards of the server; one message uses one of them
    measured: bool = False  # by `megatron-2bw plan profile`
    pair_gb_s: Amount = 0.0  # inside a server, in a ring of 2 of its GPUs; 0: as gb_s
    four_gb_s: Amount = 0.0  # in a ring of 3 or 4 of them; 0: as gb_s
    # inside a server, of one message between two GPUs; 0: as in a ring of 2
    message_gb_s: Amount = 0.0
    # between servers, of a collective over 16 of them or more; 0: as gb_s
    many_gb_s: Amount = 0.0

    def rate(self, sharers: int, cards: int = 1) -> float:
        """Bytes per second of one of `sharers` concurrent messages, each over `cards`
        cards."""
        return self.gb_s * 1e9 * min(1 / sharers, cards / self.rails, 1)

    def share(self, servers: int) -> float:
        """Of the rate, what a collective over so many servers reaches; between 2 and 16
        by their logarithm."""
        return (self.many_gb_s / self.gb_s if self.many_gb_s else 1) ** min(
            math.log2(servers / 2) / 3, 1
        )

    def among(self, gpus: int) -> float:
        """Bytes per second of one of `gpus` GPUs of a server in their ring."""
        return (
            (self.pair_gb_s if gpus == 2 else self.four_gb_s if gpus <= 4 else 0)
            or self.gb_s
        ) * 1e9

    @property
    def message(self) -> float:
        """Bytes per second of one message between two GPUs of a server."""
        return self.message_gb_s * 1e9 or self.among(2)

    @property
    def channels(self) -> int:
        """Of a collective of NCCL among a server's GPUs, by the rate of its links
        (github.com/NVIDIA/nccl): 2 over PCIe (issue 1358), 12 over a V100's NVLink
        (713), 24 over later ones (1781)."""
        return 2 if self.gb_s < 50 else 12 if self.gb_s < 200 else 24

    def __str__(self) -> str:
        few = {
            "2 GPUs": self.pair_gb_s,
            "4 GPUs": self.four_gb_s,
            "a message": self.message_gb_s,
        }
        others = ", ".join(f"{name} {rate:.4g}" for name, rate in few.items() if rate)
        return f"{self.gb_s:.4g} GB/s{f' ({others})' * bool(others)}, {self.latency_us:.4g} us"


@dataclass(frozen=True)
class Device(Described):
    """One GPU. The host's times are typical values until `calibrate` fits them."""

    name: str
    memory_gib: Positive  # capacity that the driver reports
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
    # that chose no constant: of A100 vTrain's 109, of B200 12 of SimuMax, else assumed;
    # `calibrate` measures it.
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
    device: Device  # the `weakest` one if they differ
    inside: Link
    between: Link
    # measured times of blocks
    profile: Profile | None = field(default=None, compare=False)
    # the GPUs of each server, in the order of ranks, if they differ
    devices: tuple[Device, ...] = ()

    def part(self, servers: int, gpus_per_server: int) -> Cluster:
        """The first `servers` servers, with so many GPUs each."""
        devices = self.devices[:servers]
        device = weakest(devices) if devices else self.device
        devices = devices if len({*devices}) > 1 else ()
        return replace(
            self,
            servers=servers,
            gpus_per_server=gpus_per_server,
            device=device,
            devices=devices,
        )

    @property
    def gpus(self) -> int:
        return self.servers * self.gpus_per_server


_HIGHER_IS_WEAKER = (
    "layer_launch_us",
    "collective_launch_us",
    "exchange_us",
    "step_us",
    "error",
)


def weakest(devices: Iterable[Device], strongest: bool = False) -> Device:
    """A device with the lowest of each figure; or with the highest."""
    kinds = [*dict.fromkeys(devices)]
    found: dict[str, Any] = {
        "name": " and ".join(dict.fromkeys(device.name for device in kinds))
    }
    for name in (entry.name for entry in fields(Device) if entry.type != "str"):
        low = strongest == (name in _HIGHER_IS_WEAKER)
        found[name] = (min if low else max)(getattr(device, name) for device in kinds)
    return replace(kinds[0], **found | {"flash": all(device.flash for device in kinds)})


_V100 = "45 TFLOP/s on GPT 355M at microbatch 8 (arXiv 2006.09503, section 5)"
_A100 = (
    "a layer of 22B on 8 A100 (arXiv 2205.05198, Table 4), 1.7B on one "
    "(2104.04473, Table 1, row 1), and between what "
    "Table 5 and the other rows of Table 1 suggest; attention: kernels measured by SimuMax"
)
_H100 = (
    "the A100's share times 48 / 57, the utilization of the largest models "
    "(Megatron-LM's README; arXiv 2205.05198, "
    "Table 5); attention: FlashAttention-3 (arXiv 2407.08608, Figures 5 and 6)"
)
_B200 = (
    "products (less 0.02, chosen on SimuMax's runs of 405B), attention and "
    "memory-bound kernels that SimuMax measured "
    "on one B200 (bench/measured/simumax_kernels.csv)"
)
_GB200 = (
    "the B200's, less a sixteenth: best products measured, 1822 of 2500 TFLOP/s "
    "against 1745 of 2250 (ml-engineering)"
)
_ASSUMED = "not measured: shares assumed"
# In Device's order. The host's times are typical values. The peaks of RTX are those of
# products with 32-bit sums. NVIDIA: GA102's whitepaper 2.0 (RTX-3090, A6000), data
# sheets of A10, T4, MI300X. Memory is what nvidia-smi reports.
GPUS: dict[str, Device] = {
    row[0]: Device(*row)
    for row in (
        (
            "V100-16GB",
            15.8,
            125,
            900,
            15.7,
            False,
            False,
            80,
            0.67,
            0,
            0.65,
            600,
            60,
            200,
            5000,
            7.0,
            _V100,
        ),
        (
            "V100-32GB",
            31.7,
            125,
            900,
            15.7,
            False,
            False,
            80,
            0.67,
            0,
            0.65,
            600,
            60,
            200,
            5000,
            7.0,
            _V100,
        ),
        (
            "1080Ti",
            10.9,
            11.3,
            484,
            11.3,
            False,
            False,
            28,
            0.67,
            0,
            0.65,
            600,
            60,
            200,
            5000,
            6.1,
            _ASSUMED,
        ),
        (
            "A100-40GB",
            39.6,
            312,
            1555,
            19.5,
            True,
            True,
            108,
            0.79,
            0.51,
            0.6,
            600,
            40,
            200,
            5000,
            8.0,
            _A100,
            0,
            0.2,
        ),
        (
            "A100-80GB",
            79.2,
            312,
            2039,
            19.5,
            True,
            True,
            108,
            0.79,
            0.51,
            0.6,
            600,
            40,
            200,
            5000,
            8.0,
            _A100,
            0,
            0.2,
        ),
        (
            "H100-80GB",
            79.2,
            989,
            3350,
            67,
            True,
            True,
            132,
            0.67,
            0.47,
            0.6,
            600,
            40,
            200,
            5000,
            9.0,
            _H100,
        ),
        (
            "H200-141GB",
            139.8,
            989,
            4800,
            67,
            True,
            True,
            132,
            0.67,
            0.47,
            0.6,
            600,
            40,
            200,
            5000,
            9.0,
            _H100,
        ),
        (
            "B200-180GB",
            179,
            2250,
            8000,
            75,
            True,
            True,
            148,
            0.47,
            0.39,
            0.67,
            600,
            40,
            200,
            5000,
            10,
            _B200,
            30,
            0.07,
        ),
        (
            "GB200-186GB",
            185,
            2500,
            8000,
            80,
            True,
            True,
            152,
            0.44,
            0.37,
            0.67,
            600,
            40,
            200,
            5000,
            10.0,
            _GB200,
            30,
        ),
        (
            "MI300X",
            191,
            1307,
            5300,
            163,
            True,
            True,
            304,
            0.45,
            0.3,
            0.6,
            600,
            40,
            200,
            5000,
            9.0,
            _ASSUMED,
        ),
        (
            "T4",
            15,
            65,
            320,
            8.1,
            False,
            False,
            40,
            0.6,
            0,
            0.6,
            600,
            40,
            200,
            5000,
            7.5,
            _ASSUMED,
        ),
        (
            "A10",
            22.5,
            125,
            600,
            31.2,
            True,
            True,
            72,
            0.6,
            0.4,
            0.6,
            600,
            40,
            200,
            5000,
            8.6,
            _ASSUMED,
        ),
        (
            "A6000",
            48,
            155,
            768,
            38.7,
            True,
            True,
            84,
            0.6,
            0.4,
            0.6,
            600,
            40,
            200,
            5000,
            8.6,
            _ASSUMED,
        ),
        (
            "L40S",
            45,
            362,
            864,
            91.6,
            True,
            True,
            142,
            0.6,
            0.4,
            0.6,
            600,
            40,
            200,
            5000,
            8.9,
            _ASSUMED,
        ),
        (
            "RTX-3090",
            24,
            71,
            936,
            35.6,
            True,
            True,
            82,
            0.79,
            0.51,
            0.6,
            600,
            40,
            200,
            5000,
            8.6,
            _ASSUMED,
        ),
        (
            "RTX-4090",
            24,
            165,
            1008,
            82.6,
            True,
            True,
            128,
            0.79,
            0.51,
            0.6,
            600,
            40,
            200,
            5000,
            8.9,
            _ASSUMED,
        ),
        (
            "RTX-5090",
            31.8,
            210,
            1792,
            105,
            True,
            True,
            170,
            0.79,
            0.51,
            0.6,
            600,
            40,
            200,
            5000,
            12.0,
            _ASSUMED,
        ),
    )
}

# Links inside a server: the bus bandwidth of NCCL's all-reduce over all its GPUs, over
# a pair and over four, and the latency of a ring's step. V100 and A100: vTrain's tables
# of 1 MB to 1 GB. B200: all-gathers, by SimuMax. PCIe (L40S, A10, A6000 without
# bridges): SimuMax's A100 on PCIe; half of it for the T4, on the PCIe of a generation
# before. H100, H200: the A100's ratios; GB200 is the B200's; RTX, without peer-to-peer
# copies, and 1080Ti are assumed. Between servers: the rate of one server's network
# cards, less a fifth for protocols: 25 Gbit/s, 100, 10 (assumed), 8 x 200, 8 x 400. One
# NVLink joins the 72 GPUs of a GB200 NVL72: they count as a server.
_MESH, _SWITCH2 = (
    Link(135, 4, pair_gb_s=22.5, four_gb_s=85),
    Link(225, 4, pair_gb_s=187, four_gb_s=210),
)
_SWITCH3, _SWITCH4 = Link(370, 4, pair_gb_s=305, four_gb_s=345), Link(606, 8.6)
_PCIE, _HDR, _NDR = (
    Link(13, 9, pair_gb_s=22, four_gb_s=22),
    Link(160, 20, 8),
    Link(320, 15, 8),
)
PRESETS: dict[str, Cluster] = {
    name: Cluster(name, 1, gpus, GPUS[gpu], inside, between)
    for name, gpus, gpu, inside, between in (
        ("p3.16xlarge", 8, "V100-16GB", _MESH, Link(2.5, 50)),
        ("p3dn.24xlarge", 8, "V100-32GB", _MESH, Link(10, 50)),
        ("8x1080ti", 8, "1080Ti", Link(10, 10), Link(1.0, 50)),
        ("dgx-a100-40", 8, "A100-40GB", _SWITCH2, _HDR),
        ("dgx-a100-80", 8, "A100-80GB", _SWITCH2, _HDR),
        ("dgx-h100", 8, "H100-80GB", _SWITCH3, _NDR),
        ("hgx-h200", 8, "H200-141GB", _SWITCH3, _NDR),
        ("dgx-b200", 8, "B200-180GB", _SWITCH4, _NDR),
        ("gb200-nvl72", 72, "GB200-186GB", _SWITCH4, Link(2880, 15, 72)),
        ("8xt4", 8, "T4", Link(6.5, 9, pair_gb_s=11, four_gb_s=11), Link(10, 50)),
        ("8xa10", 8, "A10", _PCIE, Link(10, 50)),
        ("8xa6000", 8, "A6000", _PCIE, Link(10, 50)),
        ("8xl40s", 8, "L40S", _PCIE, Link(20, 20)),
        (
            "8x3090",
            8,
            "RTX-3090",
            Link(6, 10, pair_gb_s=10, four_gb_s=8),
            Link(2.5, 50),
        ),
        (
            "8x4090",
            8,
            "RTX-4090",
            Link(6, 10, pair_gb_s=10, four_gb_s=8),
            Link(2.5, 50),
        ),
        (
            "8x5090",
            8,
            "RTX-5090",
            Link(12, 10, pair_gb_s=20, four_gb_s=16),
            Link(2.5, 50),
        ),
    )
}

# Gbit/s of a card
INFINIBAND = {"ib-fdr": 56, "ib-edr": 100, "ib-hdr": 200, "ib-ndr": 400}


def network(text: str) -> Link:
    """The value of --link: the network of a server, such as 100gbit, 25gbe, 8x400gbit
    (cards x rate) or 4xib-hdr."""
    found = re.fullmatch(
        r"(?:(\d+)x)?(?:(\d+(?:\.\d+)?)(?:gbit|gbe)|(ib-\w+))", text.lower()
    )
    cards, rate, name = found.groups() if found else (None, None, None)
    total = int(cards or 1) * (INFINIBAND.get(name or "", 0) or float(rate or 0))
    if not total:
        raise argparse.ArgumentTypeError(
            f"{text}: give a rate, 100gbit or 8x400gbit, or {', '.join(INFINIBAND)}"
        )
    return Link(0.8 * total / 8, 20 if name else 50, int(cards or 1))


def known_gpu(name: str) -> Device | None:
    """The only GPU with all words of the name, or all of whose words the name has:
    B200, NVIDIA H100 80GB HBM3."""

    def words(text: str) -> set[str]:
        return {*re.findall("[a-z0-9]+", text.lower())} - {
            "nvidia",
            "tesla",
            "geforce",
            "amd",
            "instinct",
        }

    own = words(name)
    found = [
        gpu
        for known, gpu in GPUS.items()
        if own and (own <= words(known) or words(known) <= own)
    ]
    return found[0] if len(found) == 1 else None


def preset(name: str, servers: int) -> Cluster:
    """A preset with that many servers. UserError lists the names if the name is
    unknown."""
    if name not in PRESETS:
        gpus = {
            known: re.sub("rtx-|-.*", "", cluster.device.name.lower())
            for known, cluster in PRESETS.items()
        }
        of_gpu = [known for known in gpus if gpus[known] in name.lower()]
        near = max(of_gpu, key=lambda known: len(gpus[known]), default=name)
        raise UserError(
            f"--cluster {name}: not one of {', '.join(PRESETS)}, and no "
            f"file{did_you_mean(near, PRESETS)}"
        )
    return replace(PRESETS[name], servers=servers)


# a link's other rates, scaled with gb_s
OF_FEWER = ("pair_gb_s", "four_gb_s", "message_gb_s", "many_gb_s")
