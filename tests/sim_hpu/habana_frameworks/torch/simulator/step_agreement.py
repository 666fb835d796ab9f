"""Ranks must call the same collectives in the same step: on cards that do not, all of them hang.

Here every rank tells the others what it is about to do, and all raise where they differ.
"""

from collections.abc import Hashable

from habana_frameworks.torch.simulator.duties import duties

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

AGREEMENT = 37
_TEXT_BYTES = 512


class _Step:
    """Of this rank: what it computes now, as its test or its caller has named it."""

    tag: Hashable = None


def begin_step(tag: Hashable) -> None:
    """Names this rank's step, by the bucket that it has chosen: it is compared in the collectives from now on."""
    _Step.tag = tag


def compare(group: dist.ProcessGroup, call: str) -> None:
    """All ranks of a group come here before a collective. Raises HpuConstraintError on each where they differ.

    call: the collective and what it is given.
    """
    size = group.size()
    if size < 2 or not duties.on(AGREEMENT):
        return
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        own = f"step {_Step.tag!r}, {call}".encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        mine = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        all_of_them = [torch.empty_like(mine) for _ in range(size)]
        group.allgather([all_of_them], [mine]).wait()
        said = [bytes(text.tolist()).decode(errors="replace").strip() for text in all_of_them]
    if len(set(said)) > 1:
        found = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said))
        duties.refuse(AGREEMENT, "collective", found, "agree on the bucket on the CPU before the step")
