"""The machines: GPUs a server, memory, compute, links inside and between servers; presets and YAML. Pure Python.

Invariant: every number says where it comes from, so that a plan can say MEASURED or ESTIMATED of each of its terms.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any


class ClusterError(ValueError):
    """A cluster description that cannot be used, said in one line."""


@dataclass(frozen=True)
class Link:
    """What one GPU (inside a server) or one server's network (between servers) sends, in one direction.

    gb_s        bytes a second in 10⁹ that messages really get, over all cards
    latency_us  of one message
    rails       network cards of the server; one message takes one of them
    measured    by `megatron-2bw-plan profile`
    """

    gb_s: float
    latency_us: float
    rails: int = 1
    measured: bool = False

    def rate(self, sharers: int, cards: int = 1) -> float:
        """Bytes a second of one of `sharers` that send at once, each over as many as `cards` cards."""
        return self.gb_s * 1e9 * min(1 / sharers, cards / self.rails, 1)


@dataclass(frozen=True)
class Device:
    """One GPU.

    memory_gib          capacity that the driver reports
    tflops              peak of the matrix units in the 16-bit floats that the planner's precision uses
    tflops_fp32         peak in 32-bit floats
    memory_gb_s         memory bandwidth
    units               streaming multiprocessors: a matrix product leaves half of them idle in its last round
    gemm_efficiency     share of the peak that large matrix products reach
    memory_efficiency   share of the bandwidth that the other kernels reach
    layer_launch_us     host time that launches one layer's forward; a shorter layer waits for the host
    collective_launch_us  host time that launches one collective
    exchange_us         host time that a blocking exchange between stages costs beside the message
    step_us             host time of an iteration outside its forwards and backwards
    calibration         what the two shares were fitted to; the host's times are typical values until `calibrate`
    """

    name: str
    memory_gib: float
    tflops: float
    memory_gb_s: float
    tflops_fp32: float = 0.0
    bf16: bool = True
    flash: bool = True
    units: int = 100
    gemm_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    layer_launch_us: float = 500.0
    collective_launch_us: float = 60.0
    exchange_us: float = 200.0
    step_us: float = 5000.0
    calibration: str = "not calibrated: typical values"


@dataclass(frozen=True)
class Cluster:
    """`servers` servers with `gpus_per_server` GPUs each. `profile` holds measured times of blocks (profile.py)."""

    name: str
    servers: int
    gpus_per_server: int
    device: Device
    inside: Link
    between: Link
    profile: Any = field(default=None, compare=False)

    @property
    def gpus(self) -> int:
        return self.servers * self.gpus_per_server


V100 = Device("V100-16GB", 15.8, 125, 900, tflops_fp32=15.7, bf16=False, flash=False, units=80)
GTX1080TI = Device("1080Ti", 10.9, 11.3, 484, tflops_fp32=11.3, bf16=False, flash=False, units=28)
A100_40 = Device("A100-40GB", 39.6, 312, 1555, tflops_fp32=19.5, units=108)
A100_80 = Device("A100-80GB", 79.2, 312, 2039, tflops_fp32=19.5, units=108)
H100 = Device("H100-80GB", 79.2, 989, 3350, tflops_fp32=67, units=132)
H200 = Device("H200-141GB", 139.8, 989, 4800, tflops_fp32=67, units=132)


def _calibrated(device: Device, source: str, **constants: float) -> Device:
    return replace(device, calibration=source, **constants)


_A100 = dict(gemm_efficiency=0.74, memory_efficiency=0.7, layer_launch_us=600, collective_launch_us=40)
_LAYER_TIMES = "a layer of 22B on 8 A100 (arXiv 2205.05198, Table 4) and 1.7B on one (2104.04473, Table 1, row 1)"
_V100 = dict(gemm_efficiency=0.65, memory_efficiency=0.65, layer_launch_us=600)
_V100_TIMES = "45 TFLOP/s on GPT 355M at microbatch 8 (arXiv 2006.09503, section 5)"
_ASSUMED = "shares of the A100 assumed"

# Links: all-reduce bus bandwidths that NCCL reaches inside the server, latency of one step of a ring; between servers,
# what the network cards of one server carry, less a fifth for protocols: 25 Gbit/s, 10 (assumed), 8 × 200, 8 × 400.
PRESETS: dict[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        Cluster("p3.16xlarge", 1, 8, _calibrated(V100, _V100_TIMES, **_V100), Link(130, 5), Link(2.5, 50)),
        Cluster("8x1080ti", 1, 8, _calibrated(GTX1080TI, _ASSUMED, **_V100), Link(10, 10), Link(1.0, 50)),
        Cluster("dgx-a100-40", 1, 8, _calibrated(A100_40, _LAYER_TIMES, **_A100), Link(230, 6), Link(160, 20, 8)),
        Cluster("dgx-a100-80", 1, 8, _calibrated(A100_80, _LAYER_TIMES, **_A100), Link(230, 6), Link(160, 20, 8)),
        Cluster("dgx-h100", 1, 8, _calibrated(H100, _ASSUMED, **_A100), Link(370, 5), Link(320, 15, 8)),
        Cluster("hgx-h200", 1, 8, _calibrated(H200, _ASSUMED, **_A100), Link(370, 5), Link(320, 15, 8)),
    )
}


def preset(name: str, servers: int) -> Cluster:
    """A preset with that many servers. ClusterError lists the names if there is none such."""
    if name not in PRESETS:
        raise ClusterError(f"--cluster {name}: not one of {', '.join(PRESETS)}, and no file of that name")
    return replace(PRESETS[name], servers=servers)


def from_yaml(path: Path) -> Cluster:
    """The cluster of a YAML file (docs/planner.md has one). ClusterError names the entry that is wrong."""
    import yaml

    try:
        text = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ClusterError(f"--cluster {path}: not a readable YAML file ({' '.join(str(error).split())})") from None
    return from_dict(text, str(path))


def from_dict(text: Any, where: str) -> Cluster:
    """The cluster that a mapping describes; `where` names it in errors."""
    top = _take(text, where, {"servers", "gpus_per_server", "gpu", "inside", "between"}, {"name", "profile"})
    gpu = top["gpu"]
    if isinstance(gpu, str):
        known = {cluster.device.name: cluster.device for cluster in PRESETS.values()}
        if gpu not in known:
            raise ClusterError(f"--cluster {where}: gpu {gpu!r} is not one of {', '.join(known)}; or describe it")
        device = known[gpu]
    else:
        names = {entry.name for entry in fields(Device)}
        given = _take(gpu, f"{where}: gpu", {"memory_gib", "tflops", "memory_gb_s"}, names)
        device = Device(**({"name": "gpu"} | given))
    links = {
        name: Link(**_take(top[name], f"{where}: {name}", {"gb_s", "latency_us"}, {"measured", "rails"}))
        for name in ("inside", "between")
    }
    cluster = Cluster(
        str(top.get("name", where)),
        top["servers"],
        top["gpus_per_server"],
        device,
        **links,
        profile=_beside(top.get("profile"), where),
    )
    return cluster


def _beside(profile: str | None, where: str) -> Path | None:
    """A profile's path is relative to the YAML file that names it."""
    return None if profile is None else Path(where).parent / str(profile)


def to_yaml(cluster: Cluster, path: Path) -> None:
    """Write a cluster that `from_yaml` reads back."""
    import yaml

    text = {
        "name": cluster.name,
        "servers": cluster.servers,
        "gpus_per_server": cluster.gpus_per_server,
        "gpu": asdict(cluster.device),
        "inside": asdict(cluster.inside),
        "between": asdict(cluster.between),
    }
    if isinstance(cluster.profile, Path):
        text["profile"] = str(cluster.profile.resolve())
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(yaml.safe_dump(text, sort_keys=False))
        part.replace(path)
    except OSError as error:
        raise ClusterError(f"--out {path}: {error.strerror}") from None


SHARES = ("gemm_efficiency", "memory_efficiency")
MAY_BE_ZERO = ("tflops_fp32", "latency_us", "layer_launch_us", "collective_launch_us", "exchange_us", "step_us")


def _take(text: Any, where: str, needed: set[str], optional: set[str]) -> dict[str, Any]:
    """The mapping `text`, its entries checked by name and, where a class has a field of that name, by type."""
    if not isinstance(text, dict):
        raise ClusterError(f"--cluster {where}: expected entries such as {', '.join(sorted(needed))}")
    missing, unknown = needed - set(text), sorted(set(map(str, text)) - needed - optional)
    if missing or unknown:
        what = f"the entry {sorted(missing)[0]} is missing" if missing else f"unknown entry {unknown[0]}"
        raise ClusterError(f"--cluster {where}: {what} (known: {', '.join(sorted(needed | optional))})")
    kinds = {entry.name: entry.type for kind in (Cluster, Device, Link) for entry in fields(kind)}
    for name, entry in text.items():
        fault = _fault(name, entry, kinds.get(name, ""))
        if fault:
            raise ClusterError(f"--cluster {where}: {name} must be {fault}, not {entry!r}")
    return dict(text)


def _fault(name: str, entry: Any, kind: str) -> str | None:
    """What `entry` should be and is not."""
    number = isinstance(entry, (int, float)) and not isinstance(entry, bool)
    if kind == "bool":
        return None if isinstance(entry, bool) else "true or false"
    if kind == "str":
        return None if isinstance(entry, (str, int, float)) else "a name"
    if kind == "int":
        return None if number and entry == int(entry) and entry > 0 else "a positive whole number"
    if kind != "float":
        return None
    if not number or not math.isfinite(entry) or entry < 0 or (entry == 0 and name not in MAY_BE_ZERO):
        return "a positive number"
    return "a share of at most 1" if name in SHARES and entry > 1 else None
