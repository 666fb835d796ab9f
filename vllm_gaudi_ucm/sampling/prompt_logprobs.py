"""Logprobs of prompt tokens: collected chunk by chunk, returned with a request's first token."""

from contextlib import nullcontext

import numpy as np
import torch

from vllm_gaudi_ucm.batch.request_table import LiveRequest
from vllm_gaudi_ucm.execution.execution import Execution
from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.vllm_api.sampling import Sampler
from vllm_gaudi_ucm.vllm_api.steps import LogprobsTensors


class PromptLogprobs:
    """Scores the prompt rows of requests that ask for it.

    Args:
        execution: gives the logits of any rows of the step that ran last.
        sampler: vLLM's; its gather is what sampled tokens use too.
        vocab_size: scores per row if a request asks for all (-1).
        as_logits: return logits instead of logprobs (`--logprobs-mode` raw_logits or processed_logits; prompt tokens
            pass no processor, so raw and processed are one).
        host: score on the host, because each number of logprobs would be a new shape on the device. None: score on the
            device.
    """

    def __init__(
        self,
        execution: Execution,
        sampler: Sampler,
        vocab_size: int,
        as_logits: bool,
        host: HostWork | None = None,
    ) -> None:
        self._execution = execution
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._as_logits = as_logits
        self._host = host

    def score(self, request: LiveRequest, rows: range, first: int) -> LogprobsTensors | None:
        """Scores one chunk.

        Args:
            request: the owner of the prompt.
            rows: the request's rows of this step.
            first: position of the first of these rows.

        Returns:
            The scores of the whole prompt once its last token is computed, otherwise None: vLLM takes them together
            with the first sampled token.
        """
        prompt = request.prompt_token_ids
        wanted = request.sampling_params.prompt_logprobs
        assert wanted is not None
        scores = request.prompt_logprobs
        if scores is None:
            width = self._vocab_size if wanted == -1 else wanted
            scores = LogprobsTensors.empty_cpu(len(prompt) - 1, width + 1)
            request.begin_scores(scores)
        # row at position p scores the prompt token at p + 1
        count = min(len(rows), len(prompt) - 1 - first)
        for lo in range(0, count, self._execution.max_logits):
            piece = rows[lo : min(lo + self._execution.max_logits, count)]
            position = first + lo
            self._score_rows(scores, piece, prompt[position + 1 : position + 1 + len(piece)], position)
        if first + len(rows) < len(prompt):
            return None
        return request.take_scores()

    def _score_rows(self, into: LogprobsTensors, rows: range, targets: list[int], first: int) -> None:
        logits = self._execution.logits(np.array(rows, np.int64))
        if self._host is not None:
            self._host.stage("logprobs of prompts")
            logits = self._host.fetch(logits, "logits of prompts")
        logits = logits[: len(rows)]
        scores = logits if self._as_logits else self._sampler.compute_logprobs(logits)
        width = into.logprobs.shape[1] - 1
        token_ids = torch.tensor(targets, dtype=torch.int64, device=logits.device)
        # vLLM compiles a part of this for the platform's device, whose shapes these are not
        with torch.compiler.set_stance("force_eager") if self._host is not None else nullcontext():
            found = self._sampler.gather_logprobs(scores, width, token_ids)
        place = slice(first, first + len(targets))
        into.logprob_token_ids[place].copy_(found.logprob_token_ids)
        into.logprobs[place].copy_(found.logprobs)
        into.selected_token_ranks[place].copy_(found.selected_token_ranks)
