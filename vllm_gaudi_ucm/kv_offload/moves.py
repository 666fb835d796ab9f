"""Blocks of requests on their way off the device and back: frees and takes blocks, and orders what the worker moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.kv_offload.summary_records import Rows
from vllm_gaudi_ucm.protocol.offload import BlockMove, ResidencyOrders, TablePatch

if TYPE_CHECKING:
    from vllm_gaudi_ucm.kv_offload.request_blocks import Life, RequestBlocks
    from vllm_gaudi_ucm.protocol.offload import ResidencyTotals
    from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlock
    from vllm_gaudi_ucm.vllm_api.steps import Request


class Moves:
    """Carries out what scores ask for, step by step.

    Args:
        blocks: tables and free blocks.
        num_rows: blocks that may have a copy.
        totals: takes what happens.
    """

    def __init__(self, blocks: RequestBlocks, num_rows: int, totals: ResidencyTotals) -> None:
        self.rows = Rows(num_rows)
        self.orders = ResidencyOrders()
        self._blocks = blocks
        self._totals = totals

    def take_orders(self) -> ResidencyOrders:
        """Those since the last call; lives that are over have no moves any more."""
        orders, self.orders = self.orders, ResidencyOrders()
        ended = set(orders.ended)
        orders.saves = [move for move in orders.saves if move.life not in ended]
        orders.loads = [move for move in orders.loads if move.life not in ended]
        orders.stored = [block for block in orders.stored if block[0] not in ended]
        orders.dropped = [pair for pair in orders.dropped if pair[0] not in ended]
        orders.patches = [patch for patch in orders.patches if patch.life not in ended]
        return orders

    def end(self, life: Life) -> None:
        """Frees the blocks that wait for loads, and the places of copies."""
        self._blocks.give_back(list(life.loading.values()))
        self.rows.give_back(life.rows.values())
        self.orders.ended.append(life.number)

    def release(self, life: Life, saves: int) -> tuple[int, int]:
        """Releases what has a copy and orders copies of the rest; returns (released blocks, copies still allowed)."""
        released, waiting = 0, []
        for number in life.leaving:
            if number in life.away or not self._blocks.is_owned_alone(life.request_id, number):
                continue
            if number in life.saved:
                self._blocks.release(life.request_id, number)
                life.away.add(number)
                self.orders.patches.append(TablePatch(life.number, life.request_id, number, 0))
                released += 1
                continue
            row = self._take_row(life) if saves > 0 and number not in life.saving else None
            if row is not None:
                saves -= 1
                life.rows[number] = row
                life.saving.add(number)
                block = self._blocks.table(life.request_id)[number].block_id
                self.orders.saves.append(BlockMove(life.number, number, block, row))
            waiting.append(number)
        life.leaving = waiting
        self._totals.released += released
        return released, saves

    def _take_row(self, life: Life) -> int | None:
        """A free row, or that of a block of the same request that is back on the device and stays there."""
        row = self.rows.take()
        if row is None:
            back = next((number for number in life.saved - life.away if number not in life.leaving), None)
            if back is not None:
                life.saved.discard(back)
                self.orders.dropped.append((life.number, back))
                row = life.rows.pop(back)
        return row

    def bring_back(self, life: Life, request: Request, spare: int, loads: int) -> int:
        """Brings back what can be found, and orders loads of the rest; returns the loads still allowed."""
        waiting = []
        for number in life.coming:
            if spare <= 0 or loads <= 0:
                waiting.append(number)
                continue
            found = self._blocks.take_cached(request, number)
            spare -= 1
            if found is not None:
                self._return(life, number, found)
                self._totals.found += 1
                continue
            loads -= 1
            block = life.loading[number] = self._blocks.take()
            key = life.stored.get(number, b"")
            self.orders.loads.append(BlockMove(life.number, number, block.block_id, life.rows[number], key))
        life.coming = waiting
        return loads

    def _return(self, life: Life, number: int, block: KVCacheBlock) -> None:
        self._put(life, number, block)
        self.orders.patches.append(TablePatch(life.number, life.request_id, number, block.block_id))

    def _put(self, life: Life, number: int, block: KVCacheBlock) -> None:
        self._blocks.put(life.request_id, number, block)
        life.away.discard(number)
        if life.stored.pop(number, None) is not None:
            # the connector's store may evict it: before the block leaves again there is a copy of its own
            life.saved.discard(number)
            self.rows.give_back([life.rows.pop(number)])

    def leave_stored(self, life: Life, keys: Mapping[int, bytes]) -> dict[int, int]:
        """Frees blocks that nothing was written to yet, as far as there are rows: the connector's records are their
        copies. keys: by logical block, the least wanted first. Returns their rows."""
        left: dict[int, int] = {}
        for number, key in keys.items():
            row = self.rows.take()
            if row is None:
                break
            self._blocks.release(life.request_id, number)
            left[number] = life.rows[number] = row
            life.stored[number] = key
            life.saved.add(number)
            life.away.add(number)
            self.orders.stored.append((life.number, number, row))
        self._totals.stored += len(left)
        return left

    def fetch_stored(self, life: Life, numbers: Sequence[int], most: int) -> dict[int, tuple[bytes, int]]:
        """Gives up to `most` blocks that were left in the connector's store a place at once, for the connector to load
        into before the request runs again. Returns keys and physical blocks."""
        fetched: dict[int, tuple[bytes, int]] = {}
        for number in [number for number in numbers if number in life.stored][: max(0, most)]:
            block, key = self._blocks.take(), life.stored[number]
            self._put(life, number, block)
            fetched[number] = key, block.block_id
        return fetched

    def find_cached(self, life: Life, request: Request, unwritten: Set[int]) -> None:
        """Blocks that were left in the connector's store, and that the prefix cache holds: they are there at once.

        unwritten: physical blocks that the step has yet to compute.
        """
        for number in list(life.stored):
            found = self._blocks.take_cached(request, number, unwritten)
            if found is not None:
                self._return(life, number, found)
                self._totals.found += 1

    def take_save(self, life: Life, number: int, saved: bool) -> None:
        life.saving.discard(number)
        if saved:
            life.saved.add(number)
            self._totals.saved += 1
            return
        self._totals.unsaved += 1
        self.rows.give_back([life.rows.pop(number)])
        life.leaving = [other for other in life.leaving if other != number]

    def take_load(self, life: Life, number: int, loaded: bool) -> None:
        block = life.loading.pop(number)
        if loaded:
            self._return(life, number, block)
            self._totals.loaded += 1
            return
        self._totals.failed += 1
        life.lost.add(number)
        self._blocks.give_back([block])
