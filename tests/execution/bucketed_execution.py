"""Helpers of `test_bucketed_execution.py` that other tests use, too."""

from __future__ import annotations

import numpy as np
import torch

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionMetadata
from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan

HIDDEN, VOCABULARY = 3, 5


class Model:
    """Hidden states are (token, position, slot), logits their sum plus the column's number."""

    stage = None
    lockstep = None
    window = None
    latent = None
    has_logits = True

    def __init__(self) -> None:
        self.metadata: UnifiedAttentionMetadata | None = None

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: UnifiedAttentionMetadata | None,
        received: None = None,
    ) -> dict[str, torch.Tensor]:
        self.metadata = metadata
        slots = positions if metadata is None else metadata.slots
        return {"hidden_states": torch.stack([token_ids, positions, slots], 1).double()}

    def received(self, rows: int, device: torch.device) -> None:
        """All layers are here."""

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        hidden = hidden if rows is None else hidden[rows]
        return hidden.sum(1, keepdim=True).float() + torch.arange(VOCABULARY)

    def write_logits(self, out: torch.Tensor, hidden: torch.Tensor, rows: torch.Tensor) -> None:
        out.copy_(self.logits(hidden, rows))


def expected(plan: UnifiedPlan) -> list[list[float]]:
    """Of the rows that yield logits, by the model's definition."""
    tokens = np.arange(1000, 1000 + plan.num_rows)
    sums = (tokens + plan.positions + plan.slots)[plan.logits_rows]
    return [[float(total + column) for column in range(VOCABULARY)] for total in sums]
