"""Proposers of drafts: one protocol for all methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.vllm_api.sampling import propose_ngram

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.batch_plan import BatchInput
    from vllm_gaudi_ucm.batch.request_table import LiveRequest, RequestTable


class SampledStep(NamedTuple):
    """A step whose tokens are in the request table.

    requests: the requests of the step. batch: their computed tokens, with verified drafts included in `num_scheduled`.
    yields: bool [requests], whether it got tokens. wanted: int64 [requests], how many drafts it may get; 0 without
    tokens.
    """

    requests: Sequence[LiveRequest]
    batch: BatchInput
    yields: NDArray[np.bool_]
    wanted: NDArray[np.int64]


class DraftProposer(Protocol):
    """Proposes drafts for the next step. They may depend on the tokens of a request and on noise of their own, but not
    on the noise that its next tokens are drawn with: only then verification (verification.py) draws from the right
    distribution.
    """

    def propose(self, step: SampledStep) -> list[list[int]]:
        """Proposes at most `wanted` drafts for each request of the step, in its order. Called after every step, even
        for requests without tokens (prompt chunks), which a draft model computes too.
        """


def wanted_drafts(
    requests: Sequence[LiveRequest], yields: NDArray[np.bool_], table: RequestTable, num_drafts: int
) -> NDArray[np.int64]:
    """Returns int64 [requests]: `num_drafts`, or as many as the request can still use in addition to the bonus token.

    yields: the requests that got a token.
    """
    wanted = np.zeros(len(requests), np.int64)
    for index in yields.nonzero()[0].tolist():
        request = requests[index]
        room = table.max_model_len - int(table.num_tokens[request.row]) - 1
        if request.sampling_params.max_tokens is not None:
            room = min(room, request.sampling_params.max_tokens - len(request.output_token_ids) - 1)
        wanted[index] = max(0, min(num_drafts, room))
    return wanted


class NgramProposer:
    """See DraftProposer.

    Source: https://github.com/apoorvumang/prompt-lookup-decoding, as vLLM computes it.

    Args:
        min_n, max_n: lengths of the n-grams that are looked up.
        host: counts the steps in which n-grams are.

    Raises:
        ImportError: numba is not installed.
    """

    def __init__(
        self, table: RequestTable, num_drafts: int, min_n: int, max_n: int, host: HostWork | None = None
    ) -> None:
        self._table = table
        self._host = host or HostWork()
        self._lengths = min_n, max_n
        # numba compiles now, and not in a request's step
        propose_ngram(table.token_ids[0, :1], *self._lengths, table.max_model_len, num_drafts)

    def propose(self, step: SampledStep) -> list[list[int]]:
        if step.wanted.any():
            self._host.stage("drafts by n-grams")
        return [
            self._search(request.row, most) if most else []
            for request, most in zip(step.requests, step.wanted.tolist(), strict=True)
        ]

    def _search(self, row: int, most: int) -> list[int]:
        table = self._table
        tokens = table.token_ids[row, : table.num_tokens[row]]
        return propose_ngram(tokens, *self._lengths, table.max_model_len, most).tolist()
