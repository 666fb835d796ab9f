"""The logits of a step that ran in parts, put together for the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vllm_gaudi_ucm.runner.static_execution import Stage, StaticExecution


class DividedLogits:
    """One buffer with a row for each slot, and one more for the padding of the parts.

    Args:
        execution: whose logits they are.
        device: where they are.
        stage: entered around device work.
    """

    def __init__(self, execution: StaticExecution, device: torch.device, stage: Stage) -> None:
        self._stage = stage
        self._execution = execution
        self._whole = torch.zeros(execution.max_logits + 1, execution.logits_width, device=device)
        self._host = torch.zeros(execution.max_logits, dtype=torch.int64)
        self._places: dict[int, torch.Tensor] = {}

    def put(self, logits: torch.Tensor, slots: NDArray[np.int64], count: int) -> torch.Tensor:
        """Copies a part's rows [at least len(slots), vocabulary] to their slots.

        Returns the rows of all slots, `count` of them and padding up to a bucket, as far as they were put.
        """
        self._copy(logits, slots)
        return self._whole[: self._execution.logits_bucket(count)]

    def warm(self, logits: torch.Tensor) -> None:
        """Executes the copy once for so many rows; what it leaves is padding."""
        self._copy(logits, np.zeros(0, np.int64))

    def _copy(self, logits: torch.Tensor, slots: NDArray[np.int64]) -> None:
        rows = len(logits)
        if not rows:
            return
        self._host[: len(slots)] = torch.from_numpy(slots)
        self._host[len(slots) : rows] = len(self._whole) - 1
        places = self._places.get(rows)
        if places is None:
            places = self._places[rows] = torch.zeros(rows, dtype=torch.int64, device=self._whole.device)
        places.copy_(self._host[:rows])
        with self._stage("divided logits"):
            self._whole.index_copy_(0, places, logits)
