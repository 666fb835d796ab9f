"""Ports for servers and workers of tests, from where the system takes none for connections that go out."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

LOWEST = 10_000
LOCAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_OF_LINUX = 32_768


def free_port() -> int:
    """A port that nobody holds, at any address.

    A port that the system chooses for us (`bind` to 0) is one that it may give to any connection a moment later,
    while the server still imports: "Address already in use", seen once in some thousand starts.
    """
    places = _places()
    for port in random.SystemRandom().sample(places, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"none of 100 ports between {places.start} and {places.stop} is free")


def _places() -> range:
    """Each process of a test run has ports of its own: what one has found, no other takes before it is bound."""
    end = int(LOCAL_RANGE.read_text().split()[0]) if LOCAL_RANGE.exists() else LOWEST_OF_LINUX
    start, stop = (LOWEST, end) if end > LOWEST + 1000 else (end, 60_000)
    index = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return range(start + index, stop, max(count, index + 1))


def port_of_ranks(start_port: int | None = None, max_attempts: int | None = None) -> int:
    """In place of `vllm.utils.network_utils._get_open_port`, which chooses the port at which ranks meet.

    `VLLM_PORT` is no way out: all engines of a process that start at the same time would get the same port.
    """
    return free_port()
