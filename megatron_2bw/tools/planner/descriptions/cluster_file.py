"""Reads and writes the YAML file of a cluster; docs/planner.md shows one."""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_2bw.base.errors import UserError, file_errors
from megatron_2bw.base.files import read_yaml, write_whole
from megatron_2bw.tools.planner.descriptions.cluster import (
    GPUS,
    PRESETS,
    Cluster,
    Device,
    Link,
    preset,
    weakest,
)
from megatron_2bw.tools.planner.descriptions.profile import Profile
from megatron_2bw.tools.planner.descriptions.reading import Count, Described, described

CPU_ERROR = 0.45  # ranks share cores and caches, which a profile does not show


@dataclass(frozen=True)
class _Group(Described):
    """Equal servers. gpu: a name of GPUS, or entries of a Device."""

    servers: Count
    gpu: str | dict[str, Any]


@dataclass(frozen=True)
class _File(Described):
    """`servers` and `gpu`, or `groups`. profile: relative to the YAML file."""

    gpus_per_server: Count
    inside: Link
    between: Link
    name: str = ""
    servers: Count = 1
    gpu: str | dict[str, Any] = ""
    groups: tuple[_Group, ...] = ()
    profile: Path | None = None


def named_cluster(name: str) -> Cluster:
    """The cluster of --cluster: a preset, or a YAML file that exists."""
    return (
        preset(name, 1)
        if name in PRESETS or not os.path.exists(name)
        else from_yaml(Path(name))
    )


def from_yaml(path: Path) -> Cluster:
    """The cluster of a YAML file, with its profile. UserError names the file and the
    wrong entry.

    Groups of different GPUs become a cluster of the `weakest` one.
    """
    where = f"--cluster {path}"
    file = described(_File, read_yaml(path, "--cluster"), where)
    if bool(file.groups) == bool(file.gpu):
        raise UserError(f"{where}: give either gpu and servers, or groups")
    groups = file.groups or (_Group(file.servers, file.gpu),)
    devices = []
    servers = 0
    for group in groups:
        devices.append(_device(group.gpu, f"{where}: gpu"))
        servers += group.servers
    device = weakest(devices)
    if devices != [device] * len(devices):
        print(
            f"groups of different GPUs: planned as if all were the slowest, {device.name}",
            file=sys.stderr,
        )
    return Cluster(
        file.name or str(path),
        servers,
        file.gpus_per_server,
        device,
        file.inside,
        file.between,
        Profile.load(path.parent / file.profile) if file.profile else None,
    )


def _device(gpu: str | dict[str, Any], where: str) -> Device:
    """The GPU of a name or of a mapping. What a mapping leaves out of a known GPU is
    that one's."""
    if isinstance(gpu, str):
        if gpu not in GPUS:
            known = ", ".join(GPUS)
            raise UserError(f"{where}: {gpu} is not one of {known}; or describe it")
        return GPUS[gpu]
    name = str(gpu.get("name", "gpu"))
    known = GPUS.get(name)
    entries = {"name": name}
    if known:
        entries = asdict(known)
        taken = f"{name}'s where the file gives nothing"
        entries["calibration"] = f"{taken}: {known.calibration}"
    elif name == "cpu":
        entries["error"] = CPU_ERROR
    return described(Device, entries | gpu, where)


def to_yaml(cluster: Cluster, path: Path) -> None:
    """Write a file from which `from_yaml` reads the same cluster, without its
    profile."""
    import yaml

    whole = asdict(cluster)
    entries = {}
    for name in ("name", "gpus_per_server", "inside", "between", "servers"):
        entries[name] = whole[name]
    entries["gpu"] = whole["device"]
    with file_errors(f"--out {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, yaml.safe_dump(entries, sort_keys=False))
