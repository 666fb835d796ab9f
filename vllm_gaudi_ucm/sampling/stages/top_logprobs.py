"""Scores of the sampled token and of the most likely ones, at one width whatever the requests ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import LogprobsLists

if TYPE_CHECKING:
    from vllm_gaudi_ucm.execution.static_execution import Stage


class TopLogprobs:
    """The stage on the device, and what comes back of it.

    Args:
        width: scores per row beside the sampled token's.
        as_logits: logits instead of logprobs (`--logprobs-mode` raw_logits and processed_logits).
        stage: entered around the device work.
    """

    def __init__(self, width: int, as_logits: bool, stage: Stage) -> None:
        self.width = width
        self._as_logits = as_logits
        self._stage = stage

    def score(self, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores on the device.

        Args:
            logits: float32 [rows, vocabulary].
            tokens: int64 [rows], sampled.

        Returns:
            int32 [rows, width + 2]: the sampled token, the top ones, the sampled token's rank (1 is the top).
            float32 [rows, width + 1]: scores of these tokens.
        """
        with self._stage("logprobs"):
            scores = logits if self._as_logits else logits.log_softmax(dim=-1, dtype=torch.float32)
            top = scores.topk(self.width, dim=-1)
            sampled = tokens.unsqueeze(1)
            score = scores.gather(1, sampled)
            rank = (scores >= score).sum(dim=-1, keepdim=True)
            numbers = torch.cat((sampled, top.indices, rank), dim=1).to(torch.int32)
            return numbers, torch.cat((score, top.values), dim=1)

    def fetch(
        self, scored: tuple[torch.Tensor, torch.Tensor], rows: int, width: int
    ) -> tuple[list[list[int]], LogprobsLists]:
        """The true rows on the host, cut to the width that the requests ask for: tokens and logprobs."""
        numbers, scores = (tensor.cpu().numpy()[:rows] for tensor in scored)
        logprobs = LogprobsLists(
            np.ascontiguousarray(numbers[:, : width + 1]),
            np.ascontiguousarray(scores[:, : width + 1]),
            numbers[:, -1].astype(np.int64),
        )
        return numbers[:, :1].tolist(), logprobs
