"""Sampling in few recipes, all of them functions of the number of logits rows alone, so that all can be warm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.execution.graph_manager import Compile, uncompiled
from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.sampling.host_sampling import HostSampling
from vllm_gaudi_ucm.sampling.sampling import SampledTokens
from vllm_gaudi_ucm.sampling.stages.grammar_mask import GrammarMask, bitmask_of
from vllm_gaudi_ucm.sampling.stages.penalties import Penalties
from vllm_gaudi_ucm.sampling.stages.staged_rows import StagedRows
from vllm_gaudi_ucm.sampling.stages.top_logprobs import TopLogprobs
from vllm_gaudi_ucm.vllm_api.sampling import BUILTIN_LOGITS_PROCESSORS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.execution.graph_manager import Stage
    from vllm_gaudi_ucm.sampling.sampling import Grammar, SamplingBatch
    from vllm_gaudi_ucm.vllm_api.sampling import SamplingMetadata

# vLLM's own bound between greedy and random rows
_GREEDY_BELOW = 1e-5

# vLLM masks the tokens whose cumulative probability is at most 1 - top_p, which for top_p = 1 are those that underflow
# to 0; where it skips the mask, it skips these too.
_NO_TOP_P = 2.0

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
        host: counts what is waited for, and the stages that run on the host.
        region: makes regions of the stages.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        max_num_seqs: int,
        stage: Stage,
        bypassed: Callable[[str], None],
        host: HostWork,
        region: Compile = uncompiled,
    ) -> None:
        model = vllm_config.model_config
        self._device = device
        self._max_rows = max_num_seqs
        self._vocab_size = model.get_vocab_size()
        self._bypassed = bypassed
        # raw scores are of the logits before penalties and temperature, processed ones of those after
        self._scores_raw = model.logprobs_mode.startswith("raw_")
        width = min(_DEFAULT_WIDTH if model.max_logprobs == -1 else model.max_logprobs, self._vocab_size)
        self._host_work = host
        self._grammar = GrammarMask(max_num_seqs, self._vocab_size, device, stage, region)
        self._penalties = Penalties(max_num_seqs, model.max_model_len, device, stage, region)
        returns_logits = not self._scores_raw
        self._choice = TokenChoice(max_num_seqs, self._vocab_size, device, stage, returns_logits, region)
        self._logprobs = TopLogprobs(width, model.logprobs_mode.endswith("_logits"), stage, host, region)
        self._use_fp64_gumbel = model.use_fp64_gumbel
        self._host = HostSampling(model.logprobs_mode, model.use_fp64_gumbel, host)

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
        if bitmask is not None:
            self._host_work.stage("bitmask of a grammar")
        reason = next(self._host_features(batch), None)
        if reason is not None:
            self._bypassed(f"sampling on host: {reason}")
            self._host_work.stage(f"sampling: {reason}")
            return self._host.sample(logits, batch, bitmask)
        return self._on_device(logits, batch, bitmask)

    def warm(self, rows: int) -> None:
        """Executes every stage once for `rows` logits rows; call it in inference mode, as for sampling."""
        logits = torch.zeros(rows, self._vocab_size, device=self._device)
        self._grammar.warm(logits)
        self._penalties.warm(logits)
        tokens = self._choice.warm(logits)
        self._logprobs.score(logits, tokens)

    def refill(self) -> None:
        """Every tensor that outlives a step anew, after a warm-up that computed nothing."""
        for part in (self._grammar, self._penalties, self._choice):
            part.refill()

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
            tokens, drawn_from = self._choice.random(logits, batch)
        if metadata.max_num_logprobs is None:
            found = self._host_work.fetch(tokens, "tokens").numpy()
            return SampledTokens(found[:count, np.newaxis].tolist(), None)
        if not self._scores_raw:
            scored = logits if drawn_from is None else drawn_from
        scores = self._logprobs.score(scored, tokens)
        return SampledTokens(*self._logprobs.fetch(scores, count, metadata.max_num_logprobs))

    def _host_features(self, batch: SamplingBatch) -> Iterator[str]:
        """What a request of the batch needs and the device has not."""
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
        if (metadata.max_num_logprobs or 0) > self._logprobs.width:
            yield f"more than {self._logprobs.width} logprobs"
        if self._use_fp64_gumbel and not metadata.all_greedy:
            yield "use_fp64_gumbel"
        yield from _features_of_requests(batch)


def _features_of_requests(batch: SamplingBatch) -> Iterator[str]:
    """Those that vLLM's processors keep to themselves."""
    if any(request.sampling_params.logit_bias for request in batch.slots):
        yield "logit_bias"
    if any(request.sampling_params.min_tokens > len(request.output_token_ids) for request in batch.slots):
        yield "min_tokens"


class RandomRows(NamedTuple):
    """temperature: float32 [rows], 0 in greedy rows and pads. top_k: int64 [rows]. top_p, min_p: float32 [rows]."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


class TokenChoice:
    """The stages on the device.

    Noise is drawn outside of the regions, which get it as a tensor: nobody knows whether a compiled `exponential_`
    draws anew in each call.

    Args:
        max_rows: most logits rows of a step.
        vocab_size: the top-k of rows that ask for none.
        device: where the logits are.
        stage: entered around the device work.
        returns_logits: random stages return the logits that they drew from.
        region: makes regions of the stages.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        stage: Stage,
        returns_logits: bool,
        region: Compile = uncompiled,
    ) -> None:
        self._stage = stage
        self._vocab_size = vocab_size
        self._returns_logits = returns_logits
        self._greatest, self._draw, self._draw_top = region(likeliest_tokens), region(draw), region(draw_from_top)
        self._temperature = StagedRows((max_rows,), np.float32, 0.0, device)
        self._top_k = StagedRows((max_rows,), np.int64, 1, device)
        self._top_p = StagedRows((max_rows,), np.float32, 1.0, device)
        self._min_p = StagedRows((max_rows,), np.float32, 0.0, device)
        self._staged: RandomRows
        self._only_top = False
        self._staged_for: tuple[SamplingMetadata, int] | None = None

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 [rows]."""
        with self._stage("greedy"):
            tokens: torch.Tensor = self._greatest(logits)
            return tokens

    def random(self, logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """int64 [rows], and the logits that they were drawn from, [rows, vocabulary], if they are wanted.

        batch: on the host; greedy rows may be among the random ones.
        """
        # staged once for each metadata, which stays the same as long as the slots do
        rows, metadata = len(logits), batch.metadata
        if self._staged_for is None or self._staged_for[0] is not metadata or self._staged_for[1] != rows:
            self._stage_batch(batch, rows)
            self._staged_for = (metadata, rows)
        return self._run(logits, self._staged, self._only_top)

    def warm(self, logits: torch.Tensor) -> torch.Tensor:
        """Runs each stage once over pads; returns tokens."""
        none = np.zeros(0)
        pads = self._stage_values(none, none, none, none, len(logits))
        self._staged_for = None
        self._run(logits, pads, only_top=False)
        self._run(logits, pads, only_top=True)
        return self.greedy(logits)

    def refill(self) -> None:
        """See StagedRows."""
        for rows in (self._temperature, self._top_k, self._top_p, self._min_p):
            rows.refill()

    def _run(self, logits: torch.Tensor, rows: RandomRows, only_top: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        with self._stage("random, top-k, top-p or min-p" if only_top else "random"):
            noise = torch.empty_like(logits).exponential_()
            run = self._draw_top if only_top else self._draw
            drawn: tuple[torch.Tensor, torch.Tensor | None] = run(logits, rows, noise, self._returns_logits)
            return drawn

    def _stage_batch(self, batch: SamplingBatch, rows: int) -> None:
        metadata, count = batch.metadata, len(batch.slots)
        assert metadata.temperature is not None, "a batch with random rows has temperatures"
        top_k = np.full(count, self._vocab_size) if metadata.top_k is None else metadata.top_k.numpy()
        top_p = np.full(count, _NO_TOP_P) if metadata.top_p is None else metadata.top_p.numpy()
        min_p = np.array([request.sampling_params.min_p for request in batch.slots])
        self._staged = self._stage_values(metadata.temperature.numpy(), top_k, top_p, min_p, rows)
        self._only_top = metadata.top_k is not None or metadata.top_p is not None or bool(min_p.any())

    def _stage_values(
        self, temperature: NDArray, top_k: NDArray, top_p: NDArray, min_p: NDArray, rows: int
    ) -> RandomRows:
        return RandomRows(
            self._temperature.stage(temperature, rows),
            self._top_k.stage(top_k, rows),
            self._top_p.stage(top_p, rows),
            self._min_p.stage(min_p, rows),
        )


def likeliest_tokens(logits: torch.Tensor) -> torch.Tensor:
    """int64 [rows] of logits [rows, vocabulary]."""
    return _within(logits.argmax(dim=-1), logits)


def draw(
    logits: torch.Tensor, rows: RandomRows, noise: torch.Tensor, returns_logits: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens, and the logits that they were drawn from.

    Args:
        logits: float32 [rows, vocabulary].
        rows: of these.
        noise: like the logits, of an exponential distribution.
        returns_logits: whether the logits are wanted.
    """
    return _drawn(_tempered(logits, rows), logits, rows, noise, returns_logits)


def draw_from_top(
    logits: torch.Tensor, rows: RandomRows, noise: torch.Tensor, returns_logits: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same from those tokens alone that min-p, top-k and top-p leave."""
    scaled = _tempered(logits, rows)
    probabilities = scaled.softmax(dim=-1)
    least = probabilities.amax(dim=-1, keepdim=True) * rows.min_p.unsqueeze(1)
    scaled = scaled.masked_fill(probabilities < least, -float("inf"))
    return _drawn(top_tokens(scaled, rows.top_k, rows.top_p), logits, rows, noise, returns_logits)


def top_tokens(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """-inf outside of top-k and top-p, equal bit for bit to vLLM's `apply_top_k_top_p_pytorch`, which writes a Python
    bool into a slice: Gaudi's compiler takes neither. Its sort is not stable, so it stays on the device."""
    width = logits.shape[1]
    ascending, tokens = logits.sort(dim=-1)
    ascending = ascending.masked_fill(ascending < ascending.gather(1, (width - top_k).unsqueeze(1)), -float("inf"))
    mass = ascending.softmax(dim=-1).cumsum(dim=-1)
    # the last one always stays
    before_last = torch.arange(width, device=logits.device) < width - 1
    ascending = ascending.masked_fill((mass <= 1 - top_p.unsqueeze(1)) & before_last, -float("inf"))
    return logits.scatter(-1, tokens, ascending)


def _tempered(logits: torch.Tensor, rows: RandomRows) -> torch.Tensor:
    is_greedy = rows.temperature < _GREEDY_BELOW
    return logits / torch.where(is_greedy, 1.0, rows.temperature).unsqueeze(1)


def _drawn(
    scaled: torch.Tensor, logits: torch.Tensor, rows: RandomRows, noise: torch.Tensor, returns_logits: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    probabilities = scaled.softmax(dim=-1, dtype=torch.float32)
    tokens = _within((probabilities / noise).argmax(dim=-1), logits)
    # no `where`: Gaudi's compiler is known to get it wrong for integers
    tokens = tokens + (likeliest_tokens(logits) - tokens) * (rows.temperature < _GREEDY_BELOW)
    return tokens, scaled if returns_logits else None


def _within(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """What a device answers for a pad row of NaN must still be an index."""
    return tokens.clamp(0, logits.shape[1] - 1)
