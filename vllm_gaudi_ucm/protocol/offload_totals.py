"""What memory mode has done since the engine started."""

from __future__ import annotations

import msgspec


class ResidencyTotals(msgspec.Struct):
    """Blocks, but for `scored`, `missed`, `kept` and `repeated`.

    scored: how often a request was scored. missed: the sum, over these, of the estimated share of its attention that
    fell on blocks that were away. kept: requests that got all of their blocks back because too much was missed.
    stored: left in the connector's store when a prompt was loaded. repeated: first steps of such prompts that missed
    too much and were computed again.
    saved, unsaved: copies made, and not made because the store could not. released: left the device.
    loaded, failed: came back from the store, and could not. found: came back from the prefix cache, without a copy.
    away: of live requests, not on the device now.
    """

    scored: int = 0
    missed: float = 0.0
    kept: int = 0
    stored: int = 0
    repeated: int = 0
    saved: int = 0
    unsaved: int = 0
    released: int = 0
    loaded: int = 0
    failed: int = 0
    found: int = 0
    away: int = 0
