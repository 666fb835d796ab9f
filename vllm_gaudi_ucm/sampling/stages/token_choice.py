"""Logits to one token per row: the greatest, or one drawn at a temperature, from all tokens or the top ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.sampling.stages.staged_rows import StagedRows
from vllm_gaudi_ucm.vllm_api.sampling import random_sample, top_k_top_p
from vllm_gaudi_ucm.vllm_api.steps import LogprobsLists

if TYPE_CHECKING:
    from vllm_gaudi_ucm.execution.static_execution import Stage
    from vllm_gaudi_ucm.vllm_api.sampling import SamplingMetadata

# vLLM's own bound between greedy and random rows
_GREEDY_BELOW = 1e-5

# vLLM masks the tokens whose cumulative probability is at most 1 - top_p, which for top_p = 1 are those that underflow
# to 0; where it skips the mask, it skips these too.
_NO_TOP_P = 2.0


class _RandomRows(NamedTuple):
    """temperature: float32 [rows], 0 in greedy rows and pads. top_k: int64 [rows]. top_p: float32 [rows]."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor


class TokenChoice:
    """The stages on the device.

    Args:
        max_rows: most logits rows of a step.
        device: where the logits are.
        stage: entered around the device work.
        returns_logits: random stages return the logits that they drew from.
    """

    def __init__(self, max_rows: int, device: torch.device, stage: Stage, returns_logits: bool) -> None:
        self._stage = stage
        self._returns_logits = returns_logits
        self._temperature = StagedRows((max_rows,), np.float32, 0.0, device)
        self._top_k = StagedRows((max_rows,), np.int64, 1, device)
        self._top_p = StagedRows((max_rows,), np.float32, 1.0, device)
        self._staged: _RandomRows
        self._staged_for: tuple[SamplingMetadata, int] | None = None

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 [rows]."""
        with self._stage("greedy"):
            return _greatest(logits)

    def random(self, logits: torch.Tensor, metadata: SamplingMetadata) -> tuple[torch.Tensor, torch.Tensor | None]:
        """int64 [rows], and the logits that they were drawn from, [rows, vocabulary], if they are wanted.

        metadata: the batch's, on the host; greedy rows may be among the random ones.
        """
        only_top = metadata.top_k is not None or metadata.top_p is not None
        return self._draw(logits, self._rows_of(metadata, logits), only_top)

    def warm(self, logits: torch.Tensor) -> torch.Tensor:
        """Runs each stage once over pads; returns tokens."""
        none = np.zeros(0)
        pads = self._stage_values(none, none, none, len(logits))
        self._staged_for = None
        self._draw(logits, pads, only_top=False)
        self._draw(logits, pads, only_top=True)
        return self.greedy(logits)

    def _draw(
        self, logits: torch.Tensor, rows: _RandomRows, only_top: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        with self._stage("random, top-k or top-p" if only_top else "random"):
            greedy = rows.temperature < _GREEDY_BELOW
            scaled = logits / torch.where(greedy, 1.0, rows.temperature).unsqueeze(1)
            if only_top:
                scaled = top_k_top_p(scaled, rows.top_k, rows.top_p)
            drawn = random_sample(scaled.softmax(dim=-1, dtype=torch.float32), {})
            tokens = torch.where(greedy, _greatest(logits), drawn)
            return _within(tokens, logits), scaled if self._returns_logits else None

    def _rows_of(self, metadata: SamplingMetadata, logits: torch.Tensor) -> _RandomRows:
        """Staged once for each metadata, which stays the same as long as the slots do."""
        rows, vocab_size = logits.shape
        if self._staged_for is None or self._staged_for[0] is not metadata or self._staged_for[1] != rows:
            assert metadata.temperature is not None, "a batch with random rows has temperatures"
            count = len(metadata.temperature)
            top_k = np.full(count, vocab_size) if metadata.top_k is None else metadata.top_k.numpy()
            top_p = np.full(count, _NO_TOP_P) if metadata.top_p is None else metadata.top_p.numpy()
            self._staged = self._stage_values(metadata.temperature.numpy(), top_k, top_p, rows)
            self._staged_for = (metadata, rows)
        return self._staged

    def _stage_values(self, temperature: NDArray, top_k: NDArray, top_p: NDArray, rows: int) -> _RandomRows:
        return _RandomRows(
            self._temperature.stage(temperature, rows),
            self._top_k.stage(top_k, rows),
            self._top_p.stage(top_p, rows),
        )


def _greatest(logits: torch.Tensor) -> torch.Tensor:
    return _within(logits.argmax(dim=-1), logits)


def _within(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """What a device answers for a pad row of NaN must still be an index."""
    return tokens.clamp(0, logits.shape[1] - 1)


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
