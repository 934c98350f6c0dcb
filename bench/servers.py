"""Two servers on one machine: network namespaces, joined by a link with a rate limit
and a byte counter.

Invariant: all names made here contain this process's id; the `with` block removes what
they name, also after an error.

Linux, root, and the commands ip and tc (iproute2). Each direction of the link has a
token bucket (tc's tbf) of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from megatron_2bw.base.errors import UserError

# no other host is in these networks
INTERFACE = "wire"
ADDRESSES = ("10.0.0.1", "10.0.0.2")
# Packets leave in pieces of at most this size, so that the bucket can be small: its
# content passes at full speed.
PIECE = 16384  # bytes, as the next three
BUCKET = 24576
QUEUE = 8 << 20
MTU = 9000
_FOLDER = Path("/run/netns")
_TCP = Path("/proc/sys/net/ipv4")


class Servers:
    """The two servers, 0 and 1; a context manager."""

    def __init__(self):
        name = f"2bw-{os.getpid()}"
        self.names = [f"{name}-0", f"{name}-1"]

    def __enter__(self) -> Servers:
        try:
            for name in self.names:
                _run(f"ip netns add {name}")
                _run(f"ip -n {name} link set lo up")
            end = f"name {INTERFACE} mtu {MTU} netns"
            near, far = self.names
            _run(f"ip link add {end} {near} type veth peer {end} {far}")
            for name, address in zip(self.names, ADDRESSES):
                _run(f"ip -n {name} address add {address}/24 dev {INTERFACE}")
                size = f"gso_max_size {PIECE - 100}"
                _run(f"ip -n {name} link set dev {INTERFACE} {size} up")
            # TCP as training clusters set it; this machine's defaults are for the
            # internet
            for number in (0, 1):
                with self.inside(number):
                    # every namespace may choose it
                    (_TCP / "tcp_congestion_control").write_text("reno")
                    (_TCP / "tcp_slow_start_after_idle").write_text("0")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *failure) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in self.names:  # the link goes with them
            if (_FOLDER / name).exists():
                _run(f"ip netns delete {name}")

    def limit(self, megabits: float | None) -> None:
        """Limit the link to `megabits` Mbit/s in each direction; None: no limit."""
        for name in self.names:
            command = f"tc -n {name} qdisc"
            if megabits is not None:
                bucket = f"rate {megabits * 1e6:.0f}bit burst {BUCKET} limit {QUEUE}"
                _run(f"{command} replace dev {INTERFACE} root tbf {bucket}")
            elif b"tbf" in _run(f"{command} show dev {INTERFACE}"):
                _run(f"{command} delete dev {INTERFACE} root")

    @contextlib.contextmanager
    def inside(self, number: int) -> Iterator[None]:
        """Move the calling thread to server `number`: its sockets and network files are
        that server's."""
        with (
            open("/proc/thread-self/ns/net") as outside,
            open(_FOLDER / self.names[number]) as server,
        ):
            os.setns(server.fileno(), os.CLONE_NEWNET)
            try:
                yield
            finally:
                os.setns(outside.fileno(), os.CLONE_NEWNET)

    def rate(self, megabits: float | None, seconds: float = 0.2) -> float:
        """Mbit/s of a long transfer from server 0 to 1 by plain TCP, at the present
        limit `megabits`."""
        with self.inside(1), socket.create_server((ADDRESSES[1], 0)) as waiting:
            address = waiting.getsockname()
            with self.inside(0):
                near = socket.create_connection(address)
            far, _ = waiting.accept()
        size = left = int((megabits or 4000) * 1e6 / 8 * seconds)
        with near, far, ThreadPoolExecutor(1) as sender:
            far.settimeout(60)
            time.sleep(0.01)  # the bucket fills
            begun = time.perf_counter()
            sender.submit(near.sendall, bytes(size))
            while left:
                left -= len(far.recv(1 << 20))
            return size * 8 / 1e6 / (time.perf_counter() - begun)


def sent_bytes() -> int:
    """Bytes that this process's server has sent over the link, by its kernel's
    count."""
    return psutil.net_io_counters(pernic=True)[INTERFACE].bytes_sent


def _run(command: str) -> bytes:
    done = subprocess.run(command.split(), capture_output=True, check=False)
    if done.returncode:
        why = " ".join(done.stderr.decode(errors="replace").split())
        raise UserError(f"{command}: {why or f'status {done.returncode}'}")
    return done.stdout
