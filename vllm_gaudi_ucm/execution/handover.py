"""What the graphs of a pipeline's stage read and leave for its neighbours: the same tensors in every replay."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_gaudi_ucm.distributed.stage import Stage, StageTensors
    from vllm_gaudi_ucm.execution.decoder import Decoder


class Handover:
    """Of a bucket all rows travel, pads too, so that shapes are a function of the bucket.

    Each number of rows has tensors of its own: on Gaudi copies into a part of a larger one would be recipes of their
    own. Sending and receiving are no part of a graph, so a graph is captured without the neighbours.

    Args:
        decoder: the layers of this stage.
        stage: its neighbours.
        device: of the tensors.
    """

    def __init__(self, decoder: Decoder, stage: Stage, device: torch.device) -> None:
        self._decoder = decoder
        self._stage = stage
        self._device = device
        self._received: dict[int, StageTensors] = {}
        self._left: dict[int, StageTensors] = {}

    def reserve(self, rows: int) -> None:
        """Makes the tensors for so many rows, of a graph that is about to be captured or executed without a step."""
        self._stage.finish_sends()
        if rows in self._left:
            return
        self._left[rows] = {} if self._stage.is_last else self._decoder.between(rows, self._device)
        if not self._stage.is_first:
            self._received[rows] = self._decoder.between(rows, self._device)

    def received(self, rows: int) -> StageTensors | None:
        """What a graph reads; None on the first stage. In a dictionary of its own: a model may change that."""
        found = self._received.get(rows)
        return None if found is None else dict(found)

    def leave(self, rows: int, found: StageTensors) -> None:
        """In a graph: keeps what the stage hands on."""
        for name, kept in self._left[rows].items():
            kept.copy_(found[name])

    def receive(self, rows: int) -> None:
        """Before a replay: waits for the stage before, and for what the last replay has left."""
        self._stage.finish_sends()
        if rows in self._received:
            self._stage.receive(self._received[rows])

    def send(self, rows: int) -> None:
        """After a replay: what it has left."""
        if self._left[rows]:
            self._stage.send(self._left[rows])

    def refill(self) -> None:
        """See BucketedExecution."""
        for tensors in chain(self._received.values(), self._left.values()):
            for tensor in tensors.values():
                tensor.zero_()
