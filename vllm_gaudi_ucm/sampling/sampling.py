"""Logits to tokens: the sampler's batch, the protocol of samplers, and vLLM's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from vllm import envs
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, SamplingType

from vllm_gaudi_ucm.batch.request_table import LiveRequest, RequestTable
from vllm_gaudi_ucm.sampling.draft_probabilities import VerifiedSlots
from vllm_gaudi_ucm.sampling.slot_noise import SlotNoise, noise_seed
from vllm_gaudi_ucm.sampling.thinking_budget import ThinkingBudget, thinking_markers
from vllm_gaudi_ucm.sampling.tokens_in_flight import DeviceTokens, SampledTokens, TokensInFlight
from vllm_gaudi_ucm.vllm_api.sampling import (
    BUILTIN_LOGITS_PROCESSORS,
    BatchUpdate,
    LogitsProcessors,
    LogprobsMode,
    MoveDirectionality,
    SamplingMetadata,
    apply_grammar_bitmask,
    build_logitsprocs,
    drawing_sampler,
    raise_if_nan_logits,
)
from vllm_gaudi_ucm.vllm_api.steps import GrammarOutput, LogprobsTensors, SchedulerOutput

if TYPE_CHECKING:
    from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens
    from vllm_gaudi_ucm.observability.host_work import HostWork
    from vllm_gaudi_ucm.vllm_api.worker import InputBatch


def has_penalty(params: SamplingParams) -> bool:
    """True if any of the three does something."""
    return params.frequency_penalty != 0 or params.presence_penalty != 0 or params.repetition_penalty != 1


class SamplingBatch:
    """The requests that the sampler sees, one slot each, and the metadata made of their parameters.

    Only requests that yield a token in this step have a slot: no sample of a partial prompt has to be discarded. Slots
    stay the same while the set of requests does, as vLLM's logits processors require: their state is keyed by slot.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self._device = device
        self._vocab_size = self.vocabulary = vllm_config.model_config.get_vocab_size()
        custom = vllm_config.model_config.logits_processors or ()
        self._logitsprocs: LogitsProcessors = build_logitsprocs(
            vllm_config, device, is_pin_memory=False, is_pooling_model=False, custom_logitsprocs=custom
        )
        self._reads_output = bool(custom)
        self._budget = ThinkingBudget(thinking_markers(vllm_config))
        # of requests without a seed; every worker of an engine draws the same
        self._seeds = np.random.default_rng(abs(vllm_config.model_config.seed or 0))
        self.slots: list[LiveRequest] = []
        self.membership = object()
        """Another object whenever the slots change: a key of what depends on the slots' parameters alone."""
        self.metadata = self._make_metadata()
        self.min_p = self._make_min_p()
        self._vllm_metadata: SamplingMetadata | None = None
        self._is_likeliest = False
        self._held_back: list[LiveRequest] = []
        self.verified = VerifiedSlots()

    @property
    def wants_likeliest(self) -> bool:
        """True if the next tokens of all slots are the likeliest ones, and the logits have no other use."""
        return self._is_likeliest and all(
            request.sampling_params.min_tokens <= len(request.output_token_ids) for request in self._held_back
        )

    def _asks_for_likeliest(self) -> bool:
        """`wants_likeliest`, once each request has its `min_tokens`."""
        metadata = self.metadata
        if not (metadata.all_greedy and metadata.no_penalties) or metadata.max_num_logprobs is not None:
            return False
        if (
            metadata.thinking_budget_state_holder
            or metadata.logprob_token_ids
            or metadata.bad_words_token_ids
            or envs.VLLM_COMPUTE_NANS_IN_LOGITS
        ):
            return False
        if any(type(processor) not in BUILTIN_LOGITS_PROCESSORS for processor in self._logitsprocs.all):
            return False
        params = [request.sampling_params for request in self.slots]
        return not any(p.structured_outputs is not None or p.logit_bias or p.allowed_token_ids for p in params)

    @property
    def vllm_metadata(self) -> SamplingMetadata:
        """Returns metadata with all tokens of the requests and vocabulary tables, which only vLLM's sampler reads."""
        if self._vllm_metadata is None:
            self._vllm_metadata = self._with_tokens(self.metadata)
        return self._vllm_metadata

    @property
    def req_ids(self) -> list[str]:
        """Slot order of the request ids, under the name that vLLM's grammar helper reads."""
        return [request.request_id for request in self.slots]

    def sync(self, wanted: Sequence[LiveRequest]) -> None:
        """Makes the slots hold exactly `wanted`, moving as few requests as possible.

        Afterwards `slots[i]` is the request of logits row i; the caller orders the rows by it.
        """
        wanted_set = set(wanted)
        update = None
        if len(wanted) != len(self.slots) or not wanted_set.issuperset(self.slots):
            update = self._change_slots(wanted, wanted_set)
            self.membership = object()
            self.metadata, self._vllm_metadata = self._make_metadata(), None
            self.min_p = self._make_min_p()
            self._is_likeliest = self._asks_for_likeliest()
            self._held_back = [request for request in self.slots if request.sampling_params.min_tokens]
        for processor in self._logitsprocs.all:
            processor.update_state(update)

    def _change_slots(self, wanted: Sequence[LiveRequest], wanted_set: set[LiveRequest]) -> BatchUpdate:
        """Refills freed slots with new requests, then closes the holes that are left from the end."""
        present = set(self.slots)
        holes = [slot for slot, request in enumerate(self.slots) if request not in wanted_set]
        removed = list(holes)
        added, moved = [], []
        for request in wanted:
            if request in present:
                continue
            slot = holes.pop(0) if holes else len(self.slots)
            if slot == len(self.slots):
                self.slots.append(request)
            self.slots[slot] = request
            added.append((slot, request.sampling_params, request.prompt_token_ids, request.output_token_ids))
            self._seed(request)
        while holes:
            last = len(self.slots) - 1
            if last == holes[-1]:
                holes.pop()
            else:
                slot = holes.pop(0)
                self.slots[slot] = self.slots[last]
                moved.append((last, slot, MoveDirectionality.UNIDIRECTIONAL))
            self.slots.pop()
        # a slot that was filled again is no removal; processors apply removed, added, moved in this order
        refilled = {slot for slot, *_ in added} | {slot for _, slot, _ in moved}
        removed = sorted((slot for slot in removed if slot not in refilled), reverse=True)
        return BatchUpdate(len(self.slots), removed, added, moved)

    def _seed(self, request: LiveRequest) -> None:
        """Once for each request: its own seed, or the next one of the engine."""
        params = request.sampling_params
        if request.noise_seed is None and params.sampling_type != SamplingType.GREEDY:
            drawn = int(self._seeds.integers(1 << 63))
            request.seed(drawn if params.seed is None else noise_seed(params.seed))

    def _make_metadata(self) -> SamplingMetadata:
        params = [request.sampling_params for request in self.slots]
        greedy = [p.sampling_type == SamplingType.GREEDY for p in params]
        no_penalties = not any(has_penalty(p) for p in params)
        bad_words = {slot: p.bad_words_token_ids for slot, p in enumerate(params) if p.bad_words_token_ids}
        token_ids = {slot: p.logprob_token_ids for slot, p in enumerate(params) if p.logprob_token_ids}
        return SamplingMetadata(
            temperature=None
            if all(greedy)
            else self._floats([0.0 if g else p.temperature for g, p in zip(greedy, params, strict=True)]),
            all_greedy=all(greedy),
            all_random=not any(greedy),
            top_p=self._floats([p.top_p for p in params]) if any(p.top_p < 1 for p in params) else None,
            top_k=self._top_k(params),
            generators={},
            max_num_logprobs=self._max_num_logprobs(params),
            no_penalties=no_penalties,
            prompt_token_ids=None,
            frequency_penalties=self._floats([p.frequency_penalty for p in params]),
            presence_penalties=self._floats([p.presence_penalty for p in params]),
            repetition_penalties=self._floats([p.repetition_penalty for p in params]),
            output_token_ids=[],
            allowed_token_ids_mask=None,
            bad_words_token_ids=bad_words,
            logitsprocs=self._logitsprocs,
            logprob_token_ids=token_ids or None,
            spec_token_ids=[[] for _ in params],
            thinking_budget_state_holder=self._budget.holder(self.slots),
        )

    def _make_min_p(self) -> NDArray[np.float32]:
        """[slots], which vLLM's metadata leaves to a logits processor."""
        return np.array([request.sampling_params.min_p for request in self.slots], np.float32)

    def _with_tokens(self, metadata: SamplingMetadata) -> SamplingMetadata:
        reads_output = metadata.bad_words_token_ids or metadata.thinking_budget_state_holder or self._reads_output
        outputs = [request.output_token_ids for request in self.slots]
        return replace(
            metadata,
            prompt_token_ids=None if metadata.no_penalties else self._prompt_token_ids(),
            output_token_ids=outputs if reads_output or not metadata.no_penalties else [],
            allowed_token_ids_mask=self._disallowed_tokens([request.sampling_params for request in self.slots]),
        )

    def _floats(self, values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _top_k(self, params: list[SamplingParams]) -> torch.Tensor | None:
        top_k = [p.top_k if 0 < p.top_k < self._vocab_size else self._vocab_size for p in params]
        if all(k == self._vocab_size for k in top_k):
            return None
        return torch.tensor(top_k, dtype=torch.int32, device=self._device)

    def _max_num_logprobs(self, params: list[SamplingParams]) -> int | None:
        wanted = [p.logprobs for p in params if p.logprobs is not None]
        return max((self._vocab_size if n == -1 else n for n in wanted), default=None)

    def _prompt_token_ids(self) -> torch.Tensor:
        """int64 [slots, longest prompt], padded with the vocabulary's size, which is no token."""
        prompts = [torch.tensor(request.prompt_token_ids, dtype=torch.int64) for request in self.slots]
        return torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=self._vocab_size).to(
            self._device
        )

    def _disallowed_tokens(self, params: list[SamplingParams]) -> torch.Tensor | None:
        """Returns bool [slots, vocabulary], True where a token must not be sampled (vLLM fills it with -inf)."""
        if not any(p.allowed_token_ids for p in params):
            return None
        mask = torch.zeros(len(params), self._vocab_size, dtype=torch.bool)
        for slot, p in enumerate(params):
            if p.allowed_token_ids:
                mask[slot] = True
                mask[slot, p.allowed_token_ids] = False
        return mask.to(self._device)


class NanCounter:
    """Counts the NaNs of a step's logits by request.

    Args:
        batch: whose slots the rows are of.
        host: count on the host: counting is no graph that was warmed. None: on the device.
    """

    def __init__(self, batch: SamplingBatch, host: HostWork | None) -> None:
        self._batch = batch
        self._host = host
        self._counts: dict[str, int] = {}

    def count(self, logits: torch.Tensor) -> None:
        """logits: [at least slots, vocabulary]; rows beyond the slots are padding."""
        if not envs.VLLM_COMPUTE_NANS_IN_LOGITS:
            return
        rows = logits
        if self._host is not None:
            self._host.stage("count of NaNs")
            rows = self._host.fetch(logits, "logits to count NaNs")
        counts = dict(zip(self._batch.req_ids, rows.isnan().sum(dim=-1).tolist(), strict=False))
        if envs.VLLM_RAISE_ON_LOGIT_NANS:
            raise_if_nan_logits(counts)
        for request_id, found in counts.items():
            self._counts[request_id] = self._counts.get(request_id, 0) + found

    def take_counts(self) -> dict[str, int] | None:
        """The counts since the last call; None if VLLM_COMPUTE_NANS_IN_LOGITS is off."""
        counts, self._counts = self._counts, {}
        return counts if envs.VLLM_COMPUTE_NANS_IN_LOGITS else None


class Grammar(NamedTuple):
    """vLLM's data on the step's structured outputs."""

    scheduler_output: SchedulerOutput
    output: GrammarOutput


Settle = Callable[[], None]
"""Waits until the host has the tokens of all steps before."""


class TokenSampler(Protocol):
    """Samples the requests of a batch; the result is defined by vLLM's `Sampler`."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, grammar: Grammar | None) -> SampledTokens:
        """logits: float32 [at least slots, vocabulary], row i of slot i; changed in place."""

    def begin(
        self, logits: torch.Tensor, batch: SamplingBatch, grammar: Grammar | None, settle: Settle
    ) -> DeviceTokens | SampledTokens:
        """Begins to sample, without waiting for the device if it does all of the work.

        settle: called before any code reads tokens of earlier steps, or writes host memory that their copies read.
        """


class VllmSampler:
    """vLLM's sampler on the device, at the true number of rows, with noise of each request's own.

    Args:
        logprobs_mode: vLLM's.
        use_fp64_gumbel: draw with float64 noise, which not every device has.
    """

    def __init__(self, logprobs_mode: LogprobsMode, use_fp64_gumbel: bool) -> None:
        self._noise = SlotNoise(use_fp64_gumbel)
        self._sampler = drawing_sampler(logprobs_mode, self._noise.draw)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, grammar: Grammar | None) -> SampledTokens:
        sampled = self.begin(logits, batch, grammar, nothing_to_settle)
        if isinstance(sampled, SampledTokens):
            return sampled
        return sampled.read(*sampled.tensors)

    def begin(
        self, logits: torch.Tensor, batch: SamplingBatch, grammar: Grammar | None, settle: Settle
    ) -> DeviceTokens | SampledTokens:
        if not batch.slots:
            return SampledTokens([], None)
        if batch.vllm_metadata.output_token_ids or grammar is not None:
            settle()
        logits = logits[: len(batch.slots)]
        if grammar is not None:
            # all that vLLM's helper reads of its third argument is `req_ids`
            apply_grammar_bitmask(*grammar, cast("InputBatch", batch), logits)
        with nullcontext() if batch.metadata.all_greedy else self._noise.drawn_for(batch.slots, batch.verified.rows):
            sampled = self._sampler(logits, batch.vllm_metadata)
        tokens, scores = sampled.sampled_token_ids, sampled.logprobs_tensors
        if scores is None:
            return DeviceTokens(tokens[:, 0], (tokens,), "tokens", _tokens_alone)
        return DeviceTokens(tokens[:, 0], (tokens, *scores[:3]), "logprobs", _tokens_and_scores)


def nothing_to_settle() -> None:
    """Does nothing, because each step waits for its own tokens."""


def _tokens_alone(tokens: torch.Tensor) -> SampledTokens:
    return SampledTokens(tokens.tolist(), None)


def _tokens_and_scores(
    tokens: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, ranks: torch.Tensor
) -> SampledTokens:
    return SampledTokens(tokens.tolist(), LogprobsTensors(ids, logprobs, ranks).tolists())


class SlotSampler:
    """One token for each slot, written to the request table.

    Args:
        observe: called with the logits before they are sampled.
    """

    def __init__(
        self,
        batch: SamplingBatch,
        sampler: TokenSampler,
        table: RequestTable,
        observe: Callable[[torch.Tensor], None],
    ) -> None:
        self.batch = batch
        self._sampler = sampler
        self._table = table
        self._observe = observe

    def sample(self, logits: torch.Tensor, grammar: Grammar | None) -> SampledTokens:
        """logits: float32 [at least slots, vocabulary], row i of slot i. grammar: one row for each request."""
        self._observe(logits)
        return self._noted(self._sampler.sample(logits, self.batch, grammar))

    def begin(
        self, logits: torch.Tensor, grammar: Grammar | None, carried: CarriedTokens, settle: Settle
    ) -> TokensInFlight:
        """Begins to sample, without waiting if possible. carried: takes the tokens for the next step."""
        self._observe(logits)
        sampled = self._sampler.begin(logits, self.batch, grammar, settle)
        if isinstance(sampled, SampledTokens):
            self._noted(sampled)
        return TokensInFlight(sampled, list(self.batch.slots), self._table, carried)

    @property
    def vocabulary(self) -> int:
        return self.batch.vocabulary

    def note(self, tokens: list[list[int]]) -> SampledTokens:
        """Writes tokens that are already known, for each slot in order."""
        for request, found in zip(self.batch.slots, tokens, strict=True):
            for token in found:
                self._table.append_token(request, token)
        return SampledTokens(tokens, None)

    def _noted(self, sampled: SampledTokens) -> SampledTokens:
        for request, (token,) in zip(self.batch.slots, sampled.tokens, strict=True):
            self._table.append_token(request, token)
        return sampled
