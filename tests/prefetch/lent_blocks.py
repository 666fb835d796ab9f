"""Helpers of `test_lent_blocks.py` that other tests use, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

from tests.prefetch.stores import BLOCK_BYTES, ScriptedStore, content
from vllm_gaudi_ucm.store.base import Loan


class LendingStore(ScriptedStore):
    """`lent`: loans that are open now. `asked`: keys of each call. `batch`: blocks that it is asked for at once."""

    lent = 0

    def __init__(self, numbers: Iterable[int] = (), batch: int = 1) -> None:
        super().__init__(numbers)
        self.batch_bytes = batch * BLOCK_BYTES
        self.asked: list[list[bytes]] = []

    def lend(self, keys: Sequence[bytes]) -> list[AbstractContextManager[memoryview] | None] | None:
        self.asked.append(list(keys))
        return [self._loan(key) if key in self.blocks else None for key in keys]

    def _loan(self, of: bytes) -> Loan:
        self.lent += 1
        return Loan(memoryview(content(of)), self._take_back)

    def _take_back(self) -> None:
        self.lent -= 1
