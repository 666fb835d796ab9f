"""Blocks on their way back from a store into host memory, by (life, logical block)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.kv_cache.device_blocks import NO_MEMORY
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.prefetch.outcome import PrefetchOutcome
from vllm_gaudi_ucm.prefetch.priority import PrefetchPriority

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_gaudi_ucm.prefetch.block_reader import Allocate
    from vllm_gaudi_ucm.prefetch.engine import PrefetchEngine
    from vllm_gaudi_ucm.prefetch.handle import PrefetchHandle

logger = plugin_logger(__name__)

Pair = tuple[int, int]


class CopyLoads:
    """Nothing here waits for a load, and nothing writes to the device.

    Args:
        engine: loads; the caller's to stop.
        block_bytes: of a block.
        allocate: host memory of so many bytes.
    """

    def __init__(self, engine: PrefetchEngine, block_bytes: int, allocate: Allocate) -> None:
        self._engine = engine
        self._block_bytes = block_bytes
        self._allocate = allocate
        self._loads: dict[Pair, tuple[PrefetchHandle, memoryview]] = {}
        self._failed: list[Pair] = []

    def __len__(self) -> int:
        """Loads under way, and those that have ended and that nobody has asked for."""
        return len(self._loads) + len(self._failed)

    def start(self, pair: Pair, key: bytes) -> None:
        """Has the block under `key` read; `finished` gives it."""
        try:
            data = self._allocate(self._block_bytes)
        except NO_MEMORY as error:
            logger.warning("memory mode: no host memory for a block that comes back: %s", error)
            self._failed.append(pair)
            return

        def deliver(index: int, block: memoryview) -> None:
            data[:] = block

        handle = self._engine.submit_prefetch(f"copy {name_of(pair)}", [key], PrefetchPriority.URGENT, deliver)
        self._loads[pair] = handle, data

    def finished(self) -> Iterator[tuple[Pair, memoryview | None]]:
        """Loads that have ended since the last call: the block, None where it could not be read."""
        failed, self._failed = self._failed, []
        for pair in failed:
            yield pair, None
        for pair in [pair for pair, (handle, _) in self._loads.items() if handle.outcome is not None]:
            handle, data = self._loads.pop(pair)
            is_ready = handle.outcome is PrefetchOutcome.READY
            self._engine.forget(handle.request_id)
            yield pair, data if is_ready else None

    def end(self, life: int) -> None:
        """Gives up the loads of a life."""
        self._failed = [pair for pair in self._failed if pair[0] != life]
        for pair in [pair for pair in self._loads if pair[0] == life]:
            handle, _ = self._loads.pop(pair)
            self._engine.forget(handle.request_id)


def name_of(pair: Pair) -> str:
    return f"{pair[0]}:{pair[1]}"
