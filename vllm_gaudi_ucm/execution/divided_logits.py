"""Puts the logits of a step that runs in parts in the places of the whole step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.execution.graph_manager import Compile, Stage, uncompiled

if TYPE_CHECKING:
    from vllm_gaudi_ucm.execution.bucketed_execution import BucketedExecution


def put_rows(whole: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes rows in place: `whole` has its own storage, and only this function writes it."""
    whole.index_copy_(0, places, rows)


def take_rows(whole: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return whole.index_select(0, places)


class LogitsOfParts(Protocol):
    """Puts logits of the parts of a step in the places of the whole step."""

    def put(self, logits: torch.Tensor, slots: NDArray[np.int64], count: int, position: int = 0) -> torch.Tensor:
        """Copies a part's rows [at least len(slots), vocabulary] to their slots.

        count: slots of the whole step. position: index of the draft; 0 is the last certain token.

        Returns the rows of all slots, as far as they were put.
        """
        ...

    def logits_of(self, slots: NDArray[np.int64], position: int) -> torch.Tensor:
        """Returns the rows of some slots, in this order: [at least len(slots), vocabulary]."""
        ...


class TrueShapeLogits:
    """Uses a new buffer for each step and draft; see LogitsOfParts."""

    def __init__(self) -> None:
        self._whole: dict[int, torch.Tensor] = {}

    def put(self, logits: torch.Tensor, slots: NDArray[np.int64], count: int, position: int = 0) -> torch.Tensor:
        whole = self._whole.get(position)
        if whole is None or len(whole) != count:
            whole = self._whole[position] = logits.new_zeros((count, logits.shape[1]))
        put_rows(whole, torch.from_numpy(slots).to(whole.device), logits[: len(slots)])
        return whole

    def logits_of(self, slots: NDArray[np.int64], position: int) -> torch.Tensor:
        whole = self._whole[position]
        return take_rows(whole, torch.from_numpy(slots).to(whole.device))


class DividedLogits:
    """Puts logits of parts at static shapes; see LogitsOfParts.

    There is one buffer with a row for each slot and one more for the padding of the parts, and another buffer for each
    draft.

    Args:
        execution: computes the logits.
    """

    def __init__(
        self, execution: BucketedExecution, device: torch.device, stage: Stage, region: Compile = uncompiled
    ) -> None:
        self._stage = stage
        self._put_rows, self._take_rows = region(put_rows), region(take_rows)
        self._execution = execution
        self._whole = [torch.zeros(execution.max_logits + 1, execution.logits_width, device=device)]
        self._host = torch.zeros(execution.max_logits, dtype=torch.int64)
        self._places: dict[int, torch.Tensor] = {}

    def reserve(self, num_drafts: int) -> None:
        """Allocates the buffers for `num_drafts` drafts per request. Must be called before warm-up."""
        self._whole += [torch.zeros_like(self._whole[0]) for _ in range(num_drafts)]

    def put(self, logits: torch.Tensor, slots: NDArray[np.int64], count: int, position: int = 0) -> torch.Tensor:
        """Puts rows, and returns them with padding up to a bucket."""
        self._copy(logits, slots, self._whole[position])
        return self._whole[position][: self._execution.logits_bucket(count)]

    def logits_of(self, slots: NDArray[np.int64], position: int) -> torch.Tensor:
        """Returns rows with padding up to a bucket."""
        return self._select(slots, self._execution.logits_bucket(len(slots)), self._whole[position])

    def warm(self, logits: torch.Tensor) -> None:
        """Executes the copies once for this number of rows; they write padding only."""
        self._copy(logits, np.zeros(0, np.int64), self._whole[0])
        if len(self._whole) > 1 and len(logits):
            self._select(np.zeros(0, np.int64), len(logits), self._whole[0])

    def refill(self) -> None:
        for tensor in (*self._whole, *self._places.values()):
            tensor.zero_()

    def _copy(self, logits: torch.Tensor, slots: NDArray[np.int64], whole: torch.Tensor) -> None:
        if not len(logits):
            return
        places = self._stage_places(slots, len(logits))
        with self._stage("divided logits"):
            self._put_rows(whole, places, logits)

    def _select(self, slots: NDArray[np.int64], rows: int, whole: torch.Tensor) -> torch.Tensor:
        places = self._stage_places(slots, rows)
        with self._stage("divided logits, drafts"):
            found: torch.Tensor = self._take_rows(whole, places)
            return found

    def _stage_places(self, slots: NDArray[np.int64], rows: int) -> torch.Tensor:
        """Returns int64 [rows] on the device: the slots followed by the row of the padding."""
        self._host[: len(slots)] = torch.from_numpy(slots)
        self._host[len(slots) : rows] = len(self._whole[0]) - 1
        places = self._places.get(rows)
        if places is None:
            places = self._places[rows] = torch.zeros(rows, dtype=torch.int64, device=self._whole[0].device)
        places.copy_(self._host[:rows])
        return places
