"""Presence, frequency and repetition penalties at one width, whatever the lengths of prompts and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_gaudi_ucm.execution.graph_manager import Compile, uncompiled
from vllm_gaudi_ucm.sampling.stages.staged_rows import StagedRows
from vllm_gaudi_ucm.sampling.stages.token_counts import CountedRows, TokenCounts, count_tokens, read_lines
from vllm_gaudi_ucm.vllm_api.sampling import apply_penalties

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens
    from vllm_gaudi_ucm.execution.graph_manager import Stage
    from vllm_gaudi_ucm.sampling.sampling import SamplingBatch


def has_penalty(params: SamplingParams) -> bool:
    """True if any of the three does something."""
    return params.frequency_penalty != 0 or params.presence_penalty != 0 or params.repetition_penalty != 1


class Penalties:
    """The stage on the device.

    Args:
        max_rows: most logits rows of a step.
        carried: tokens of the previous step, if the host may not know them.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        stage: Stage,
        region: Compile = uncompiled,
        carried: CarriedTokens | None = None,
    ) -> None:
        self._stage = stage
        self._penalise = region(penalised)
        self._counts = TokenCounts(max_rows, vocab_size, device, stage, region, carried)
        self._presence = StagedRows((max_rows,), np.float32, 0.0, device)
        self._frequency = StagedRows((max_rows,), np.float32, 0.0, device)
        self._repetition = StagedRows((max_rows,), np.float32, 1.0, device)

    def apply(
        self, logits: torch.Tensor, batch: SamplingBatch, slots_before: Mapping[LiveRequest, int]
    ) -> torch.Tensor:
        """Leaves the logits as they are and returns penalised ones. slots_before: see TokenCounts."""
        rows, metadata, key = len(logits), batch.metadata, batch.membership
        self._presence.keep(key, rows, metadata.presence_penalties.numpy)
        self._frequency.keep(key, rows, metadata.frequency_penalties.numpy)
        self._repetition.keep(key, rows, metadata.repetition_penalties.numpy)
        wanted = [request if has_penalty(request.sampling_params) else None for request in batch.slots]
        return self._run(logits, self._counts.stage(wanted, rows, slots_before))

    def warm(self, logits: torch.Tensor) -> None:
        for part in (self._presence, self._frequency, self._repetition):
            part.stage(np.zeros(0, np.float32), len(logits))
        self._counts.warm()
        self._run(logits, self._counts.stage((), len(logits), {}))

    def refill(self) -> None:
        self._counts.refill()
        for rows in (self._presence, self._frequency, self._repetition):
            rows.refill()

    def _run(self, logits: torch.Tensor, counted: CountedRows) -> torch.Tensor:
        factors = (part.staged(len(logits)) for part in (self._presence, self._frequency, self._repetition))
        with self._stage("penalties"):
            found: tuple[torch.Tensor, torch.Tensor] = self._penalise(logits, self._counts.table, counted, *factors)
        self._counts.keep(counted, found[1])
        return found[0]


def penalised(
    logits: torch.Tensor,
    table: torch.Tensor,
    rows: CountedRows,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits with penalties, and the lines to keep. table, rows: see TokenCounts. presence, frequency, repetition:
    float32 [rows]."""
    lines = count_tokens(table, rows)
    counts, in_prompt = read_lines(lines)
    return apply_penalties(logits, in_prompt, counts, presence, frequency, repetition), lines
