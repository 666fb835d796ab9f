"""Sums of small tensors over the GPUs of one machine, through memory that each of them reads.

A decode has two sums of a few KiB in each layer. NCCL moves them in steps; with torch's symmetric memory a kernel reads
what the other ranks have written. Which is faster depends on the size, the links and the number of ranks, so it is
measured at start, on all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from vllm_gaudi_ucm.distributed.ranks import Ranks
from vllm_gaudi_ucm.logger import plugin_logger

logger = plugin_logger(__name__)

SIZES = tuple(1 << power for power in range(12, 21))
"""Bytes of a tensor, measured; a size between two of them goes as the larger one, and more than the last to NCCL."""
ALIGNED = 16  # bytes that a load of the kernels has
CALLS = 16  # sums in a graph that is timed
FIXED_ORDER = (2, 4, 8)  # ranks for which torch's kernels add in one order on every rank, so that sums are equal


class Way(StrEnum):
    """The ways to compute a sum.

    ONE_SHOT: each rank reads all others. TWO_SHOTS: each sums its part, which others read.
    """

    NCCL = "NCCL"
    ONE_SHOT = "one shot"
    TWO_SHOTS = "two shots"


class SmallSums:
    """Sums over a group of GPUs; all ranks make it together, and use it for the same tensors in the same order.

    Args:
        buffer: uint8 of as many bytes as the largest sum, in memory that all ranks of the group have mapped.
        group: torch's name of the device group.
        ways: by the size in bytes, the same on all ranks; without them only `by` computes.
    """

    def __init__(self, buffer: Tensor, group: str, ways: Mapping[int, Way] | None = None) -> None:
        self._buffer = buffer
        self._group = group
        self._ways = dict(ways or {})

    def with_ways(self, ways: Mapping[int, Way]) -> SmallSums:
        """Returns these sums with a way for each size."""
        return SmallSums(self._buffer, self._group, ways)

    def __call__(self, own: Tensor) -> Tensor | None:
        """Returns the sum as a new tensor, identical on all ranks to the last bit; None if NCCL is to compute it."""
        size = own.numel() * own.itemsize
        if not size or size > SIZES[-1] or size % ALIGNED or not own.is_contiguous():
            return None
        way = self._ways[max(SIZES[0], 1 << (size - 1).bit_length())]
        return None if way is Way.NCCL else self.by(way, own)

    def by(self, way: Way, own: Tensor) -> Tensor:
        """Returns the sum, computed through the shared memory."""
        shared = self._buffer[: own.numel() * own.itemsize].view(own.dtype).view(own.shape)
        if way is Way.ONE_SHOT:
            found: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, own, "sum", self._group)
            return found
        shared.copy_(own)
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self._group)
        return shared.clone()


def fastest_ways(times: Mapping[Way, Sequence[float]], ranks: Ranks) -> dict[int, Way]:
    """Returns the way of each of `SIZES`, by the seconds of the slowest rank. All ranks call it together."""
    slowest = {way: ranks.most_of([round(1e9 * time) for time in found]) for way, found in times.items()}
    return {size: min(slowest, key=lambda way: slowest[way][place]) for place, size in enumerate(SIZES)}


def small_sums(device: torch.device, device_group: dist.ProcessGroup, ranks: Ranks) -> SmallSums | None:
    """Returns the sums of this group if memory can be shared and pays, else None. All ranks call it together."""
    properties = torch.cuda.get_device_properties(device)
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    places = [place.split() for place in ranks.texts(f"{machine} {properties.uuid}")]
    machines, cards = (set(found) for found in zip(*places, strict=True))
    if ranks.size not in FIXED_ORDER or len(machines) > 1 or len(cards) < ranks.size:
        return None
    sums, reason = None, ""
    try:
        sums = SmallSums(_shared_buffer(device, device_group), device_group.group_name)
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
    if not ranks.all_of(sums is not None):
        logger.warning("NCCL computes small sums, too: memory is not shared by all ranks. %s", reason)
        return None
    assert sums is not None
    return _if_faster(sums, device, device_group, ranks)


def _shared_buffer(device: torch.device, device_group: dist.ProcessGroup) -> Tensor:
    from torch.distributed import _symmetric_memory as symmetric

    buffer = symmetric.empty(SIZES[-1], device=device, dtype=torch.uint8)
    symmetric.rendezvous(buffer, device_group.group_name)
    return buffer


def _if_faster(
    sums: SmallSums, device: torch.device, device_group: dist.ProcessGroup, ranks: Ranks
) -> SmallSums | None:
    from vllm_gaudi_ucm.ops.cuda.graph_time import graph_seconds

    def by_nccl(own: Tensor) -> None:
        dist.all_reduce(own, group=device_group)

    ways: dict[Way, Callable[[Tensor], object]] = {Way.NCCL: by_nccl}
    ways |= {way: partial(sums.by, way) for way in (Way.ONE_SHOT, Way.TWO_SHOTS)}
    stream, times = torch.cuda.Stream(device), {}
    for way, run in ways.items():
        times[way] = [graph_seconds(partial(_often, run, size, device), stream) / CALLS for size in SIZES]
    chosen = fastest_ways(times, ranks)
    for place, size in enumerate(SIZES):
        each = ", ".join(f"{way} {1e6 * found[place]:.1f} us" for way, found in times.items())
        logger.info("A sum of %d KiB over %d ranks: %s; %s", size >> 10, ranks.size, each, chosen[size])
    return None if set(chosen.values()) == {Way.NCCL} else sums.with_ways(chosen)


def _often(run: Callable[[Tensor], object], size: int, device: torch.device) -> None:
    own = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    for _ in range(CALLS):
        run(own)
