"""Builds the stand-in for CUDA, device.cpp, for the installed torch; and the
environment that puts it before torch.

Every symbol of CUDA's runtime and driver, cuBLAS and NCCL that torch imports and
device.cpp lacks returns 0: success.
"""

import functools
import hashlib
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

from filelock import FileLock

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "device"
LIBRARIES = (
    "libtorch_cuda.so",
    "libc10_cuda.so",
    "libtorch_python.so",
    "libtorch_cpu.so",
)
NAMES = re.compile(r"(__cuda|cuda[A-Z]|cu[A-Z](?!pti)|cublas|nccl)")


def missing() -> str | None:
    """What keeps the stand-in from being built; None: nothing."""
    if not shutil.which("g++"):
        return "g++ is not installed"
    if not (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "torch has no CUDA build here"
    if not (_nvidia() / "nccl" / "include").is_dir():
        return "torch's wheels bring no headers here"
    return None


def environment() -> dict[str, str]:
    """The variables of a process that computes on the stand-in, with eight devices and
    without compiled kernels."""
    library = build()
    return {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "DEVICE_GPUS": "8",
        "TORCHDYNAMO_DISABLE": "1",
    }


@functools.cache
def build() -> Path:
    """The library, built once for a torch and a source."""
    sources = (HERE / "device.cpp").read_bytes() + Path(__file__).read_bytes()
    key = hashlib.sha256(sources + str(_torch()).encode()).hexdigest()
    folder = BUILD / key[:16]
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so.1"
    with FileLock(folder / ".lock"):
        if not library.exists():
            _build(folder, library)
    return library


def _build(folder: Path, library: Path) -> None:
    include = f"-I{HERE / 'include'}"
    cuda = f"-I{_nvidia() / 'cu13' / 'include'}"
    nccl = f"-I{_nvidia() / 'nccl' / 'include'}"
    compiler = ("g++", "-std=c++20", "-O1", "-fPIC", include, cuda, nccl)
    _run(*compiler, "-c", HERE / "device.cpp", "-o", folder / "device.o")
    wanted = set()
    for name in LIBRARIES:
        for symbol in _symbols("-D", "-u", _torch() / "lib" / name):
            wanted.add(symbol.partition("@")[0])
    wanted -= set(_symbols("--defined-only", folder / "device.o"))
    rest = ""
    for name in sorted(filter(NAMES.match, wanted)):
        rest += f'extern "C" long {name}() {{ return 0; }}\n'
    (folder / "rest.cpp").write_text(rest)
    _run(*compiler, "-c", folder / "rest.cpp", "-o", folder / "rest.o")
    part = library.with_suffix(".part")
    objects = (folder / "device.o", folder / "rest.o")
    linker = ("g++", "-shared", "-Wl,-soname,libcuda.so.1")
    _run(*linker, *objects, "-ldl", "-o", part)
    (folder / "libnvidia-ml.so.1").symlink_to(library.name)
    part.rename(library)


def _symbols(*words: object) -> list[str]:
    return _run("nm", "--format=just-symbols", *words).split()


def _run(*words: object) -> str:
    argv = list(map(str, words))
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout


@functools.cache
def _torch() -> Path:
    return Path(importlib.util.find_spec("torch").origin).parent


def _nvidia() -> Path:
    return _torch().parent / "nvidia"
