"""Presence, frequency and repetition penalties at one width, whatever the lengths of prompts and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.execution.graph_manager import Compile, uncompiled
from vllm_gaudi_ucm.sampling.stages.staged_rows import StagedRows
from vllm_gaudi_ucm.vllm_api.sampling import apply_penalties

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.execution.graph_manager import Stage
    from vllm_gaudi_ucm.vllm_api.sampling import SamplingMetadata


class TokenRows(NamedTuple):
    """tokens: int32 [rows, width], a prompt and behind it its outputs; what follows them is garbage, though a token id.
    prompt_ends, ends: int32 [rows], where prompt and outputs end."""

    tokens: torch.Tensor
    prompt_ends: torch.Tensor
    ends: torch.Tensor


class TokenHistory:
    """Appends what a slot's request has got since the last time, so that a step costs one token per slot.

    Outputs may be cut, but never replaced by others at once: a preempted request comes back with the same ones.

    Args:
        max_rows: most logits rows of a step.
        width: tokens of the longest request.
        device: where they are read.
    """

    def __init__(self, max_rows: int, width: int, device: torch.device) -> None:
        self._tokens = StagedRows((max_rows, width), np.int32, 0, device)
        self._prompt_ends = StagedRows((max_rows,), np.int32, 0, device)
        self._ends = StagedRows((max_rows,), np.int32, 0, device)
        self._owners: list[LiveRequest | None] = [None] * max_rows
        self._known = [0] * max_rows

    def stage(self, slots: Sequence[LiveRequest], rows: int) -> TokenRows:
        """slots: at most `rows` requests, request i of row i."""
        for slot, request in enumerate(slots):
            self._write(slot, request)
        prompt_ends = np.fromiter((len(request.prompt_token_ids) for request in slots), np.int32, len(slots))
        return TokenRows(
            self._tokens.copy(rows),
            self._prompt_ends.stage(prompt_ends, rows),
            self._ends.stage(np.array(self._known[: len(slots)], np.int32), rows),
        )

    def refill(self) -> None:
        """See StagedRows."""
        for rows in (self._tokens, self._prompt_ends, self._ends):
            rows.refill()

    def _write(self, slot: int, request: LiveRequest) -> None:
        prompt, outputs = request.prompt_token_ids, request.output_token_ids
        line, known, end = self._tokens.host[slot], self._known[slot], len(prompt) + len(outputs)
        if self._owners[slot] is not request or not len(prompt) <= known <= end:
            line[: len(prompt)] = prompt
            known = len(prompt)
        line[known:end] = outputs[known - len(prompt) :]
        self._owners[slot], self._known[slot] = request, end


class Penalties:
    """The stage on the device.

    Args:
        max_rows: most logits rows of a step.
        max_model_len: tokens of the longest request.
        device: where the logits are.
        stage: entered around the device work.
        region: makes a region of it.
    """

    def __init__(
        self, max_rows: int, max_model_len: int, device: torch.device, stage: Stage, region: Compile = uncompiled
    ) -> None:
        self._stage = stage
        self._penalise = region(penalised)
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

    def refill(self) -> None:
        """See StagedRows."""
        for rows in (self._history, self._presence, self._frequency, self._repetition):
            rows.refill()

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
            found: torch.Tensor = self._penalise(logits, history, self._positions, *factors)
            return found


def penalised(
    logits: torch.Tensor,
    history: TokenRows,
    positions: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """positions: int32 [1, width]. presence, frequency, repetition: float32 [rows]."""
    prompts, outputs = split_tokens(history, positions, logits.shape[1])
    return apply_penalties(logits, prompts, outputs, presence, frequency, repetition)


def split_tokens(history: TokenRows, positions: torch.Tensor, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt and output token ids as vLLM's penalties count them: int64 [rows, width] each, padded with `pad`."""
    tokens = history.tokens.long()
    in_prompt = positions < history.prompt_ends.unsqueeze(1)
    in_outputs = (positions < history.ends.unsqueeze(1)) & ~in_prompt
    # no `where`: Gaudi's compiler is known to get it wrong for integers
    return pad + (tokens - pad) * in_prompt, pad + (tokens - pad) * in_outputs
