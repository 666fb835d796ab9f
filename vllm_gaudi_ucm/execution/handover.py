"""The tensors that graphs of a pipeline stage receive from and leave for its neighbours, the same in every replay."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_gaudi_ucm.distributed.stage import Stage, StageTensors
    from vllm_gaudi_ucm.execution.decoder import Decoder


class Handover:
    """Tensors between stages. All rows of a bucket are sent, including pads, so that shapes are a function of the
    bucket.

    Each number of rows has separate tensors: on Gaudi, copies into a part of a larger tensor would be additional
    recipes. Sending and receiving are not part of a graph, so a graph is captured without the neighbours.

    Args:
        stage: its neighbours.
    """

    def __init__(self, decoder: Decoder, stage: Stage, device: torch.device) -> None:
        self._decoder = decoder
        self._stage = stage
        self._device = device
        self._received: dict[int, StageTensors] = {}
        self._left: dict[int, StageTensors] = {}

    def reserve(self, rows: int) -> None:
        """Makes the tensors for this many rows, before a graph is captured or executed without a step."""
        self._stage.finish_sends()
        if rows in self._left:
            return
        self._left[rows] = {} if self._stage.is_last else self._decoder.between(rows, self._device)
        if not self._stage.is_first:
            self._received[rows] = self._decoder.between(rows, self._device)

    def received(self, rows: int) -> StageTensors | None:
        """Returns the tensors that a graph reads, in a dictionary that a model may change; None on the first stage."""
        found = self._received.get(rows)
        return None if found is None else dict(found)

    def leave(self, rows: int, found: StageTensors) -> None:
        """Copies the tensors that the stage passes on; called within a graph."""
        for name, kept in self._left[rows].items():
            kept.copy_(found[name])

    def receive(self, rows: int) -> None:
        """Waits for the previous stage, and for the results of the last replay to be sent; called before a replay."""
        self._stage.finish_sends()
        if rows in self._received:
            self._stage.receive(self._received[rows])

    def send(self, rows: int) -> None:
        """Sends the results of a replay; called after it."""
        if self._left[rows]:
            self._stage.send(self._left[rows])

    def refill(self) -> None:
        for tensors in chain(self._received.values(), self._left.values()):
            for tensor in tensors.values():
                tensor.zero_()
