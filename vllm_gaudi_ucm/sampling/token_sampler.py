"""Logits to tokens: the protocol of samplers, and vLLM's own at true shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch

from vllm_gaudi_ucm.vllm_api.sampling import Sampler, apply_grammar_bitmask
from vllm_gaudi_ucm.vllm_api.steps import LogprobsLists

if TYPE_CHECKING:
    from vllm_gaudi_ucm.sampling.sampling import SamplingBatch
    from vllm_gaudi_ucm.vllm_api.steps import GrammarOutput, SchedulerOutput
    from vllm_gaudi_ucm.vllm_api.worker import InputBatch


class SampledTokens(NamedTuple):
    """One list of token ids for each slot of the batch, and logprobs where a request asked for them."""

    tokens: list[list[int]]
    logprobs: LogprobsLists | None


class Grammar(NamedTuple):
    """What vLLM says of the step's structured outputs."""

    scheduler_output: SchedulerOutput
    output: GrammarOutput


class TokenSampler(Protocol):
    """Samples the requests of a batch; what one does is defined by vLLM's `Sampler`."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, grammar: Grammar | None) -> SampledTokens:
        """logits: float32 [at least slots, vocabulary], row i of slot i; changed in place."""


class VllmSampler:
    """vLLM's sampler on the device, at the true number of rows."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, grammar: Grammar | None) -> SampledTokens:
        if not batch.slots:
            return SampledTokens([], None)
        logits = logits[: len(batch.slots)]
        if grammar is not None:
            # all that vLLM's helper reads of its third argument is `req_ids`
            apply_grammar_bitmask(*grammar, cast("InputBatch", batch), logits)
        sampled = self._sampler(logits, batch.metadata)
        logprobs = sampled.logprobs_tensors
        return SampledTokens(sampled.sampled_token_ids.tolist(), None if logprobs is None else logprobs.tolists())
