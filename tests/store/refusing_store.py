"""A store that can be made to refuse blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_gaudi_ucm.store.memory import MemoryStore


class RefusingStore(MemoryStore):
    """A store that keeps what it has and, while `refuses`, neither takes nor gives a block."""

    refuses = False

    def save(self, key: bytes, block: memoryview) -> bool:
        return not self.refuses and super().save(key, block)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys) if self.refuses else super().lookup(keys)

    def lend(self, keys: Sequence[bytes]) -> Any:
        return [None] * len(keys) if self.refuses else super().lend(keys)
