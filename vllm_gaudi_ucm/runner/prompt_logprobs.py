"""Logprobs of prompt tokens: collected chunk by chunk, returned with a request's first token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from vllm_gaudi_ucm.runner.request_table import LiveRequest


class PromptLogprobs:
    """Scores the prompt rows of requests that ask for it.

    Args:
        compute_logits: float32 [rows, vocabulary] of hidden states [rows, hidden size].
        sampler: vLLM's; its gather is what sampled tokens use too.
        vocab_size: scores per row where a request asks for all (-1).
        as_logits: return logits instead of logprobs (`--logprobs-mode` raw_logits or processed_logits; prompt tokens
            pass no processor, so raw and processed are one).
    """

    def __init__(
        self, compute_logits: Callable[[torch.Tensor], torch.Tensor], sampler: Sampler, vocab_size: int, as_logits: bool
    ) -> None:
        self._compute_logits = compute_logits
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._as_logits = as_logits

    @staticmethod
    def wanted(request: LiveRequest) -> bool:
        return request.sampling_params.prompt_logprobs is not None and not request.prompt_scored

    def score(self, request: LiveRequest, hidden: torch.Tensor, first: int) -> LogprobsTensors | None:
        """Scores one chunk.

        Args:
            request: whose prompt it is.
            hidden: [rows, hidden size], the request's rows of this step.
            first: position of the first of these rows.

        Returns:
            The scores of the whole prompt once its last token is computed, else None: vLLM takes them together with
            the first sampled token.
        """
        prompt = request.prompt_token_ids
        wanted = request.sampling_params.prompt_logprobs
        assert wanted is not None
        if request.prompt_logprobs is None:
            width = self._vocab_size if wanted == -1 else wanted
            request.prompt_logprobs = LogprobsTensors.empty_cpu(len(prompt) - 1, width + 1)
        # row at position p scores the prompt token at p + 1
        count = min(hidden.shape[0], len(prompt) - 1 - first)
        if count > 0:
            self._score_rows(request.prompt_logprobs, hidden[:count], prompt[first + 1 : first + 1 + count], first)
        if first + hidden.shape[0] < len(prompt):
            return None
        scores, request.prompt_logprobs = request.prompt_logprobs, None
        # a preempted request computes its prompt again; its scores are delivered once
        request.prompt_scored = True
        return scores

    def _score_rows(self, into: LogprobsTensors, hidden: torch.Tensor, targets: list[int], first: int) -> None:
        logits = self._compute_logits(hidden)
        scores = logits if self._as_logits else self._sampler.compute_logprobs(logits)
        width = into.logprobs.shape[1] - 1
        token_ids = torch.tensor(targets, dtype=torch.int64, device=hidden.device)
        found = self._sampler.gather_logprobs(scores, width, token_ids)
        rows = slice(first, first + len(targets))
        into.logprob_token_ids[rows].copy_(found.logprob_token_ids)
        into.logprobs[rows].copy_(found.logprobs)
        into.selected_token_ranks[rows].copy_(found.selected_token_ranks)
