"""One value, or one line of values, per logits row: rendered on the host, read on the device from a static tensor."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray


class StagedRows:
    """A host array and the tensor on the device that it is copied to, both for the largest number of rows.

    The next step overwrites the array, so a step must have waited for the device before it ends; reading its tokens
    does that.

    Args:
        shape: (rows,) or (rows, width).
        dtype: of the values.
        pad: what rows hold that no request has.
        device: where they are read.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, pad: float, device: torch.device) -> None:
        self.host = np.full(shape, pad, dtype)
        self._pad = pad
        self._static = torch.from_numpy(self.host).to(device, copy=True)

    def stage(self, values: NDArray, rows: int) -> torch.Tensor:
        """Copies values and, behind them, pads; returns the first `rows` rows on the device."""
        self.host[: len(values)] = values
        self.host[len(values) : rows] = self._pad
        return self.copy(rows)

    def refill(self) -> None:
        """Copies all of `host` as it is, after a warm-up that computed nothing."""
        self.copy(len(self.host))

    def copy(self, rows: int) -> torch.Tensor:
        """Copies the first rows of `host` as they are, whole; returns them on the device."""
        static = self._static[:rows]
        static.copy_(torch.from_numpy(self.host[:rows]), non_blocking=True)
        return static
