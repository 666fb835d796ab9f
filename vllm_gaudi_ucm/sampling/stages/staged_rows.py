"""One value, or one line of values, per logits row: rendered on the host, read on the device from a static tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray


class StagedRows:
    """Two host arrays in turn, and the tensor on the device that they are copied to, for the largest number of rows.

    The next step but one overwrites what a step has staged. It may: it has waited for the tokens of the step, also
    where steps are queued ahead. One step stages once, unless it waits for the device in between.

    Args:
        shape: (rows,) or (rows, width).
        dtype: of the values.
        pad: what rows hold that no request has.
        device: where they are read.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, pad: float, device: torch.device) -> None:
        self._host, self._other = np.full(shape, pad, dtype), np.full(shape, pad, dtype)
        self._pad = pad
        self._static = torch.from_numpy(self._host).to(device, copy=True)
        self._held: tuple[Hashable, int] | None = None

    def stage(self, values: NDArray, rows: int) -> torch.Tensor:
        """Copies values and, behind them, pads; returns the first `rows` rows on the device."""
        self._held = None
        self._host, self._other = self._other, self._host
        self._host[: len(values)] = values
        self._host[len(values) : rows] = self._pad
        return self._copy(rows)

    def keep(self, key: Hashable, rows: int, values: Callable[[], NDArray]) -> torch.Tensor:
        """The same, without a copy while the tensor still holds as many rows of an equal key.

        Whatever else is staged, by a warm-up too, ends that: only the owner of the tensor knows what it holds.

        Args:
            key: all that the values depend on.
            rows: as for `stage`.
            values: makes them when they are needed.
        """
        if self._held != (key, rows):
            self.stage(values(), rows)
            self._held = (key, rows)
        return self.staged(rows)

    def staged(self, rows: int) -> torch.Tensor:
        """What was staged last, for as many rows."""
        return self._static[:rows]

    def refill(self) -> None:
        """Copies all of the host's array as it is, after a warm-up that computed nothing."""
        self._copy(len(self._host))

    def _copy(self, rows: int) -> torch.Tensor:
        static = self._static[:rows]
        static.copy_(torch.from_numpy(self._host[:rows]), non_blocking=True)
        return static
