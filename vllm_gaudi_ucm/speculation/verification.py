"""Verifies drafts position by position with the sampler of ordinary decodes, over the logits of each position."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.sampling.sampling import Grammar, SlotSampler
from vllm_gaudi_ucm.sampling.tokens_in_flight import SampledTokens
from vllm_gaudi_ucm.vllm_api.steps import GrammarOutput, LogprobsLists, first_grammar_rows

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.execution.divided_logits import LogitsOfParts
    from vllm_gaudi_ucm.execution.execution import Execution
    from vllm_gaudi_ucm.protocol.step_drafts import StepDrafts
    from vllm_gaudi_ucm.sampling.draft_probabilities import DraftProbabilities


class StepLogits:
    """Finds the rows of a position, and computes their logits when they are wanted.

    Args:
        execution: of the step.
        at_once: compute the logits of all positions in one call, up to `max_logits` rows: the output head reads its
            weights once. The rows of a position are then gathered, which static shapes have no graph for.
        greedy: the likeliest tokens are all that is wanted of the logits.
    """

    def __init__(self, execution: Execution, drafts: StepDrafts, at_once: bool, greedy: bool = False) -> None:
        self._execution = execution
        self._drafts = drafts
        self._at_once = at_once
        self._greedy = greedy
        self.likeliest: LikeliestTokens | None = None
        """Likeliest tokens of all rows of an undivided step, instead of logits; None: call `at`."""
        self._divided: LogitsOfParts | None = None
        self._first = torch.empty(0)
        self._everything: torch.Tensor | None = None
        self._row_of: dict[LiveRequest, int] = {}

    def compute(self, requests: Sequence[LiveRequest], last_rows: NDArray[np.int64]) -> None:
        """Computes position 0 of an undivided step.

        requests: the requests that yield tokens, in the order of the sampler's slots. last_rows: int64, the last row of
            each.
        """
        counts = self._counts(requests)
        rows = last_rows - counts
        total = len(rows) + int(counts.sum())
        if not counts.any():
            self._first = self._execution.logits(rows)
            return
        starts = np.cumsum(counts + 1) - counts - 1
        offsets = np.arange(total) - starts.repeat(counts + 1)
        every_row = rows.repeat(counts + 1) + offsets
        likeliest = self._execution.likeliest(every_row) if self._greedy else None
        if likeliest is not None:
            self.likeliest = LikeliestTokens(likeliest, dict(zip(requests, starts.tolist(), strict=True)))
        elif self._at_once and total <= self._execution.max_logits:
            self._everything = self._execution.logits(every_row)
            self._row_of = dict(zip(requests, starts.tolist(), strict=True))
            self._first = self._everything[torch.from_numpy(starts).to(self._everything.device)]
        else:
            self._first = self._execution.logits(rows)
            self._row_of = dict(zip(requests, rows.tolist(), strict=True))

    def compute_division(
        self,
        requests: Sequence[LiveRequest],
        last_rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        divided: LogitsOfParts,
        num_slots: int,
    ) -> None:
        """Computes all positions of one division of a step; the next division overwrites its hidden states.

        slots: int64, the sampler's slot of each request at position 0. num_slots: of the whole step.
        """
        self._divided = divided
        counts = self._counts(requests)
        for position in range(int(counts.max(initial=0)) + 1):
            going_on = counts >= position
            logits = self._execution.logits((last_rows - counts)[going_on] + position)
            whole = divided.put(logits, slots[going_on], num_slots, position)
            if not position:
                self._first = whole
        self._row_of.update(zip(requests, slots.tolist(), strict=True))

    def at(self, position: int, slots: Sequence[LiveRequest]) -> torch.Tensor:
        """float32 [at least len(slots), vocabulary], row i of slots[i]; valid until the next call."""
        if not position:
            return self._first
        rows = np.array([self._row_of[request] for request in slots], np.int64)
        if self._divided is not None:
            return self._divided.logits_of(rows, position)
        if self._everything is not None:
            return self._everything[torch.from_numpy(rows + position).to(self._everything.device)]
        return self._execution.logits(rows + position)

    def _counts(self, requests: Sequence[LiveRequest]) -> NDArray[np.int64]:
        if not self._drafts.tokens:
            return np.zeros(len(requests), np.int64)
        return np.array([self._drafts.count(request.request_id) for request in requests], np.int64)


class LikeliestTokens(NamedTuple):
    """tokens: int64 [at least all rows] on the device. start: of each request, the place of its position 0."""

    tokens: torch.Tensor
    start: dict[LiveRequest, int]


def grammar_at(grammar: Grammar, position: int, req_ids: Collection[str]) -> Grammar | None:
    """Returns the grammar as in a step without drafts: one row per request of `req_ids` that has one, None if none has.

    The scheduler fills a draft's row with the tokens that may follow the drafts before it; rows of -1 (see StepDrafts),
    which are never reached, allow everything. Source: vLLM's `StructuredOutputManager.grammar_bitmask`.
    """
    scheduled, output = grammar
    named = output.structured_output_request_ids
    if not scheduled.scheduled_spec_decode_tokens and len(output.grammar_bitmask) == len(named):
        return grammar
    names, lines = [], []
    for request_id, line in zip(named, first_grammar_rows(scheduled, output), strict=True):
        if request_id in req_ids:
            names.append(request_id)
            lines.append(line + position)
    if not names:
        return None
    return Grammar(
        replace(scheduled, scheduled_spec_decode_tokens={}), GrammarOutput(names, output.grammar_bitmask[lines])
    )


def join_logprobs(
    positions: Sequence[tuple[Sequence[int], LogprobsLists | None]], num_requests: int
) -> LogprobsLists | None:
    """Joins the tokens of request 0, then those of request 1, and so on, with the index of each request's first.

    Positions differ in width when requests with more logprobs drop out. Narrower ones are padded with token 0 at -inf,
    which vLLM never reads, because it cuts every request to the width that it asked for.

    Args:
        positions: for each position, the requests that it sampled (numbers, all of them at position 0), and their
            logprobs, row i for request i of these; None if none of them asked.
        num_requests: requests of the step. The ones after the sampled ones have no tokens, but vLLM slices their
            logprobs as well.
    """
    if all(logprobs is None for _, logprobs in positions):
        return None
    if len(positions) == 1:
        return positions[0][1]
    requests = np.concatenate([np.array(members, np.int64) for members, _ in positions])
    order = requests.argsort(kind="stable")
    found = [_tables(len(members), logprobs) for members, logprobs in positions]
    width = max(tokens.shape[1] for tokens, _, _ in found)
    counts = np.bincount(requests, minlength=num_requests)
    return LogprobsLists(
        np.concatenate([_widened(tokens, width, 0) for tokens, _, _ in found])[order],
        np.concatenate([_widened(scores, width, -np.inf) for _, scores, _ in found])[order],
        np.concatenate([ranks for _, _, ranks in found])[order],
        [0, *counts.cumsum().tolist()],
    )


def _tables(rows: int, logprobs: LogprobsLists | None) -> tuple[NDArray, NDArray, NDArray]:
    if logprobs is None:
        return np.zeros((rows, 0), np.int32), np.zeros((rows, 0), np.float32), np.zeros(rows, np.int64)
    return logprobs.logprob_token_ids, logprobs.logprobs, logprobs.sampled_token_ranks


def _widened(table: NDArray, width: int, pad: float) -> NDArray:
    return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=pad)


class Verification:
    """Samples a step: one token for each request, and one more after each draft that the sampled token equals.

    A position is an ordinary decode of the requests whose drafts were all accepted so far: tokens are written to the
    request table before the next position is sampled, so penalties, processors, grammars and seeds work as without
    drafts. With deterministic drafts this draws from the same distribution as rejection sampling, and with greedy or
    seeded sampling gives the same tokens as without drafts.

    Of random drafts, the sampler knows the distribution, and draws by rejection sampling: it returns the draft if it
    accepts it, and otherwise a token of what remains. So here, too, a draft is accepted if the token equals it.

    Args:
        sampler: samples one position.
        host: counts the steps whose drafts are compared with tokens.
        kept: distributions of random drafts; None if drafts are likeliest tokens.
    """

    def __init__(
        self, sampler: SlotSampler, host: HostWork | None = None, kept: DraftProbabilities | None = None
    ) -> None:
        self._kept = kept
        self._sampler = sampler
        self._host = host or HostWork()
        self._batch = sampler.batch

    def sample(self, logits: StepLogits, drafts: StepDrafts, grammar: Grammar | None) -> SampledTokens:
        """Samples tokens of each request in the current slots of the batch; afterwards the batch has the slots of the
        last position.

        logits, drafts, grammar: of the whole step.
        """
        if logits.likeliest is not None:
            return self._accept(logits.likeliest, drafts)
        sampled = self._sample(logits, 0, drafts, grammar)
        if not drafts.tokens:
            return sampled
        self._host.stage("acceptance of drafts")
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
            sampled = self._sample(logits, position, drafts, grammar)
        return SampledTokens(tokens, join_logprobs(scores, len(drafts.num_scheduled)))

    def _accept(self, likeliest: LikeliestTokens, drafts: StepDrafts) -> SampledTokens:
        """The same of likeliest tokens: one read of the device, whatever the number of drafts."""
        self._host.stage("acceptance of drafts")
        most = self._sampler.vocabulary - 1
        # a device's result for a row of NaN must still be a token
        found = self._host.fetch(likeliest.tokens, "tokens").clamp(0, most).tolist()
        tokens = []
        for request in self._batch.slots:
            start, proposed = likeliest.start[request], drafts.tokens.get(request.request_id, ())
            accepted = next(
                (index for index, draft in enumerate(proposed) if found[start + index] != draft), len(proposed)
            )
            tokens.append(found[start : start + accepted + 1])
        return self._sampler.note(tokens)

    def _sample(self, logits: StepLogits, position: int, drafts: StepDrafts, grammar: Grammar | None) -> SampledTokens:
        """One token for each slot, written to the table."""
        rows = logits.at(position, self._batch.slots)
        allowed = None if grammar is None else grammar_at(grammar, position, self._batch.req_ids)
        if self._kept is None or self._batch.metadata.all_greedy:
            return self._sampler.sample(rows, allowed)
        with self._batch.verified.of(self._kept.proposed(self._batch.req_ids, drafts.tokens, position)):
            return self._sampler.sample(rows, allowed)
