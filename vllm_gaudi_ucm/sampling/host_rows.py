"""Features of single requests that only the host has: only the rows of these requests are copied to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.sampling.slot_noise import SlotNoise
from vllm_gaudi_ucm.sampling.stages.token_mask import WORD, mask_logits
from vllm_gaudi_ucm.sampling.tokens_in_flight import SampledTokens
from vllm_gaudi_ucm.vllm_api.sampling import BUILTIN_LOGITS_PROCESSORS, AdapterLogitsProcessor, drawing_sampler
from vllm_gaudi_ucm.vllm_api.steps import LogprobsLists

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_gaudi_ucm.sampling.sampling import SamplingBatch
    from vllm_gaudi_ucm.vllm_api.sampling import LogprobsMode


Edit = Callable[[torch.Tensor], torch.Tensor]
"""Logits of a row to others, float32 [vocabulary] on the host."""


class HostRows(NamedTuple):
    """The rows of a batch that go to the host, by slot. edits: edits between bias and penalties, each with its name.
    scores: reasons for logprobs.
    """

    edits: dict[int, list[tuple[str, Edit]]]
    scores: dict[int, str]

    @property
    def reasons(self) -> list[str]:
        """Returns the reasons why rows are copied, each once."""
        return list(
            dict.fromkeys([name for edits in self.edits.values() for name, _ in edits] + [*self.scores.values()])
        )


def has_processors_of_batches(batch: SamplingBatch) -> bool:
    """True if a custom logits processor must see all rows at once, or sees them in the middle of the device's work."""
    custom = (p for p in batch.metadata.logitsprocs.all if type(p) not in BUILTIN_LOGITS_PROCESSORS)
    return any(not isinstance(p, AdapterLogitsProcessor) or p.is_argmax_invariant() for p in custom)


def host_rows(batch: SamplingBatch, most_biases: int, most_logprobs: int) -> HostRows:
    """Finds them.

    Args:
        batch: without processors of whole batches.
        most_biases, most_logprobs: that the device has room for.
    """
    rows = HostRows({}, {})
    for slot, request in enumerate(batch.slots):
        params = request.sampling_params
        if len(params.logit_bias or ()) > most_biases:
            rows.edits[slot] = [(f"more than {most_biases} logit_bias", _bias(params))]
        if params.logprob_token_ids:
            rows.scores[slot] = "logprob_token_ids"
        elif params.logprobs is not None and not 0 <= params.logprobs <= most_logprobs:
            rows.scores[slot] = f"more than {most_logprobs} logprobs"
    for processor in batch.metadata.logitsprocs.all:
        if isinstance(processor, AdapterLogitsProcessor):
            for slot, edit in processor.req_info.items():
                rows.edits.setdefault(slot, []).append(("custom logits processors", edit))
    return rows


def _bias(params: SamplingParams) -> Edit:
    wanted = params.logit_bias or {}
    tokens, biases = torch.tensor([*wanted]), torch.tensor([*wanted.values()], dtype=torch.float32)
    return lambda row: row.index_add(0, tokens, biases)


class RowScores(NamedTuple):
    """tokens: int32 [n], the sampled one first. scores: float32 [n]. rank: of the sampled one, 1 is the top."""

    tokens: NDArray[np.int32]
    scores: NDArray[np.float32]
    rank: int


def score_row(logits: torch.Tensor, token: int, params: SamplingParams, as_logits: bool) -> RowScores:
    """logits: float32 [vocabulary] on the host. token: sampled. Source: vLLM's `Sampler.gather_logprobs`."""
    scores = logits if as_logits else logits.log_softmax(dim=-1)
    if params.logprob_token_ids:
        others = torch.tensor(params.logprob_token_ids)
    else:
        width = params.logprobs if params.logprobs and params.logprobs > 0 else len(scores)
        others = scores.topk(min(width, len(scores))).indices
    tokens = torch.cat((torch.tensor([token]), others))
    rank = int((scores >= scores[token]).sum())
    return RowScores(tokens.to(torch.int32).numpy(), scores[tokens].numpy(), rank)


def with_scores(sampled: SampledTokens, rows: Mapping[int, RowScores]) -> SampledTokens:
    """Replaces the scores of single rows; narrower rows are padded with token 0 at -inf, which vLLM does not read."""
    lists = sampled.logprobs
    width = max(len(row.tokens) for row in rows.values())
    if lists is not None:
        width = max(width, lists.logprobs.shape[1])
    count = len(sampled.tokens)
    tokens, scores = np.zeros((count, width), np.int32), np.full((count, width), -np.inf, np.float32)
    ranks = np.zeros(count, np.int64)
    if lists is not None:
        place = slice(0, lists.logprobs.shape[1])
        tokens[:, place], scores[:, place], ranks[:] = (
            lists.logprob_token_ids,
            lists.logprobs,
            lists.sampled_token_ranks,
        )
    for slot, row in rows.items():
        tokens[slot], scores[slot], ranks[slot] = 0, -np.inf, row.rank
        tokens[slot, : len(row.tokens)], scores[slot, : len(row.scores)] = row.tokens, row.scores
    return SampledTokens(sampled.tokens, LogprobsLists(tokens, scores, ranks))


class HostSampling:
    """vLLM's sampler over a copy of the logits, with the batch's metadata, both on the CPU.

    Args:
        logprobs_mode: vLLM's.
        use_fp64_gumbel: draw with float64 noise, which not every device has.
    """

    def __init__(self, logprobs_mode: LogprobsMode, use_fp64_gumbel: bool, host: HostWork) -> None:
        self._host = host
        self._noise = SlotNoise(use_fp64_gumbel)
        self._sampler = drawing_sampler(logprobs_mode, self._noise.draw)
        self._shifts = torch.arange(WORD, dtype=torch.int32)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, bitmask: NDArray[np.int32] | None) -> SampledTokens:
        """logits: float32 [at least slots, vocabulary], on any device. bitmask: int32 [slots, words]."""
        # all rows cross, at the one shape that the device knows
        rows = self._host.fetch(logits, "logits to sample on host")[: len(batch.slots)]
        if bitmask is not None:
            rows = mask_logits(rows, torch.from_numpy(bitmask), self._shifts)
        # the sampler compiles its ranks for the platform's device, at this step's number of rows
        with torch.compiler.set_stance("force_eager"), self._noise.drawn_for(batch.slots):
            sampled = self._sampler(rows, batch.vllm_metadata)
        scores = sampled.logprobs_tensors
        return SampledTokens(sampled.sampled_token_ids.tolist(), None if scores is None else scores.tolists())
