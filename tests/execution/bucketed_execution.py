"""Helpers of `test_bucketed_execution.py` that other tests use, too."""

from __future__ import annotations

import numpy as np
import torch

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionMetadata
from vllm_gaudi_ucm.attention.groups import GroupedMetadata
from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
from vllm_gaudi_ucm.batch.row_input import BUILT_IN_INPUTS
from vllm_gaudi_ucm.execution.decoder import DecoderStep

HIDDEN, VOCABULARY = 3, 5


class Model:
    """Hidden states are (token, position, slot), logits their sum plus the column's number."""

    stage = None
    lockstep = None
    window = None
    latent = None
    chosen = 0
    inputs = BUILT_IN_INPUTS
    is_last = has_logits = True

    def __init__(self) -> None:
        self.metadata: UnifiedAttentionMetadata | None = None

    def run_layers(self, step: DecoderStep) -> dict[str, torch.Tensor]:
        assert not isinstance(step.metadata, GroupedMetadata)
        self.metadata = step.metadata
        tokens, positions = step.rows["token_ids"], step.rows["positions"]
        slots = positions if step.metadata is None else step.metadata.slots
        return {"hidden_states": torch.stack([tokens, positions, slots], 1).double()}

    def unattended(self, rows: int, device: torch.device) -> DecoderStep:
        pads = torch.zeros(rows, dtype=torch.int64, device=device)
        return DecoderStep({"token_ids": pads, "positions": pads}, None)

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
