"""Every token of the requests in the sampler's slots, in static tensors as wide as the longest request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm_gaudi_ucm.sampling.stages.staged_rows import StagedRows

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import LiveRequest


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

    def _write(self, slot: int, request: LiveRequest) -> None:
        prompt, outputs = request.prompt_token_ids, request.output_token_ids
        line, known, end = self._tokens.host[slot], self._known[slot], len(prompt) + len(outputs)
        if self._owners[slot] is not request or not len(prompt) <= known <= end:
            line[: len(prompt)] = prompt
            known = len(prompt)
        line[known:end] = outputs[known - len(prompt) :]
        self._owners[slot], self._known[slot] = request, end
