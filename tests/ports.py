"""Ports for servers of tests, from where the system takes none for connections that go out."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 10_000
LOCAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_OF_LINUX = 32_768


def free_port() -> int:
    """A loopback port that nobody holds.

    A port that the system chooses for us (`bind` to 0) is one that it may give to any connection a moment later,
    while the server still imports: "Address already in use", seen once in some thousand starts.
    """
    end = int(LOCAL_RANGE.read_text().split()[0]) if LOCAL_RANGE.exists() else LOWEST_OF_LINUX
    places = range(LOWEST, end) if end > LOWEST + 1000 else range(end, 60_000)
    for port in random.SystemRandom().sample(places, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"none of 100 ports between {places.start} and {places.stop} is free")
