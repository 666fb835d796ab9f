"""One value, or one line of values, per logits row: rendered on the host, read on the device from a static tensor."""

from collections.abc import Callable, Hashable

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray


class StagedRows:
    """Two alternating host arrays, and the tensor on the device that they are copied to, for the largest number of
    rows.

    A step's rows are overwritten two steps later. This is safe: that step has waited for the tokens of the first, even
    with async scheduling. A step stages once, unless it waits for the device in between.

    Args:
        shape: (rows,) or (rows, width).
        dtype: of the values.
        pad: content of rows without a request.
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
        """Stages rows, without a copy if the tensor still holds the same number of rows with an equal key.

        Staging other rows, also by a warm-up, ends this: only the owner of the tensor knows its content.

        Args:
            key: everything that the values depend on.
            rows: as for `stage`.
            values: makes them when they are needed.
        """
        if self._held != (key, rows):
            self.stage(values(), rows)
            self._held = (key, rows)
        return self.staged(rows)

    def staged(self, rows: int) -> torch.Tensor:
        """Returns the rows staged last, for the same number of rows."""
        return self._static[:rows]

    def refill(self) -> None:
        """Copies the whole host array again, after a warm-up that did not execute."""
        self._copy(len(self._host))

    def _copy(self, rows: int) -> torch.Tensor:
        static = self._static[:rows]
        static.copy_(torch.from_numpy(self._host[:rows]), non_blocking=True)
        return static
