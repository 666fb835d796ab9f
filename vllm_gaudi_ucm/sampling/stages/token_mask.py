"""Sets the logits of tokens that a request's grammar or parameters do not allow to -inf."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.sampling.stages.staged_rows import StagedRows

if TYPE_CHECKING:
    from vllm_gaudi_ucm.execution.graph_manager import Stage
    from vllm_gaudi_ucm.sampling.sampling import Grammar

WORD = 32
"""Tokens per int32 of a bitmask."""

ALL_ALLOWED = -1
"""The word whose bits are all set."""

Mask = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def num_words(vocab_size: int) -> int:
    """Returns the words of a row's bitmask."""
    return -(-vocab_size // WORD)


class TokenMask:
    """The stage on the device.

    Args:
        max_rows: most logits rows of a step.
        vocab_size: tokens that a bitmask covers.
        mask: `mask_logits`, or a region of it; several masks share one.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device, stage: Stage, mask: Mask | None = None
    ) -> None:
        self._stage = stage
        self._mask = mask or mask_logits
        self._words = StagedRows((max_rows, num_words(vocab_size)), np.int32, ALL_ALLOWED, device)
        self._shifts = torch.arange(WORD, dtype=torch.int32, device=device)

    def apply(self, logits: torch.Tensor, bitmask: NDArray[np.int32]) -> torch.Tensor:
        """bitmask: [at most rows, words]; rows behind it are not masked."""
        return self._run(logits, self._words.stage(bitmask, len(logits)))

    def apply_kept(self, logits: torch.Tensor, key: Hashable, bitmask: Callable[[], NDArray[np.int32]]) -> torch.Tensor:
        """Applies a bitmask that depends only on the key. See `StagedRows.keep`."""
        return self._run(logits, self._words.keep(key, len(logits), bitmask))

    def refill(self) -> None:
        self._words.refill()

    def warm(self, logits: torch.Tensor) -> None:
        self.apply(logits, np.zeros((0, 1), np.int32))

    def _run(self, logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        with self._stage("token mask"):
            return self._mask(logits, words, self._shifts)


def mask_logits(logits: torch.Tensor, words: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Sets logits to -inf where a token's bit is not set.

    Args:
        logits: float32 [rows, vocabulary].
        words: int32 [rows, words]; bit b of word w stands for token 32 w + b. Tokens beyond the words do not change, as
            in xgrammar's kernel.
        shifts: int32, 0 to 31.
    """
    rows, width = logits.shape
    bits = ((words.unsqueeze(2) >> shifts) & 1).reshape(rows, -1)
    if bits.shape[1] < width:
        bits = torch.nn.functional.pad(bits, (0, width - bits.shape[1]), value=1)
    return logits.masked_fill(bits[:, :width] == 0, -float("inf"))


def bitmask_of(grammar: Grammar, req_ids: Sequence[str]) -> NDArray[np.int32] | None:
    """Returns the bitmask in the order of the logits rows: int32 [requests, words]; None if no row has a grammar.

    The scheduler's bitmask has one row per request of its own list, which may be in another order and name requests
    that yield no token in this step. Source: vLLM's `apply_grammar_bitmask`; the row of a request with drafts was
    chosen before (speculation/grammar_rows.py).
    """
    output = grammar.output
    line_of = {req_id: line for line, req_id in enumerate(output.structured_output_request_ids)}
    pairs = [(row, line_of[req_id]) for row, req_id in enumerate(req_ids) if req_id in line_of]
    if not pairs:
        return None
    rows, lines = np.array(pairs).T
    bitmask = np.full((len(req_ids), output.grammar_bitmask.shape[1]), ALL_ALLOWED, np.int32)
    bitmask[rows] = output.grammar_bitmask[lines]
    return bitmask
