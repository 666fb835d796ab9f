"""Scores of the sampled tokens and of the likeliest ones, if a request asks for logprobs."""

from __future__ import annotations

import numpy as np
import torch

from vllm_gaudi_ucm.execution.graph_manager import Compile, Stage, uncompiled
from vllm_gaudi_ucm.vllm_api.steps import LogprobsLists


class TopLogprobs:
    """The stage on the device; `read_scores` reads its results.

    Args:
        width: scores per row in addition to the sampled token's.
        as_logits: logits instead of logprobs (`--logprobs-mode` raw_logits and processed_logits).
    """

    def __init__(self, width: int, as_logits: bool, stage: Stage, region: Compile = uncompiled) -> None:
        self.width = width
        self._as_logits = as_logits
        self._stage = stage
        self._score = region(score_tokens)

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
            scored: tuple[torch.Tensor, torch.Tensor] = self._score(logits, tokens, self.width, self._as_logits)
            return scored


def read_scores(
    numbers: torch.Tensor, scores: torch.Tensor, rows: int, width: int
) -> tuple[list[list[int]], LogprobsLists]:
    """Reads tokens and logprobs of the true rows to the host, cut to the width that requests ask for."""
    found, values = numbers.numpy()[:rows], scores.numpy()[:rows]
    logprobs = LogprobsLists(
        np.ascontiguousarray(found[:, : width + 1]),
        np.ascontiguousarray(values[:, : width + 1]),
        found[:, -1].astype(np.int64),
    )
    return found[:, :1].tolist(), logprobs


def score_tokens(
    logits: torch.Tensor, tokens: torch.Tensor, width: int, as_logits: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See TopLogprobs."""
    scores = logits if as_logits else logits.log_softmax(dim=-1, dtype=torch.float32)
    top = scores.topk(width, dim=-1)
    sampled = tokens.unsqueeze(1)
    score = scores.gather(1, sampled)
    rank = (scores >= score).sum(dim=-1, keepdim=True)
    numbers = torch.cat((sampled, top.indices, rank), dim=1).to(torch.int32)
    return numbers, torch.cat((score, top.values), dim=1)
