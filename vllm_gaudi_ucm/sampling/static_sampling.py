"""Sampling in few recipes, all of them functions of the number of logits rows alone, so that all can be warm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.sampling.sampling import SampledTokens
from vllm_gaudi_ucm.sampling.stages.grammar_mask import WORD, GrammarMask, bitmask_of, mask_logits
from vllm_gaudi_ucm.sampling.stages.penalties import Penalties
from vllm_gaudi_ucm.sampling.stages.staged_rows import StagedRows
from vllm_gaudi_ucm.vllm_api.sampling import BUILTIN_LOGITS_PROCESSORS, host_sampler, random_sample, top_k_top_p
from vllm_gaudi_ucm.vllm_api.steps import LogprobsLists

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.execution.graph_manager import Stage
    from vllm_gaudi_ucm.sampling.sampling import Grammar, SamplingBatch
    from vllm_gaudi_ucm.vllm_api.sampling import LogprobsMode, SamplingMetadata

# vLLM's own bound between greedy and random rows
_GREEDY_BELOW = 1e-5

# vLLM masks the tokens whose cumulative probability is at most 1 - top_p, which for top_p = 1 are those that underflow
# to 0; where it skips the mask, it skips these too.
_NO_TOP_P = 2.0


class _RandomRows(NamedTuple):
    """temperature: float32 [rows], 0 in greedy rows and pads. top_k: int64 [rows]. top_p: float32 [rows]."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor


class TokenChoice:
    """The stages on the device.

    Args:
        max_rows: most logits rows of a step.
        device: where the logits are.
        stage: entered around the device work.
        returns_logits: random stages return the logits that they drew from.
    """

    def __init__(self, max_rows: int, device: torch.device, stage: Stage, returns_logits: bool) -> None:
        self._stage = stage
        self._returns_logits = returns_logits
        self._temperature = StagedRows((max_rows,), np.float32, 0.0, device)
        self._top_k = StagedRows((max_rows,), np.int64, 1, device)
        self._top_p = StagedRows((max_rows,), np.float32, 1.0, device)
        self._staged: _RandomRows
        self._staged_for: tuple[SamplingMetadata, int] | None = None

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 [rows]."""
        with self._stage("greedy"):
            return _greatest(logits)

    def random(self, logits: torch.Tensor, metadata: SamplingMetadata) -> tuple[torch.Tensor, torch.Tensor | None]:
        """int64 [rows], and the logits that they were drawn from, [rows, vocabulary], if they are wanted.

        metadata: the batch's, on the host; greedy rows may be among the random ones.
        """
        only_top = metadata.top_k is not None or metadata.top_p is not None
        return self._draw(logits, self._rows_of(metadata, logits), only_top)

    def warm(self, logits: torch.Tensor) -> torch.Tensor:
        """Runs each stage once over pads; returns tokens."""
        none = np.zeros(0)
        pads = self._stage_values(none, none, none, len(logits))
        self._staged_for = None
        self._draw(logits, pads, only_top=False)
        self._draw(logits, pads, only_top=True)
        return self.greedy(logits)

    def _draw(
        self, logits: torch.Tensor, rows: _RandomRows, only_top: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        with self._stage("random, top-k or top-p" if only_top else "random"):
            greedy = rows.temperature < _GREEDY_BELOW
            scaled = logits / torch.where(greedy, 1.0, rows.temperature).unsqueeze(1)
            if only_top:
                scaled = top_k_top_p(scaled, rows.top_k, rows.top_p)
            drawn = random_sample(scaled.softmax(dim=-1, dtype=torch.float32), {})
            tokens = torch.where(greedy, _greatest(logits), drawn)
            return _within(tokens, logits), scaled if self._returns_logits else None

    def _rows_of(self, metadata: SamplingMetadata, logits: torch.Tensor) -> _RandomRows:
        """Staged once for each metadata, which stays the same as long as the slots do."""
        rows, vocab_size = logits.shape
        if self._staged_for is None or self._staged_for[0] is not metadata or self._staged_for[1] != rows:
            assert metadata.temperature is not None, "a batch with random rows has temperatures"
            count = len(metadata.temperature)
            top_k = np.full(count, vocab_size) if metadata.top_k is None else metadata.top_k.numpy()
            top_p = np.full(count, _NO_TOP_P) if metadata.top_p is None else metadata.top_p.numpy()
            self._staged = self._stage_values(metadata.temperature.numpy(), top_k, top_p, rows)
            self._staged_for = (metadata, rows)
        return self._staged

    def _stage_values(self, temperature: NDArray, top_k: NDArray, top_p: NDArray, rows: int) -> _RandomRows:
        return _RandomRows(
            self._temperature.stage(temperature, rows),
            self._top_k.stage(top_k, rows),
            self._top_p.stage(top_p, rows),
        )


def _greatest(logits: torch.Tensor) -> torch.Tensor:
    return _within(logits.argmax(dim=-1), logits)


def _within(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """What a device answers for a pad row of NaN must still be an index."""
    return tokens.clamp(0, logits.shape[1] - 1)


class TopLogprobs:
    """The stage on the device, and what comes back of it.

    Args:
        width: scores per row beside the sampled token's.
        as_logits: logits instead of logprobs (`--logprobs-mode` raw_logits and processed_logits).
        stage: entered around the device work.
    """

    def __init__(self, width: int, as_logits: bool, stage: Stage) -> None:
        self.width = width
        self._as_logits = as_logits
        self._stage = stage

    def score(self, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores on the device.

        Args:
            logits: float32 [rows, vocabulary].
            tokens: int64 [rows], sampled.

        Returns:
            int32 [rows, width + 2]: the sampled token, the top ones, the sampled token's rank (1 is the top).
            float32 [rows, width + 1]: scores of these tokens.
        """
        with self._stage("logprobs"):
            scores = logits if self._as_logits else logits.log_softmax(dim=-1, dtype=torch.float32)
            top = scores.topk(self.width, dim=-1)
            sampled = tokens.unsqueeze(1)
            score = scores.gather(1, sampled)
            rank = (scores >= score).sum(dim=-1, keepdim=True)
            numbers = torch.cat((sampled, top.indices, rank), dim=1).to(torch.int32)
            return numbers, torch.cat((score, top.values), dim=1)

    def fetch(
        self, scored: tuple[torch.Tensor, torch.Tensor], rows: int, width: int
    ) -> tuple[list[list[int]], LogprobsLists]:
        """The true rows on the host, cut to the width that the requests ask for: tokens and logprobs."""
        numbers, scores = (tensor.cpu().numpy()[:rows] for tensor in scored)
        logprobs = LogprobsLists(
            np.ascontiguousarray(numbers[:, : width + 1]),
            np.ascontiguousarray(scores[:, : width + 1]),
            numbers[:, -1].astype(np.int64),
        )
        return numbers[:, :1].tolist(), logprobs


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
        """Executes every stage once for `rows` logits rows; call it in inference mode, as for sampling."""
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
