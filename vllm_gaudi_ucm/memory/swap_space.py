"""Host memory for blocks of preempted requests, and the copies in both directions.

Does not import vLLM: the doctor measures the link with this module, in a process without the plugin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.ops.kv_cache.api import swap_blocks
from vllm_gaudi_ucm.protocol.memory_orders import LinkSpeed

if TYPE_CHECKING:
    from vllm_gaudi_ucm.device import Device

logger = plugin_logger(__name__)

CHUNK_BYTES = 64 << 20
"""Size of one allocation of host memory, and of blocks that leave the device together."""
MOST_STAGED = 4
"""The most chunks on the device that wait for their copy to host memory."""

Caches = Sequence[Sequence[torch.Tensor]]
"""Keys or values, one tensor for each layer, [blocks, block size, kv heads, head size]; a list for each shape."""
Pairs = Sequence[tuple[int, int]]


class _Staged(NamedTuple):
    """Blocks on their way to the host. slots: their destinations."""

    slots: frozenset[int]
    done: Future[None]


class SwapSpace:
    """Slots that hold one block of all layers each; memory is taken from the system as slots are used.

    Copies run after everything that the calling thread launched before, and before everything that it launches later.
    If the device copies to page-locked memory during computation, blocks that leave are gathered on the device, and a
    thread brings them to the host: no step waits for that.

    Args:
        caches: the device's caches.
    """

    def __init__(self, caches: Caches, device: Device, count: int) -> None:
        self._caches = [list(run) for run in caches]
        self._device = device
        self._count = count
        self.block_bytes = sum(run[0][0].nbytes * len(run) for run in self._caches)
        self._chunk = max(1, CHUNK_BYTES // self.block_bytes)
        # a chunk has a tensor for each list of caches: [slots, layers, block size, kv heads, head size]
        self._chunks: list[list[torch.Tensor]] = []
        self._staged: list[_Staged] = []
        self._beside: ThreadPoolExecutor | None = None
        if device.pins_host_memory:
            self._beside = ThreadPoolExecutor(1, "ucm-swap", initializer=device.enter_thread)

    def close(self) -> None:
        if self._beside is not None:
            self._beside.shutdown()

    @torch.inference_mode()
    def store(self, pairs: Pairs) -> None:
        """Copies (block, slot) from the device to the host. Each block may be overwritten as soon as this returns."""
        if self._beside is None:
            self._store_behind(pairs)
            return
        for first in range(0, len(pairs), self._chunk):
            self._store_beside(self._beside, pairs[first : first + self._chunk])

    @torch.inference_mode()
    def load(self, pairs: Pairs) -> None:
        """Copies (slot, block) from the host to the device."""
        self._await(slot for slot, _ in pairs)
        for chunk, local in self._by_chunk(pairs, 0):
            self._copy(chunk, self._caches, local)

    @torch.inference_mode()
    def measure(self, request_bytes: int = 0, clock: Callable[[], float] = time.perf_counter) -> LinkSpeed:
        """Times copies of blocks of the cache to the host and back, which restore them; the second run counts.

        request_bytes: see LinkSpeed.
        """
        count = min(self._caches[0][0].shape[0], self._count, self._chunk)
        pairs = [(number, number) for number in range(count)]
        seconds = []
        for copy in (self._store_behind, self.load):
            for _ in range(2):
                self._device.synchronize()
                begin = clock()
                copy(pairs)
                self._device.synchronize()
                last = clock() - begin
            seconds.append(max(last, 1e-9))
        out, back = (count * self.block_bytes / one for one in seconds)
        return LinkSpeed(out, back, request_bytes)

    def _store_behind(self, pairs: Pairs) -> None:
        """Copies in the stream of the computation."""
        self._await(slot for _, slot in pairs)
        for chunk, local in self._by_chunk(pairs, 1):
            self._copy(self._caches, chunk, local)
        if self._device.kind == "hpu":
            # it is not known whether the host's side of a running copy is safe from the next one
            self._device.synchronize()

    def _store_beside(self, thread: ThreadPoolExecutor, pairs: Pairs) -> None:
        slots = frozenset(slot for _, slot in pairs)
        self._drop_done()
        if len(self._staged) >= MOST_STAGED:
            self._store_behind(pairs)
            return
        places = [self._place(slot) for _, slot in pairs]
        try:
            stage = [run[0].new_empty((len(pairs), len(run), *run[0].shape[1:])) for run in self._caches]
        except torch.OutOfMemoryError:
            self._store_behind(pairs)
            return
        blocks = torch.tensor([(block, number) for number, (block, _) in enumerate(pairs)])
        for run, staged in zip(self._caches, stage, strict=True):
            swap_blocks(run, list(staged.unbind(1)), blocks)
        fence = self._device.fence()

        @torch.inference_mode()
        def bring() -> None:
            with self._device.beside_computation(fence):
                for number, place in enumerate(places):
                    for host, staged in zip(place, stage, strict=True):
                        host.copy_(staged[number], non_blocking=True)

        self._staged.append(_Staged(slots, thread.submit(bring)))

    def _place(self, slot: int) -> list[torch.Tensor]:
        """Returns a slot as [layers, block size, kv heads, head size] for each list of caches."""
        number, local = divmod(slot, self._chunk)
        return [tensor[local] for tensor in self._take(number)]

    def _await(self, slots: Iterable[int]) -> None:
        """Waits until the blocks that leave for these slots have arrived."""
        wanted = set(slots)
        for staged in self._staged:
            if staged.slots & wanted:
                staged.done.result()
        self._drop_done()

    def _drop_done(self) -> None:
        """Drops finished copies. Raises the error of a failed copy, whose blocks are lost."""
        done = [staged for staged in self._staged if staged.done.done()]
        self._staged = [staged for staged in self._staged if staged not in done]
        for staged in done:
            staged.done.result()

    def _by_chunk(self, pairs: Pairs, side: int) -> list[tuple[Caches, list[tuple[int, int]]]]:
        """Groups pairs by host chunk: its caches, and its pairs, with slots (`side` of each) counted from its first."""
        chunks: dict[int, list[tuple[int, int]]] = {}
        for left, right in pairs:
            number, local = divmod(right if side else left, self._chunk)
            chunks.setdefault(number, []).append((left, local) if side else (local, right))
        return [([tensor.unbind(1) for tensor in self._take(number)], members) for number, members in chunks.items()]

    def _take(self, number: int) -> list[torch.Tensor]:
        """Returns a chunk, after allocating it and those before it if needed."""
        while len(self._chunks) <= number:
            slots = min(self._chunk, self._count - len(self._chunks) * self._chunk)
            self._chunks.append(
                [self._empty((slots, len(run), *run[0].shape[1:]), run[0].dtype) for run in self._caches]
            )
        return self._chunks[number]

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._device.pins_host_memory:
            try:
                return torch.empty(shape, dtype=dtype, pin_memory=True)
            except (MemoryError, RuntimeError) as error:  # page-locked memory comes from torch
                logger.warning("Preemption: no page-locked memory (%s); copies from other memory are slower.", error)
        return torch.empty(shape, dtype=dtype)

    def _copy(self, sources: Caches, targets: Caches, pairs: Pairs) -> None:
        whole = torch.tensor(pairs, dtype=torch.int64)
        # On a Gaudi each number of blocks would be a separate recipe; on a GPU one block is one contiguous run of host
        # memory, and several blocks are not.
        parts = [whole] if self._device.kind == "cpu" else whole.split(1)
        for part in parts:
            self._device.end_recipe()
            for source, target in zip(sources, targets, strict=True):
                swap_blocks(source, target, part, non_blocking=True)
            self._device.end_recipe()
