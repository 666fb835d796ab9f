"""Sampling in few recipes, all of them functions of the number of logits rows alone, so that all can be warm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.sampling.stages.grammar_mask import WORD, GrammarMask, bitmask_of, mask_logits
from vllm_gaudi_ucm.sampling.stages.penalties import Penalties
from vllm_gaudi_ucm.sampling.stages.token_choice import TokenChoice, TopLogprobs
from vllm_gaudi_ucm.sampling.token_sampler import SampledTokens
from vllm_gaudi_ucm.vllm_api.sampling import BUILTIN_LOGITS_PROCESSORS, host_sampler

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.execution.static_execution import Stage
    from vllm_gaudi_ucm.sampling.sampling import SamplingBatch
    from vllm_gaudi_ucm.sampling.token_sampler import Grammar
    from vllm_gaudi_ucm.vllm_api.sampling import LogprobsMode


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


# Scores per row where `--max-logprobs -1` sets no limit: vLLM's default limit.
_DEFAULT_WIDTH = 20


class StaticSampler:
    """See TokenSampler: results as of vLLM's `Sampler` over the true rows; what the pads hold never reaches them.

    On the device run, each a stage of its own: grammar, penalties, then the choice (greedy; random; random with top-k
    or top-p), then logprobs. A batch in which some request needs anything else is sampled on the host.

    Args:
        vllm_config: the engine's.
        device: where logits are.
        max_num_seqs: most logits rows of a step.
        stage: entered around each stage of device work.
        bypassed: called with the reason of each step that is sampled on the host.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        max_num_seqs: int,
        stage: Stage,
        bypassed: Callable[[str], None],
    ) -> None:
        model = vllm_config.model_config
        self._device = device
        self._max_rows = max_num_seqs
        self._vocab_size = model.get_vocab_size()
        self._bypassed = bypassed
        # raw scores are of the logits before penalties and temperature, processed ones of those after
        self._scores_raw = model.logprobs_mode.startswith("raw_")
        width = min(_DEFAULT_WIDTH if model.max_logprobs == -1 else model.max_logprobs, self._vocab_size)
        self._grammar = GrammarMask(max_num_seqs, self._vocab_size, device, stage)
        self._penalties = Penalties(max_num_seqs, model.max_model_len, device, stage)
        self._choice = TokenChoice(max_num_seqs, device, stage, returns_logits=not self._scores_raw)
        self._logprobs = TopLogprobs(width, model.logprobs_mode.endswith("_logits"), stage)
        self._host = HostSampling(model.logprobs_mode, model.use_fp64_gumbel, width)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, grammar: Grammar | None) -> SampledTokens:
        """See TokenSampler.

        logits: float32 [rows of a bucket, vocabulary] on the device. batch: on the CPU. Ends with the only wait for the
        device.
        """
        if not batch.slots:
            return SampledTokens([], None)
        if not len(batch.slots) <= len(logits) <= self._max_rows:
            raise ValueError(
                f"{len(logits)} logits rows for {len(batch.slots)} requests, expected at least as many "
                f"rows as requests and at most {self._max_rows} (--max-num-seqs): use a bucket of that many logits"
            )
        bitmask = None if grammar is None else bitmask_of(grammar, batch.req_ids)
        reason = self._host.reason(batch)
        if reason is not None:
            self._bypassed(f"sampling on host: {reason}")
            return self._host.sample(logits, batch, bitmask)
        return self._on_device(logits, batch, bitmask)

    def warm(self, rows: int) -> None:
        """Executes every stage once for so many logits rows; call it in inference mode, as for sampling."""
        logits = torch.zeros(rows, self._vocab_size, device=self._device)
        self._grammar.warm(logits)
        self._penalties.warm(logits)
        tokens = self._choice.warm(logits)
        self._logprobs.score(logits, tokens)

    def _on_device(
        self, logits: torch.Tensor, batch: SamplingBatch, bitmask: NDArray[np.int32] | None
    ) -> SampledTokens:
        metadata, count = batch.metadata, len(batch.slots)
        if bitmask is not None:
            logits = self._grammar.apply(logits, bitmask)
        scored = logits
        if not metadata.no_penalties:
            logits = self._penalties.apply(logits, batch.slots, metadata)
        if metadata.all_greedy:
            tokens, drawn_from = self._choice.greedy(logits), None
        else:
            tokens, drawn_from = self._choice.random(logits, metadata)
        if metadata.max_num_logprobs is None:
            return SampledTokens(tokens.cpu().numpy()[:count, np.newaxis].tolist(), None)
        if not self._scores_raw:
            scored = logits if drawn_from is None else drawn_from
        scores = self._logprobs.score(scored, tokens)
        return SampledTokens(*self._logprobs.fetch(scores, count, metadata.max_num_logprobs))
