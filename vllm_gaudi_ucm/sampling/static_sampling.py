"""Sampling in few recipes, all of them functions of the number of logits rows alone, so that all can be warm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.execution.graph_manager import Compile, Stage, uncompiled
from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.ops.likeliest_tokens import likeliest_tokens
from vllm_gaudi_ucm.sampling.allowed_tokens import AllowedTokens, reads_tokens
from vllm_gaudi_ucm.sampling.host_rows import (
    HostRows,
    HostSampling,
    RowScores,
    has_processors_of_batches,
    host_rows,
    score_row,
    with_scores,
)
from vllm_gaudi_ucm.sampling.sampling import Grammar, SamplingBatch, Settle, has_penalty, nothing_to_settle
from vllm_gaudi_ucm.sampling.stages.logit_bias import LogitBias
from vllm_gaudi_ucm.sampling.stages.penalties import Penalties
from vllm_gaudi_ucm.sampling.stages.row_transfer import RowTransfer
from vllm_gaudi_ucm.sampling.stages.token_choice import TokenChoice
from vllm_gaudi_ucm.sampling.stages.token_mask import TokenMask, bitmask_of, mask_logits
from vllm_gaudi_ucm.sampling.stages.top_logprobs import TopLogprobs, read_scores
from vllm_gaudi_ucm.sampling.thinking_budget import ThinkingBudget, thinking_markers
from vllm_gaudi_ucm.sampling.tokens_in_flight import DeviceTokens, SampledTokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens

# Scores per row if `--max-logprobs -1` sets no limit: vLLM's default limit.
_DEFAULT_WIDTH = 20


class _Drawn(NamedTuple):
    """The draws of a step, on the device. tokens: int64 [rows]. scored: logits for logprobs, [rows, vocabulary]."""

    tokens: torch.Tensor
    scored: torch.Tensor


class StaticSampler:
    """See TokenSampler: results equal those of vLLM's `Sampler` over the true rows; pads never affect them.

    On the device run, each a stage of its own: masks of grammars and of allowed tokens, logit bias, penalties, then the
    choice (greedy; random; random with min-p, top-k or top-p), then logprobs. Features that only the host has are
    computed there for the rows of the requests that use them. Everything is sampled on the host if a custom logits
    processor sees all requests at once, or with float64 noise.

    Args:
        max_num_seqs: most logits rows of a step.
        bypassed: called with the reason for each step that samples some rows on the host.
        carried: with async scheduling, the tokens of the previous step.
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
        carried: CarriedTokens | None = None,
    ) -> None:
        model = vllm_config.model_config
        self._device = device
        self._max_rows = max_num_seqs
        self._vocab_size = vocab_size = model.get_vocab_size()
        self._bypassed = bypassed
        # raw scores are from logits before penalties and temperature, processed ones from logits after them
        self._scores_raw = model.logprobs_mode.startswith("raw_")
        self._as_logits = model.logprobs_mode.endswith("_logits")
        width = min(_DEFAULT_WIDTH if model.max_logprobs == -1 else model.max_logprobs, vocab_size)
        self._host_work = host
        mask = region(mask_logits)
        self._grammar = TokenMask(max_num_seqs, vocab_size, device, stage, mask)
        self._allowed = TokenMask(max_num_seqs, vocab_size, device, stage, mask)
        self._allowed_tokens = AllowedTokens(vocab_size, ThinkingBudget(thinking_markers(vllm_config)))
        self._bias = LogitBias(max_num_seqs, vocab_size, device, stage, region)
        self._rows = RowTransfer(vocab_size, device, stage, host, region)
        self._penalties = Penalties(max_num_seqs, vocab_size, device, stage, region, carried)
        self._stage, self._likeliest = stage, region(likeliest_tokens)
        self._choice = TokenChoice(max_num_seqs, vocab_size, device, stage, not self._scores_raw, region)
        self._logprobs = TopLogprobs(width, self._as_logits, stage, region)
        self._use_fp64_gumbel = model.use_fp64_gumbel
        self._host = HostSampling(model.logprobs_mode, model.use_fp64_gumbel, host)
        # of requests with penalties, in the step that was drawn last
        self._slots_before: WeakKeyDictionary[LiveRequest, int] = WeakKeyDictionary()

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, grammar: Grammar | None) -> SampledTokens:
        """See TokenSampler.

        logits: float32 [rows of a bucket, vocabulary] on the device. batch: on the CPU. Ends with the only wait for the
        device, except for rows that only the host can sample.
        """
        sampled = self.begin(logits, batch, grammar, nothing_to_settle)
        return sampled if isinstance(sampled, SampledTokens) else self._read(sampled)

    def begin(
        self, logits: torch.Tensor, batch: SamplingBatch, grammar: Grammar | None, settle: Settle
    ) -> DeviceTokens | SampledTokens:
        """See TokenSampler."""
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
        elif batch.wants_likeliest:
            # as in most steps: nothing is asked of the requests one by one
            return self._device_tokens(batch, _Drawn(self._greedy(logits), logits), None)
        reason = next(self._host_features(batch), None)
        if reason is not None:
            self._note(reason)
            settle()
            return self._host.sample(logits, batch, bitmask)
        rows = host_rows(batch, self._bias.width, self._logprobs.width)
        if rows.edits or rows.scores:
            for reason in rows.reasons:
                self._note(reason)
            settle()
            return self._with_host_rows(logits, batch, bitmask, rows)
        if any(reads_tokens(request.sampling_params) for request in batch.slots):
            settle()
        return self._on_device(logits, batch, bitmask)

    def warm(self, rows: int) -> None:
        """Executes every stage once for `rows` logits rows; call it in inference mode, as for sampling."""
        logits = torch.zeros(rows, self._vocab_size, device=self._device)
        for part in (self._grammar, self._allowed, self._bias, self._rows, self._penalties, self._choice):
            part.warm(logits)
        self._logprobs.score(logits, self._greedy(logits))

    def warm_drafts(self, rows: int, draft_probabilities: torch.Tensor) -> None:
        """Executes the stages of rows that verify random drafts, drawn from [places, vocabulary]."""
        logits = torch.zeros(rows, self._vocab_size, device=self._device)
        self._choice.warm(logits, draft_probabilities)

    def refill(self) -> None:
        """Every tensor that outlives a step again, after a warm-up that computed nothing."""
        for part in (self._grammar, self._allowed, self._bias, self._rows, self._penalties, self._choice):
            part.refill()

    def _note(self, reason: str) -> None:
        self._bypassed(f"sampling on host: {reason}")
        self._host_work.stage(f"sampling: {reason}")

    def _read(self, sampled: DeviceTokens) -> SampledTokens:
        return sampled.read(*(self._host_work.fetch(tensor, sampled.reason) for tensor in sampled.tensors))

    def _on_device(self, logits: torch.Tensor, batch: SamplingBatch, bitmask: NDArray[np.int32] | None) -> DeviceTokens:
        return self._device_tokens(batch, self._draw(logits, batch, bitmask), batch.metadata.max_num_logprobs)

    def _with_host_rows(
        self, logits: torch.Tensor, batch: SamplingBatch, bitmask: NDArray[np.int32] | None, rows: HostRows
    ) -> SampledTokens:
        """Waits for the device."""
        drawn = self._draw(logits, batch, bitmask, rows)
        on_device = [r.sampling_params.logprobs for slot, r in enumerate(batch.slots) if slot not in rows.scores]
        width = max((wanted for wanted in on_device if wanted is not None), default=None)
        sampled = self._read(self._device_tokens(batch, drawn, width))
        if not rows.scores:
            return sampled
        found: dict[int, RowScores] = {}
        for slot, reason in rows.scores.items():
            row, (token,) = self._rows.fetch_row(drawn.scored, slot, f"row for {reason}"), sampled.tokens[slot]
            found[slot] = score_row(row, token, batch.slots[slot].sampling_params, self._as_logits)
        return with_scores(sampled, found)

    def _draw(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        bitmask: NDArray[np.int32] | None,
        rows: HostRows | None = None,
    ) -> _Drawn:
        metadata = batch.metadata
        if bitmask is not None:
            logits = self._grammar.apply(logits, bitmask)
        scored = logits
        if self._allowed_tokens.forbids(batch.slots):
            logits = self._without_forbidden(logits, batch, bitmask)
        if any(request.sampling_params.logit_bias for request in batch.slots):
            logits = self._bias.apply(logits, batch)
        for slot, edits in ({} if rows is None else rows.edits).items():
            row = self._rows.fetch_row(logits, slot, f"row for {edits[0][0]}")
            for _, edit in edits:
                row = edit(row)
            logits = self._rows.put(logits, slot, row)
        if not metadata.no_penalties:
            logits = self._penalties.apply(logits, batch, self._slots_before)
        if metadata.all_greedy:
            tokens, drawn_from = self._greedy(logits), None
        else:
            tokens, drawn_from = self._choice.random(logits, batch)
        self._slots_before = _penalised_slots(batch)
        if not self._scores_raw:
            scored = logits if drawn_from is None else drawn_from
        return _Drawn(tokens, scored)

    def _greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 [rows]."""
        with self._stage("greedy"):
            tokens: torch.Tensor = self._likeliest(logits)
            return tokens

    def _without_forbidden(
        self, logits: torch.Tensor, batch: SamplingBatch, bitmask: NDArray[np.int32] | None
    ) -> torch.Tensor:
        slots, allowed = batch.slots, self._allowed_tokens
        changing = allowed.changing(slots)
        if bitmask is not None and allowed.depends_on_grammar(slots, changing):
            return self._allowed.apply(logits, allowed.within(bitmask, slots, changing))
        return self._allowed.apply_kept(logits, (batch.membership, changing), lambda: allowed.words_of(slots, changing))

    def _device_tokens(self, batch: SamplingBatch, drawn: _Drawn, width: int | None) -> DeviceTokens:
        """width: scores of each row; None if no request wants any."""
        count, tokens = len(batch.slots), drawn.tokens
        if width is None:
            return DeviceTokens(tokens, (tokens,), "tokens", partial(_tokens_alone, count))

        def read(numbers: torch.Tensor, found: torch.Tensor) -> SampledTokens:
            return SampledTokens(*read_scores(numbers, found, count, width))

        return DeviceTokens(tokens, self._logprobs.score(drawn.scored, tokens), "logprobs", read)

    def _host_features(self, batch: SamplingBatch) -> Iterator[str]:
        """Returns the features of the batch that the device does not have."""
        if has_processors_of_batches(batch):
            yield "custom logits processors"
        if self._use_fp64_gumbel and not batch.metadata.all_greedy:
            yield "use_fp64_gumbel"


def _tokens_alone(count: int, tokens: torch.Tensor) -> SampledTokens:
    return SampledTokens(tokens.numpy()[:count, np.newaxis].tolist(), None)


def _penalised_slots(batch: SamplingBatch) -> WeakKeyDictionary[LiveRequest, int]:
    """Slots by request. Requests that end take their entries with them: no later step may have penalties."""
    if batch.metadata.no_penalties:
        return WeakKeyDictionary()
    slots = enumerate(batch.slots)
    return WeakKeyDictionary({request: slot for slot, request in slots if has_penalty(request.sampling_params)})
