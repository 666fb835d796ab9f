"""vLLM's NaN counter and its fail-fast flag (VLLM_COMPUTE_NANS_IN_LOGITS, VLLM_RAISE_ON_LOGIT_NANS)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm import envs

from vllm_gaudi_ucm.vllm_api.compat import raise_if_nan_logits

if TYPE_CHECKING:
    from vllm_gaudi_ucm.sampling.sampling import SamplingBatch


class NanCounter:
    """Counts the NaNs of a step's logits by request.

    Args:
        batch: whose slots the rows are of.
        on_host: count on the host: counting is no graph that was warmed.
    """

    def __init__(self, batch: SamplingBatch, on_host: bool) -> None:
        self._batch = batch
        self._on_host = on_host
        self._counts: dict[str, int] = {}

    def count(self, logits: torch.Tensor) -> None:
        """logits: [at least slots, vocabulary]; rows beyond the slots are padding."""
        if not envs.VLLM_COMPUTE_NANS_IN_LOGITS:
            return
        rows = logits.cpu() if self._on_host else logits
        counts = dict(zip(self._batch.req_ids, rows.isnan().sum(dim=-1).tolist(), strict=False))
        if envs.VLLM_RAISE_ON_LOGIT_NANS:
            raise_if_nan_logits(counts)
        for request_id, found in counts.items():
            self._counts[request_id] = self._counts.get(request_id, 0) + found

    def take(self) -> dict[str, int] | None:
        """The counts since the last call, None where nobody wants them."""
        counts, self._counts = self._counts, {}
        return counts if envs.VLLM_COMPUTE_NANS_IN_LOGITS else None
