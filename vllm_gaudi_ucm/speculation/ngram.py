"""Drafts that continue the last tokens as the request itself went on before (prompt lookup)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_gaudi_ucm.speculation.vllm_contract import propose_ngrams

if TYPE_CHECKING:
    from vllm_gaudi_ucm.runner.request_table import RequestTable
    from vllm_gaudi_ucm.speculation.proposer import SampledStep


class NgramProposer:
    """See DraftProposer.

    Source: https://github.com/apoorvumang/prompt-lookup-decoding, as vLLM computes it.

    Args:
        table: the tokens.
        num_drafts: most drafts per request.
        min_n, max_n: lengths of the n-grams that are looked up.

    Raises:
        ImportError: numba is not installed.
    """

    def __init__(self, table: RequestTable, num_drafts: int, min_n: int, max_n: int) -> None:
        self._table = table
        self._min_n, self._max_n = min_n, max_n
        self._num_drafts = num_drafts
        # numba compiles now, and not in a request's step
        self._search(np.zeros(1, np.int64))

    def propose(self, step: SampledStep) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in step.requests]
        index = step.wanted.nonzero()[0]
        if not len(index):
            return drafts
        rows = np.array([step.requests[i].row for i in index.tolist()], np.int64)
        found, counts = self._search(rows)
        for i, row in zip(index.tolist(), rows.tolist(), strict=True):
            drafts[i] = found[row, : min(counts[row], step.wanted[i])].tolist()
        return drafts

    def _search(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The drafts by row of the table, int32 [table rows, drafts], and how many there are."""
        table = self._table
        drafts = np.zeros((len(table.num_tokens), self._num_drafts), np.int32)
        counts = np.zeros(len(table.num_tokens), np.int32)
        propose_ngrams(
            rows, table.num_tokens, table.token_ids, self._min_n, self._max_n, table.max_model_len, drafts, counts
        )
        return drafts, counts
