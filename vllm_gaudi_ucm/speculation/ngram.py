"""Drafts that continue the last tokens as the request itself went on before (prompt lookup)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.vllm_api.compat import propose_ngram

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import RequestTable
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
        self._lengths = min_n, max_n
        # numba compiles now, and not in a request's step
        propose_ngram(table.token_ids[0, :1], *self._lengths, table.max_model_len, num_drafts)

    def propose(self, step: SampledStep) -> list[list[int]]:
        return [
            self._search(request.row, most) if most else []
            for request, most in zip(step.requests, step.wanted.tolist(), strict=True)
        ]

    def _search(self, row: int, most: int) -> list[int]:
        table = self._table
        tokens = table.token_ids[row, : table.num_tokens[row]]
        return propose_ngram(tokens, *self._lengths, table.max_model_len, most).tolist()
