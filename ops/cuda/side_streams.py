"""Streams in addition to the current one, on which a captured graph has parallel branches."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

_threads = threading.local()


class SideStreams(NamedTuple):
    """Streams in addition to the current one: of its priority, and of a higher one."""

    equal: list[torch.cuda.Stream]
    ahead: list[torch.cuda.Stream]


def side_streams(device: torch.device) -> SideStreams:
    """Returns the side streams of this thread: launches here must not enter a graph that another thread captures."""
    streams: dict[torch.device, SideStreams] | None = getattr(_threads, "streams", None)
    if streams is None:
        streams = _threads.streams = {}
    if device not in streams:
        made = ([torch.cuda.Stream(device, priority=priority) for _ in range(4)] for priority in (0, -1))
        streams[device] = SideStreams(*made)
    return streams[device]
