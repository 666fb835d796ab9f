"""Logit bias: what a request adds to the logits of some tokens, at one width however many they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_gaudi_ucm.execution.graph_manager import Compile, uncompiled
from vllm_gaudi_ucm.sampling.stages.staged_rows import StagedRows

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.execution.graph_manager import Stage

MOST_BIASES = 1024
"""Tokens of a request, as of vLLM's runner for GPUs; OpenAI's interface has 300."""


class LogitBias:
    """The stage on the device.

    Args:
        max_rows: most logits rows of a step.
        vocab_size: of the logits.
        device: where they are.
        stage: entered around the device work.
        region: makes a region of it.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device, stage: Stage, region: Compile = uncompiled
    ) -> None:
        self.width = min(MOST_BIASES, vocab_size)
        self._stage = stage
        self._add = region(add_biases)
        # pads add 0 to different tokens: a device adds to one token again and again in turn
        self._pads = np.arange(self.width)
        self._tokens = StagedRows((max_rows, self.width), np.int64, 0, device)
        self._biases = StagedRows((max_rows, self.width), np.float32, 0.0, device)

    def apply(self, logits: torch.Tensor, slots: Sequence[LiveRequest] | None) -> torch.Tensor:
        """slots: request i of row i; None: those before, in as many rows."""
        rows = len(logits)
        if slots is not None:
            tokens = np.tile(self._pads, (rows, 1))
            biases = np.zeros((rows, self.width), np.float32)
            for row, request in enumerate(slots):
                wanted = request.sampling_params.logit_bias or {}
                if len(wanted) <= self.width:
                    tokens[row, : len(wanted)] = list(wanted)
                    biases[row, : len(wanted)] = list(wanted.values())
            self._tokens.stage(tokens, rows)
            self._biases.stage(biases, rows)
        with self._stage("logit bias"):
            found: torch.Tensor = self._add(logits, self._tokens.staged(rows), self._biases.staged(rows))
            return found

    def warm(self, logits: torch.Tensor) -> None:
        """Runs the stage once over pads."""
        self.apply(logits, ())

    def refill(self) -> None:
        """See StagedRows."""
        self._tokens.refill()
        self._biases.refill()


def add_biases(logits: torch.Tensor, tokens: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """logits: float32 [rows, vocabulary]. tokens: int64 [rows, width], pads any token. biases: float32, of pads 0."""
    return logits.scatter_add(1, tokens, biases)
