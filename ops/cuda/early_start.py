"""Kernels that start before the one ahead of them on the stream has ended: CUDA's programmatic dependent launch.

Such a kernel waits inside (`gdc_wait`) before it reads what the others write, and before it writes anything. Its launch
and its work until then add no time. It may start once every program of the kernel ahead has ended, or has signalled it
(`gdc_launch_dependents`). Every program waits, so when a kernel has ended, all kernels before it have ended too.
"""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=16)
def starts_early(device: torch.device) -> bool:
    """True if a kernel may start before its predecessor ends, and wait inside (Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def follows(early: bool) -> dict[str, bool]:
    """Launch options of a kernel that waits inside for its predecessor on the stream."""
    return {"launch_pdl": True} if early else {}
