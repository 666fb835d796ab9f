"""Places for blocks in host memory: how many there are, and who has which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.vllm_api.stage_layers import block_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheGroupSpec


def engine_block_bytes(block_bytes: int, groups: Sequence[KVCacheGroupSpec], vllm_config: VllmConfig) -> int:
    """Bytes of a block on all workers together, which have the same number of slots each.

    block_bytes: of what one worker has of it. groups: with that worker's layers. Pipeline stages may have other numbers
    of layers in a block.
    """
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        own = [len(group.layer_names) for group in groups]
        block_bytes = block_bytes // max(own) * sum(block_layers(vllm_config, own))
    return block_bytes * parallel.tensor_parallel_size


class HostSlots:
    """Numbers of slots, each for one block of all layers and workers.

    Args:
        count: of all slots.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # the lowest first: memory is taken from the system as slots are used
        self._free = list(range(count))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """So many slots; None where there are fewer."""
        if count > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(count))

    def give(self, slots: Sequence[int]) -> None:
        """Slots that are free again."""
        self._free.extend(reversed(slots))

    def check_integrity(self, held: Sequence[int]) -> None:
        """Conservation: every slot is free or held, once."""
        if sorted([*self._free, *held]) != list(range(self.count)):
            raise AssertionError(f"host slots: {self.count}, free {sorted(self._free)}, held {sorted(held)}")
