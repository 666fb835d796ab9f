"""The values that workers warming the same graphs must agree on."""

from typing import Protocol


class Agreement(Protocol):
    """An agreement between workers: each calls the same methods in the same order, and all get the same answer."""

    def all_of(self, is_true: bool) -> bool:
        """True if it is true for every worker."""

    def most(self, value: int) -> int:
        """Returns the largest value of all workers."""


class _Alone:
    def all_of(self, is_true: bool) -> bool:
        return is_true

    def most(self, value: int) -> int:
        return value


ALONE: Agreement = _Alone()
"""The agreement of a single worker."""
