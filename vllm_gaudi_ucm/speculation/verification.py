"""Verifies drafts position by position with the sampler of ordinary decodes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.sampling.token_sampler import Grammar, SampledTokens
from vllm_gaudi_ucm.speculation.step_logits import grammar_at, join_logprobs

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.protocol.step_drafts import StepDrafts
    from vllm_gaudi_ucm.sampling.sampling import SamplingBatch
    from vllm_gaudi_ucm.sampling.token_sampler import TokenSampler
    from vllm_gaudi_ucm.speculation.step_logits import StepLogits


class Verification:
    """Samples a step: one token for each request, and one more after each draft that the sampled token equals.

    A position is an ordinary decode of the requests whose drafts were all accepted so far: tokens are written to the
    request table before the next position is sampled, so penalties, processors, grammars and seeds see what they would
    see without drafts. With deterministic drafts this draws from the same distribution as rejection sampling, and gives
    the same tokens as no drafts at all where the sampling is greedy or seeded.

    Args:
        batch: the sampler's slots.
        sampler: of the engine.
        table: takes the tokens.
        observe: called with the logits of every position before they are sampled.
    """

    def __init__(
        self,
        batch: SamplingBatch,
        sampler: TokenSampler,
        table: RequestTable,
        observe: Callable[[torch.Tensor], None],
    ) -> None:
        self._batch = batch
        self._sampler = sampler
        self._table = table
        self._observe = observe

    def sample(self, logits: StepLogits, drafts: StepDrafts, grammar: Grammar | None) -> SampledTokens:
        """Tokens of each request in the slots that the batch has now; afterwards it holds those of the last position.

        logits: of the step. drafts: of the step. grammar: the whole step's.
        """
        sampled = self._sample(logits, 0, grammar)
        if not drafts.tokens:
            return sampled
        index = {request: slot for slot, request in enumerate(self._batch.slots)}
        tokens: list[list[int]] = [[] for _ in index]
        scores = []
        for position in count(1):
            members = [index[request] for request in self._batch.slots]
            scores.append((members, sampled.logprobs))
            going_on = []
            for request, slot, (token,) in zip(self._batch.slots, members, sampled.tokens, strict=True):
                tokens[slot].append(token)
                if token in drafts.tokens.get(request.request_id, ())[position - 1 : position]:
                    going_on.append(request)
            if not going_on:
                break
            self._batch.sync(going_on)
            sampled = self._sample(logits, position, grammar)
        return SampledTokens(tokens, join_logprobs(scores))

    def _sample(self, logits: StepLogits, position: int, grammar: Grammar | None) -> SampledTokens:
        """One token for each slot, written to the table."""
        rows = logits.at(position, self._batch.slots)
        self._observe(rows)
        allowed = None if grammar is None else grammar_at(grammar, position, self._batch.req_ids)
        sampled = self._sampler.sample(rows, self._batch, allowed)
        for request, (token,) in zip(self._batch.slots, sampled.tokens, strict=True):
            self._table.append_token(request, token)
        return sampled
