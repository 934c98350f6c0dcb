"""Reads and writes the YAML file of a cluster; docs/planner.md shows one."""

import os
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
)
from megatron_2bw.tools.planner.descriptions.reading import Count, Described, described

CPU_ERROR = 0.45  # ranks share cores and caches


@dataclass(frozen=True)
class _File(Described):
    """gpu: a name of GPUS, or entries of a Device."""

    gpus_per_server: Count
    gpu: str | dict[str, Any]
    inside: Link
    between: Link
    name: str = ""
    servers: Count = 1


def named_cluster(name: str) -> Cluster:
    """The cluster of --cluster: a preset, or a YAML file that exists."""
    return (
        preset(name, 1)
        if name in PRESETS or not os.path.exists(name)
        else from_yaml(Path(name))
    )


def from_yaml(path: Path) -> Cluster:
    """The cluster of a YAML file. UserError names the file and the wrong entry."""
    where = f"--cluster {path}"
    file = described(_File, read_yaml(path, "--cluster"), where)
    return Cluster(
        file.name or str(path),
        file.servers,
        file.gpus_per_server,
        _device(file.gpu, f"{where}: gpu"),
        file.inside,
        file.between,
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
    """Write a file from which `from_yaml` reads the same cluster."""
    import yaml

    whole = asdict(cluster)
    entries = {}
    for name in ("name", "gpus_per_server", "inside", "between", "servers"):
        entries[name] = whole[name]
    entries["gpu"] = whole["device"]
    with file_errors(f"--out {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, yaml.safe_dump(entries, sort_keys=False))
