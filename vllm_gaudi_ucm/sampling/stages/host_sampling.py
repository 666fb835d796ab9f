"""What has no shape of its own on the device: the whole step is sampled on the host by vLLM's sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS

from vllm_gaudi_ucm.sampling.stages.grammar_mask import WORD, mask_logits
from vllm_gaudi_ucm.sampling.token_sampler import SampledTokens
from vllm_gaudi_ucm.vllm_api.compat import host_sampler

if TYPE_CHECKING:
    from vllm.config.model import LogprobsMode

    from vllm_gaudi_ucm.sampling.sampling import SamplingBatch


class HostSampling:
    """vLLM's sampler over a copy of the logits, with the batch's metadata, both on the CPU.

    Args:
        logprobs_mode: vLLM's.
        use_fp64_gumbel: draw with float64 noise, which not every device has.
        logprobs_width: scores per row that the device returns.
    """

    def __init__(self, logprobs_mode: LogprobsMode, use_fp64_gumbel: bool, logprobs_width: int) -> None:
        self._sampler = host_sampler(logprobs_mode, use_fp64_gumbel)
        self._use_fp64_gumbel = use_fp64_gumbel
        self._logprobs_width = logprobs_width
        self._shifts = torch.arange(WORD, dtype=torch.int32)

    def reason(self, batch: SamplingBatch) -> str | None:
        """The first feature that the batch needs the host for, None if the device has all."""
        return next(self._features(batch), None)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, bitmask: NDArray[np.int32] | None) -> SampledTokens:
        """logits: float32 [at least slots, vocabulary], on any device. bitmask: int32 [slots, words]."""
        # all rows cross, at the one shape that the device knows
        rows = logits.cpu()[: len(batch.slots)]
        if bitmask is not None:
            rows = mask_logits(rows, torch.from_numpy(bitmask), self._shifts)
        # the sampler compiles its ranks for the platform's device, at this step's number of rows
        with torch.compiler.set_stance("force_eager"):
            sampled = self._sampler(rows, batch.metadata)
        scores = sampled.logprobs_tensors
        return SampledTokens(sampled.sampled_token_ids.tolist(), None if scores is None else scores.tolists())

    def _features(self, batch: SamplingBatch) -> Iterator[str]:
        metadata = batch.metadata
        if any(type(processor) not in BUILTIN_LOGITS_PROCESSORS for processor in metadata.logitsprocs.all):
            yield "custom logits processors"
        if metadata.generators:
            yield "seed"
        if metadata.bad_words_token_ids:
            yield "bad_words"
        if metadata.allowed_token_ids_mask is not None:
            yield "allowed_token_ids"
        if metadata.logprob_token_ids:
            yield "logprob_token_ids"
        if (metadata.max_num_logprobs or 0) > self._logprobs_width:
            yield f"more than {self._logprobs_width} logprobs"
        if self._use_fp64_gumbel and not metadata.all_greedy:
            yield "use_fp64_gumbel"
        yield from _features_of_requests(batch)


def _features_of_requests(batch: SamplingBatch) -> Iterator[str]:
    """Those that vLLM's processors keep to themselves."""
    if any(request.sampling_params.logit_bias for request in batch.slots):
        yield "logit_bias"
    if any(request.sampling_params.min_p for request in batch.slots):
        yield "min_p"
    if any(request.sampling_params.min_tokens > len(request.output_token_ids) for request in batch.slots):
        yield "min_tokens"
