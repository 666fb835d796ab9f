"""Sampling on the host, by vLLM's own sampler, for features that no device has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.sampling.slot_noise import SlotNoise
from vllm_gaudi_ucm.sampling.stages.token_mask import WORD, mask_logits
from vllm_gaudi_ucm.sampling.tokens_in_flight import SampledTokens
from vllm_gaudi_ucm.vllm_api.sampling import drawing_sampler

if TYPE_CHECKING:
    from vllm_gaudi_ucm.sampling.sampling import SamplingBatch
    from vllm_gaudi_ucm.vllm_api.sampling import LogprobsMode


class HostSampling:
    """vLLM's sampler over a copy of the logits, with the batch's metadata, both on the CPU.

    Args:
        logprobs_mode: vLLM's.
        use_fp64_gumbel: draw with float64 noise, which not every device has.
    """

    def __init__(self, logprobs_mode: LogprobsMode, use_fp64_gumbel: bool, host: HostWork) -> None:
        self._host = host
        self._noise = SlotNoise(use_fp64_gumbel)
        self._sampler = drawing_sampler(logprobs_mode, self._noise.like)
        self._shifts = torch.arange(WORD, dtype=torch.int32)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, bitmask: NDArray[np.int32] | None) -> SampledTokens:
        """logits: float32 [at least slots, vocabulary], on any device. bitmask: int32 [slots, words]."""
        # all rows cross, at the one shape that the device knows
        rows = self._host.fetch(logits, "logits to sample on host")[: len(batch.slots)]
        if bitmask is not None:
            rows = mask_logits(rows, torch.from_numpy(bitmask), self._shifts)
        # the sampler compiles its ranks for the platform's device, at this step's number of rows
        with torch.compiler.set_stance("force_eager"), self._noise.of(batch.slots):
            sampled = self._sampler(rows, batch.vllm_metadata)
        scores = sampled.logprobs_tensors
        return SampledTokens(sampled.sampled_token_ids.tolist(), None if scores is None else scores.tolists())
