"""Logits to tokens: `vllm.v1.sample`, `vllm.v1.structured_output`; and functions that they lack.

Extension point: custom logits processors. `LogitsProcessor` is their base class, `AnyRunnerLogitsProcessor` of those
that vLLM accepts for either of its runners, and `AdapterLogitsProcessor` of those for single requests; `BatchUpdate`
and `MoveDirectionality` are types of their methods.
Internal: `BUILTIN_LOGITS_PROCESSORS`, `LogitsProcessors` and `build_logitsprocs`, which make the processors of a batch;
`Sampler`, `SamplingMetadata` and `LogprobsMode`; `ThinkingBudgetStateHolder`; `apply_grammar_bitmask`,
`strip_speculative_padding` and `sample_with_exponential_noise`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.model import LogprobsMode
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    LogitsProcessors,
    MoveDirectionality,
    build_logitsprocs,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import (
    apply_top_k_top_p,
    apply_top_k_top_p_pytorch,
    sample_with_exponential_noise,
)
from vllm.v1.sample.sampler import Sampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.structured_output.utils import apply_grammar_bitmask, strip_speculative_padding

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from vllm import SamplingParams

    # our sampler calls `apply` as the V1 runner does, without a context
    V2LogitsProcessor = object
else:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor

__all__ = [
    "BUILTIN_LOGITS_PROCESSORS",
    "AdapterLogitsProcessor",
    "AnyRunnerLogitsProcessor",
    "BatchUpdate",
    "EndOfThinking",
    "LogitsProcessor",
    "LogitsProcessors",
    "LogprobsMode",
    "MoveDirectionality",
    "Sampler",
    "SamplingMetadata",
    "apply_grammar_bitmask",
    "apply_penalties",
    "build_logitsprocs",
    "drawing_sampler",
    "is_for_any_runner",
    "propose_ngram",
    "raise_if_nan_logits",
    "sample_with_exponential_noise",
    "strip_speculative_padding",
]


class AnyRunnerLogitsProcessor(LogitsProcessor, V2LogitsProcessor):
    """Base class of a logits processor that our sampler calls, and that vLLM's frontend accepts on every device.

    Reason: where Triton has a driver, vLLM's frontend accepts only subclasses of its V2 runner's base class, whatever
    the runner.
    Remove when: a platform can declare which processors its runner takes.
    """


def is_for_any_runner(processor: object) -> bool:
    """Returns whether a logits processor, as `ModelConfig.logits_processors` has it, is an `AnyRunnerLogitsProcessor`.
    A name is not imported for it.

    Reason: see `AnyRunnerLogitsProcessor`.
    Remove when: that class is removed.
    """
    return isinstance(processor, type) and issubclass(processor, AnyRunnerLogitsProcessor)


class EndOfThinking(ThinkingBudgetStateHolder):
    """Forces tokens that end the thinking of requests, in vLLM's sampler.

    Args:
        forced: the next token of each row whose request's budget is spent; None for any other row.
        params: of each row's request. A token that a grammar forbids is not forced.

    Reason: vLLM's own holder keeps a state of its own for each request, step by step and with drafts, in which a
    request that is preempted, or verified position by position, is not the same.
    Remove when: the holder is a function of a request's tokens, as in vLLM's V2 runner.
    """

    def __init__(self, forced: Callable[[], list[int | None]], params: list[SamplingParams]) -> None:
        # vLLM's own state is not used
        self._forced = forced
        self._is_structured = [p.structured_outputs is not None for p in params]

    def has_tracked_requests(self) -> bool:
        """Returns True: there is such an object only if a request has a budget."""
        return True

    def update_state(self, *_: Any, **__: Any) -> None:
        """Does nothing, because the state follows from the tokens."""

    def apply_to_logits(self, logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Returns the logits with forced tokens, changed in place. logits: float32 [rows, vocabulary]."""
        for row, token in enumerate(self._forced()):
            if token is not None and not (self._is_structured[row] and logits[row, token] == -inf):
                logits[row, token] = _FORCED
        return logits


_FORCED = 1e9
"""The logit of a forced token, which no bias or penalty reaches; vLLM's value."""


def raise_if_nan_logits(counts: Mapping[str, int]) -> None:
    """Raises like vLLM's own runner if `VLLM_RAISE_ON_LOGIT_NANS` is set. counts: NaNs by request id.

    Reason: the check is in an internal module of the GPU worker (`vllm.v1.worker.utils`), which moves.
    Remove when: vLLM checks the counts of `ModelRunnerOutput.num_nans_in_logits` itself.
    """
    from vllm.v1.worker.utils import raise_if_nan_logits as vllm_raise

    vllm_raise(counts)


class _RowScores(Sampler):
    """vLLM's sampler, with the scores that each row's request asks for.

    Reason: if one request of a batch has `logprob_token_ids`, vLLM's sampler leaves out the top tokens of all others.
    Remove when: `Sampler.forward` returns both.
    """

    def __init__(self, logprobs_mode: LogprobsMode) -> None:
        super().__init__(logprobs_mode)
        self._most: int | None = None

    def forward(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any) -> Any:
        self._most = sampling_metadata.max_num_logprobs
        return super().forward(logits, sampling_metadata, *args, **kwargs)

    def gather_specific_token_logprobs(
        self, logprobs: torch.Tensor, logprob_token_ids: dict[int, list[int]], sampled: torch.Tensor
    ) -> LogprobsTensors | None:
        """Scores of these tokens in the rows that name some, and of the likeliest tokens in the others."""
        own = super().gather_specific_token_logprobs(logprobs, logprob_token_ids, sampled)
        if own is None or self._most is None:
            return own
        top = self.gather_logprobs(logprobs, self._most, token_ids=sampled)
        width = max(own.logprobs.shape[1], top.logprobs.shape[1])
        names = torch.zeros(len(logprobs), 1, dtype=torch.bool)
        names[list(logprob_token_ids)] = True
        names = names.to(logprobs.device)
        return LogprobsTensors(
            torch.where(names, _wide(own.logprob_token_ids, width, 0), _wide(top.logprob_token_ids, width, 0)),
            torch.where(names, _wide(own.logprobs, width, -inf), _wide(top.logprobs, width, -inf)),
            top.selected_token_ranks,
        )


def _wide(table: torch.Tensor, width: int, pad: float) -> torch.Tensor:
    return torch.nn.functional.pad(table, (0, width - table.shape[1]), value=pad)


def drawing_sampler(logprobs_mode: LogprobsMode, draw: Callable[[torch.Tensor], torch.Tensor]) -> Sampler:
    """Returns vLLM's sampler, drawing its random tokens by this function, and scoring each row as its request asks.

    draw: returns int64 [rows], a token of each row of probabilities, float32 [rows, vocabulary], which it may change.

    Reason: vLLM draws row by row from `torch.Generator`s, whose numbers depend on the device, or from a global one,
    whose numbers depend on the batch. And its own choice of top-k and top-p (`apply_top_k_top_p`) takes Triton wherever
    that is installed, whatever the device of the logits; it cannot read the CPU's memory.
    Remove when: the sampler draws by seed and position, like the one of `vllm.v1.worker.gpu.sample`, on every device.
    """
    sampler = _RowScores(logprobs_mode)

    def choose(
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if logits.device.type == "cpu":
            logits = apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)
        else:
            logits = apply_top_k_top_p(logits, k, p)
        wanted = None
        if logprobs_mode == "processed_logits":
            wanted = logits
        elif logprobs_mode == "processed_logprobs":
            wanted = sampler.compute_logprobs(logits)
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)
        return draw(probabilities), wanted

    # vLLM itself puts its choice into this attribute of the instance
    sampler.topk_topp_sampler.forward = choose
    return sampler


def apply_penalties(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    counts: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """vLLM's penalties as plain torch, out of place.

    Args:
        logits: float32 [rows, vocabulary].
        in_prompt: bool [rows, vocabulary], whether a token is in the prompt.
        counts: int32 [rows, vocabulary], how often it is among the outputs.
        presence, frequency, repetition: float32 [rows].

    Reason: `vllm.model_executor.layers.utils.apply_penalties` takes all tokens of every request in each step, as wide
    as the longest, and calls an operator of vLLM's CUDA library for logits on CUDA, which the build without a device
    does not have.
    Remove when: vLLM has a function of counts that is plain torch.
    """
    from vllm._custom_ops import apply_repetition_penalties_torch

    logits, in_output = logits.clone(), counts > 0
    apply_repetition_penalties_torch(logits, in_prompt, in_output, repetition)
    logits -= frequency.unsqueeze(1) * counts
    logits -= presence.unsqueeze(1) * in_output
    return logits


def propose_ngram(
    token_ids: NDArray[np.int32], min_n: int, max_n: int, max_model_len: int, num_drafts: int
) -> NDArray[np.int32]:
    """vLLM's n-gram search in one request, compiled by numba at its first call.

    Args:
        token_ids: [tokens] of the request.
        min_n, max_n: lengths of the n-grams.
        max_model_len: tokens of the longest request.

    Returns:
        [at most num_drafts].

    Raises:
        ImportError: numba is not installed.

    Reason: `NgramProposer.propose` wants a copy of all token ids in batch order, has buffers for `max_num_seqs` rows
    only, which a table with preempted requests exceeds, and starts numba's threads, which take the cores of a model on
    the CPU, for a loop that vLLM itself runs on one.
    Remove when: it takes rows of a table, and starts none.
    """
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as search

    return search(token_ids, min_n, max_n, max_model_len, num_drafts)
