"""What a connector has moved so far, as the runner and /metrics ask for it."""

from __future__ import annotations

from typing import NamedTuple


class TransferTotals(NamedTuple):
    """Blocks since the start.

    loaded: device blocks filled from the store. recomputed: were to be, and failed or came late. saved: stored.
    unsaved: not stored, because too many were on their way or the store refused.
    """

    loaded: int = 0
    recomputed: int = 0
    saved: int = 0
    unsaved: int = 0

    def since(self, before: TransferTotals) -> TransferTotals:
        return TransferTotals(*(now - then for now, then in zip(self, before, strict=True)))
