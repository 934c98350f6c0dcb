"""The ports of the worlds that tests start."""

from __future__ import annotations

import socket

import pytest

from tests.distributed.world import free_port


def test_a_port_is_kept_for_a_server_that_reuses_addresses():
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))  # what is refused by name is not given by the kernel's choice either
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(server.getsockname()):
        assert server.getsockname()[1] == port
