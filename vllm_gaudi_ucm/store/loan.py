"""A block that a store has lent: its bytes while the context is open."""

from __future__ import annotations

from collections.abc import Callable


class Loan:
    """A context, for one use. block: what is lent. end: called once it is given back."""

    __slots__ = ("_block", "_end")

    def __init__(self, block: memoryview, end: Callable[[], None]) -> None:
        self._block = block
        self._end = end

    def __enter__(self) -> memoryview:
        return self._block

    def __exit__(self, *exception: object) -> None:
        self._end()
