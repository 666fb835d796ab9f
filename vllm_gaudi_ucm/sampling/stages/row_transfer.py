"""Copies single rows of logits from and to the device, in two recipes, for requests with features of the host alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_gaudi_ucm.execution.graph_manager import Compile, Stage, uncompiled
from vllm_gaudi_ucm.sampling.stages.staged_rows import StagedRows

if TYPE_CHECKING:
    from vllm_gaudi_ucm.observability.host_work import HostWork


class RowTransfer:
    """Copies of rows. Call it only where the host may wait for the device.

    Args:
        vocab_size: of the logits.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, stage: Stage, host: HostWork, region: Compile = uncompiled
    ) -> None:
        self._stage = stage
        self._host = host
        self._take, self._put = region(take_row), region(put_row)
        self._place = StagedRows((1,), np.int64, 0, device)
        self._row = StagedRows((1, vocab_size), np.float32, 0.0, device)

    def fetch_row(self, logits: torch.Tensor, row: int, reason: str) -> torch.Tensor:
        """float32 [vocabulary] on the host, of logits [rows, vocabulary]."""
        place = self._place.stage(np.array([row]), 1)
        with self._stage("row to the host"):
            taken = self._take(logits, place)
        return self._host.fetch(taken, reason)[0]

    def put(self, logits: torch.Tensor, row: int, values: torch.Tensor) -> torch.Tensor:
        """New logits with these values, float32 [vocabulary] on the host, in a row that was taken."""
        place, line = self._place.stage(np.array([row]), 1), self._row.stage(values.numpy()[np.newaxis], 1)
        with self._stage("row from the host"):
            found: torch.Tensor = self._put(logits, place, line)
            return found

    def warm(self, logits: torch.Tensor) -> None:
        place, line = self._place.stage(np.zeros(0), 1), self._row.stage(np.zeros((0, 1)), 1)
        with self._stage("row to the host"):
            self._take(logits, place)
        with self._stage("row from the host"):
            self._put(logits, place, line)

    def refill(self) -> None:
        self._place.refill()
        self._row.refill()


def take_row(logits: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """[1, vocabulary]. place: int64 [1]."""
    return logits.index_select(0, place)


def put_row(logits: torch.Tensor, place: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """A copy with another row. place: int64 [1]. row: [1, vocabulary]."""
    return logits.index_copy(0, place, row)
