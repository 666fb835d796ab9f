"""Blocks on their way off the device and back: frees and takes blocks, and orders the worker's copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.protocol.offload import BlockMove, OffloadOrders, OffloadTotals, TablePatch

if TYPE_CHECKING:
    from vllm_gaudi_ucm.memory_mode.offload_state import OffloadState
    from vllm_gaudi_ucm.memory_mode.request_blocks import RequestBlocks
    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlock
    from vllm_gaudi_ucm.vllm_api.steps import Request


class SummaryRows:
    """Places of summaries of offloaded blocks, 0 to `num_rows`, each free or taken."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take_row(self) -> int | None:
        """A free row, None if all are taken."""
        return self._free.pop() if self._free else None

    def give_back(self, rows: Iterable[int]) -> None:
        self._free.extend(rows)

    def check_integrity(self, taken: Iterable[int]) -> None:
        """Conservation: every row is free or taken, once."""
        if sorted([*self._free, *taken]) != list(range(self.num_rows)):
            raise AssertionError(f"rows of offloaded blocks: free {sorted(self._free)}, taken {sorted(taken)}")


class Moves:
    """Carries out the moves that scores call for, step by step.

    Args:
        num_rows: blocks that may have a copy.
    """

    def __init__(self, blocks: RequestBlocks, num_rows: int, totals: OffloadTotals) -> None:
        self.rows = SummaryRows(num_rows)
        self.orders = OffloadOrders()
        self._blocks = blocks
        self._totals = totals

    def take_orders(self) -> OffloadOrders:
        """Takes the orders since the last call; generations that have ended have no moves."""
        orders, self.orders = self.orders, OffloadOrders()
        ended = set(orders.ended)
        return OffloadOrders(
            ended=orders.ended,
            dropped=[pair for pair in orders.dropped if pair[0] not in ended],
            stored=[block for block in orders.stored if block[0] not in ended],
            patches=[patch for patch in orders.patches if patch.generation not in ended],
            saves=[move for move in orders.saves if move.generation not in ended],
            loads=[move for move in orders.loads if move.generation not in ended],
        )

    def end(self, state: OffloadState) -> None:
        """Frees the blocks that wait for loads, and the places of copies."""
        self._blocks.give_back(list(state.loading.values()))
        self.rows.give_back(state.rows.values())
        self.orders.ended.append(state.generation)

    def release(self, state: OffloadState, saves: int) -> tuple[int, int]:
        """Releases blocks that have a copy and orders copies of the rest; returns (released, copies still allowed)."""
        released, waiting = 0, []
        for number in state.to_evict:
            if number in state.offloaded or not self._blocks.is_owned_alone(state.request_id, number):
                continue
            if number in state.saved:
                self._blocks.release(state.request_id, number)
                state.offloaded.add(number)
                self.orders.patches.append(TablePatch(state.generation, state.request_id, number, 0))
                released += 1
                continue
            row = self._take_row(state) if saves > 0 and number not in state.saving else None
            if row is not None:
                saves -= 1
                state.rows[number] = row
                state.saving.add(number)
                block = self._blocks.table(state.request_id)[number].block_id
                self.orders.saves.append(BlockMove(state.generation, number, block, row))
            waiting.append(number)
        state.want(to_evict=waiting)
        self._totals.released += released
        return released, saves

    def _take_row(self, state: OffloadState) -> int | None:
        """A free row, or the row of a block of the same request that is back on the device and stays there."""
        row = self.rows.take_row()
        if row is None:
            back = next((number for number in state.saved - state.offloaded if number not in state.to_evict), None)
            if back is not None:
                state.saved.discard(back)
                self.orders.dropped.append((state.generation, back))
                row = state.rows.pop(back)
        return row

    def bring_back(self, state: OffloadState, request: Request, spare: int, loads: int) -> int:
        """Takes blocks from the prefix cache, and orders loads of the rest; returns the loads still allowed."""
        waiting = []
        for number in state.to_load:
            if spare <= 0 or loads <= 0:
                waiting.append(number)
                continue
            found = self._blocks.take_cached(request, number)
            spare -= 1
            if found is not None:
                self._return(state, number, found)
                self._totals.found += 1
                continue
            loads -= 1
            block = state.loading[number] = self._blocks.take_block()
            key = state.stored.get(number, b"")
            self.orders.loads.append(BlockMove(state.generation, number, block.block_id, state.rows[number], key))
        state.want(to_load=waiting)
        return loads

    def _return(self, state: OffloadState, number: int, block: KVCacheBlock) -> None:
        self._put(state, number, block)
        self.orders.patches.append(TablePatch(state.generation, state.request_id, number, block.block_id))

    def _put(self, state: OffloadState, number: int, block: KVCacheBlock) -> None:
        self._blocks.put(state.request_id, number, block)
        state.offloaded.discard(number)
        if state.stored.pop(number, None) is not None:
            # the connector's store may evict it: before the block leaves again, it gets a copy of its own
            state.saved.discard(number)
            self.rows.give_back([state.rows.pop(number)])

    def leave_stored(self, state: OffloadState, keys: Mapping[int, bytes]) -> dict[int, int]:
        """Frees blocks that nothing was written to yet, as far as there are rows: the connector's records are their
        copies. keys: by logical block, the least wanted first. Returns their rows."""
        left: dict[int, int] = {}
        for number, key in keys.items():
            row = self.rows.take_row()
            if row is None:
                break
            self._blocks.release(state.request_id, number)
            left[number] = state.rows[number] = row
            state.stored[number] = key
            state.saved.add(number)
            state.offloaded.add(number)
            self.orders.stored.append((state.generation, number, row))
        self._totals.stored += len(left)
        return left

    def fetch_stored(self, state: OffloadState, numbers: Sequence[int], most: int) -> dict[int, tuple[bytes, int]]:
        """Allocates at once up to `most` blocks that were left in the connector's store, for the connector to load
        before the request runs again. Returns keys and physical blocks.
        """
        fetched: dict[int, tuple[bytes, int]] = {}
        for number in [number for number in numbers if number in state.stored][: max(0, most)]:
            block, key = self._blocks.take_block(), state.stored[number]
            self._put(state, number, block)
            fetched[number] = key, block.block_id
        return fetched

    def find_cached(self, state: OffloadState, request: Request, unwritten: Set[int]) -> None:
        """Blocks that were left in the connector's store, and that the prefix cache holds: they are there at once.

        unwritten: physical blocks that the step has yet to compute.
        """
        for number in list(state.stored):
            found = self._blocks.take_cached(request, number, unwritten)
            if found is not None:
                self._return(state, number, found)
                self._totals.found += 1

    def take_back(self, state: OffloadState, request: Request) -> None:
        """Puts offloaded blocks that the prefix cache still has into the table, which no further step reads."""
        for number in state.offloaded.difference(state.loading):
            found = self._blocks.take_cached(request, number)
            if found is not None:
                self._put(state, number, found)

    def take_save(self, state: OffloadState, number: int, saved: bool) -> None:
        state.saving.discard(number)
        if saved:
            state.saved.add(number)
            self._totals.saved += 1
            return
        self._totals.unsaved += 1
        self.rows.give_back([state.rows.pop(number)])
        state.want(to_evict=[other for other in state.to_evict if other != number])

    def take_load(self, state: OffloadState, number: int, loaded: bool) -> None:
        block = state.loading.pop(number)
        if loaded:
            self._return(state, number, block)
            self._totals.loaded += 1
            return
        self._totals.failed += 1
        state.lost.add(number)
        self._blocks.give_back([block])
