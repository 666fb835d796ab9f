"""Logit bias: values that a request adds to the logits of some tokens, at one width for any number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.execution.graph_manager import Compile, Stage, uncompiled
from vllm_gaudi_ucm.sampling.stages.staged_rows import StagedRows

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.sampling.sampling import SamplingBatch

MOST_BIASES = 1024
"""Tokens of a request, as of vLLM's runner for GPUs; OpenAI's interface has 300."""


class LogitBias:
    """The stage on the device.

    Args:
        max_rows: most logits rows of a step.
        vocab_size: of the logits.
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

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Adds the biases of the request of each row. More than fit a row are left out."""
        rows, key = len(logits), batch.membership
        tokens = self._tokens.keep(key, rows, lambda: self._tokens_of(batch.slots, rows))
        biases = self._biases.keep(key, rows, lambda: self._biases_of(batch.slots))
        return self._run(logits, tokens, biases)

    def warm(self, logits: torch.Tensor) -> None:
        rows = len(logits)
        tokens, biases = self._tokens_of((), rows), self._biases_of(())
        self._run(logits, self._tokens.stage(tokens, rows), self._biases.stage(biases, rows))

    def refill(self) -> None:
        self._tokens.refill()
        self._biases.refill()

    def _run(self, logits: torch.Tensor, tokens: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
        with self._stage("logit bias"):
            found: torch.Tensor = self._add(logits, tokens, biases)
            return found

    def _tokens_of(self, slots: Sequence[LiveRequest], rows: int) -> NDArray[np.int64]:
        """[rows, width]"""
        tokens = np.tile(self._pads, (rows, 1))
        for row, wanted in enumerate(map(self._wanted, slots)):
            tokens[row, : len(wanted)] = list(wanted)
        return tokens

    def _biases_of(self, slots: Sequence[LiveRequest]) -> NDArray[np.float32]:
        """[slots, width]"""
        biases = np.zeros((len(slots), self.width), np.float32)
        for row, wanted in enumerate(map(self._wanted, slots)):
            biases[row, : len(wanted)] = list(wanted.values())
        return biases

    def _wanted(self, request: LiveRequest) -> Mapping[int, float]:
        wanted = request.sampling_params.logit_bias or {}
        return wanted if len(wanted) <= self.width else {}


def add_biases(logits: torch.Tensor, tokens: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """logits: float32 [rows, vocabulary]. tokens: int64 [rows, width], pads any token. biases: float32, of pads 0."""
    return logits.scatter_add(1, tokens, biases)
