"""What memory mode has done since the engine started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ResidencyTotals:
    """Blocks, but for `scored`, which counts requests' refreshes.

    saved, unsaved: copies made, and not made because the store could not. released: left the device.
    loaded, failed: came back from the store, and could not. found: came back from the prefix cache, without a copy.
    """

    scored: int = 0
    saved: int = 0
    unsaved: int = 0
    released: int = 0
    loaded: int = 0
    failed: int = 0
    found: int = 0
