"""Presence, frequency and repetition penalties at one width, whatever the lengths of prompts and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.sampling.stages.staged_rows import StagedRows
from vllm_gaudi_ucm.sampling.stages.token_history import TokenHistory, TokenRows
from vllm_gaudi_ucm.vllm_api.compat import apply_penalties

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata

    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.execution.static_execution import Stage


class Penalties:
    """The stage on the device.

    Args:
        max_rows: most logits rows of a step.
        max_model_len: tokens of the longest request.
        device: where the logits are.
        stage: entered around the device work.
    """

    def __init__(self, max_rows: int, max_model_len: int, device: torch.device, stage: Stage) -> None:
        self._stage = stage
        self._history = TokenHistory(max_rows, max_model_len, device)
        self._positions = torch.arange(max_model_len, dtype=torch.int32, device=device).unsqueeze(0)
        self._presence = StagedRows((max_rows,), np.float32, 0.0, device)
        self._frequency = StagedRows((max_rows,), np.float32, 0.0, device)
        self._repetition = StagedRows((max_rows,), np.float32, 1.0, device)

    def apply(self, logits: torch.Tensor, slots: Sequence[LiveRequest], metadata: SamplingMetadata) -> torch.Tensor:
        """slots, metadata: the batch's, on the host. Leaves the logits as they are and returns penalised ones."""
        return self._run(
            logits,
            slots,
            metadata.presence_penalties.numpy(),
            metadata.frequency_penalties.numpy(),
            metadata.repetition_penalties.numpy(),
        )

    def warm(self, logits: torch.Tensor) -> None:
        """Runs the stage once over pads."""
        none = np.zeros(0, np.float32)
        self._run(logits, (), none, none, none)

    def _run(
        self,
        logits: torch.Tensor,
        slots: Sequence[LiveRequest],
        presence: NDArray,
        frequency: NDArray,
        repetition: NDArray,
    ) -> torch.Tensor:
        rows = len(logits)
        history = self._history.stage(slots, rows)
        factors = (
            self._presence.stage(presence, rows),
            self._frequency.stage(frequency, rows),
            self._repetition.stage(repetition, rows),
        )
        with self._stage("penalties"):
            prompts, outputs = split_tokens(history, self._positions, logits.shape[1])
            return apply_penalties(logits, prompts, outputs, *factors)


def split_tokens(history: TokenRows, positions: torch.Tensor, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt and output token ids as vLLM's penalties count them: int64 [rows, width] each, padded with `pad`."""
    tokens = history.tokens.long()
    in_prompt = positions < history.prompt_ends.unsqueeze(1)
    in_outputs = (positions < history.ends.unsqueeze(1)) & ~in_prompt
    return torch.where(in_prompt, tokens, pad), torch.where(in_outputs, tokens, pad)
