"""Computes which tokens the parameters of requests allow, as bits: allowed tokens, bad words, no stop before
`min_tokens`, the end of thinking.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.sampling.stages.token_mask import ALL_ALLOWED, WORD, num_words

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.sampling.thinking_budget import ThinkingBudget

Words = NDArray[np.int32]

Changing = tuple[tuple[int, ...], bool, int | None]
"""The state that changes with a request's tokens: last tokens of the bad words that have begun, whether it must not
stop yet, and the token that must end its thinking now.
"""


def reads_tokens(params: SamplingParams) -> bool:
    """True if the allowed tokens depend on a request's tokens, as with bad words of several tokens."""
    return params.thinking_token_budget is not None or any(len(word) > 1 for word in params.bad_words_token_ids or ())


class AllowedTokens:
    """Composes the bitmask of a batch; the part that does not change with a request's tokens is made once.

    Args:
        vocab_size: of the logits.
        budget: ends the thinking of requests.
    """

    def __init__(self, vocab_size: int, budget: ThinkingBudget) -> None:
        self._vocab_size = vocab_size
        self._budget = budget
        self._own: WeakKeyDictionary[LiveRequest, Words] = WeakKeyDictionary()
        self._none = np.full(num_words(vocab_size), ALL_ALLOWED, np.int32)

    def forbids(self, slots: Sequence[LiveRequest]) -> bool:
        """True if any of these requests must not get some token."""
        return any(_is_limited(request) or self._budget.forced(request) is not None for request in slots)

    def changing(self, slots: Sequence[LiveRequest]) -> tuple[Changing, ...]:
        """Returns the state of each request. If it and the slots stay, so do the allowed tokens, but for a grammar."""
        return tuple(self._changing(request) for request in slots)

    def depends_on_grammar(self, slots: Sequence[LiveRequest], changing: Sequence[Changing]) -> bool:
        """True if a request with a grammar must not stop yet, or must end its thinking, unless its grammar allows
        nothing of that.
        """
        return any(
            (must_go_on or forced is not None) and request.sampling_params.structured_outputs is not None
            for request, (_, must_go_on, forced) in zip(slots, changing, strict=True)
        )

    def words_of(self, slots: Sequence[LiveRequest], changing: Sequence[Changing]) -> Words:
        """[slots, words] in the order of tokens. Source: vLLM's `Sampler.apply_logits_processors`."""
        return np.stack([self._line(request, *found) for request, found in zip(slots, changing, strict=True)])

    def within(self, grammar: Words, slots: Sequence[LiveRequest], changing: Sequence[Changing]) -> Words:
        """Returns the same combined with a bitmask of grammars, [slots, words]: vLLM lets a structured output end if no
        other token is left.
        """
        lines = self.words_of(slots, changing)
        for slot, (request, (begun, must_go_on, forced)) in enumerate(zip(slots, changing, strict=True)):
            if request.sampling_params.structured_outputs is None:
                continue
            if forced is not None and not self._any(lines[slot] & grammar[slot]):
                lines[slot] = self._line(request, begun, must_go_on, None)
            if not self._any(lines[slot] & grammar[slot]):
                lines[slot] = self._line(request, begun, False, None)
        return lines

    def _any(self, words: Words) -> bool:
        last = self._vocab_size % WORD
        return bool(words[:-1].any() or (words[-1] & ((1 << last) - 1 if last else ALL_ALLOWED)))

    def _changing(self, request: LiveRequest) -> Changing:
        params, outputs = request.sampling_params, request.output_token_ids
        begun = tuple(
            word[-1]
            for word in params.bad_words_token_ids or ()
            if len(word) > 1 and outputs[max(0, len(outputs) + 1 - len(word)) :] == word[:-1]
        )
        return begun, params.min_tokens > len(outputs), self._budget.forced(request)

    def _line(self, request: LiveRequest, begun: Sequence[int], must_go_on: bool, forced: int | None) -> Words:
        if forced is not None:
            words = np.zeros_like(self._none)
            words[forced // WORD] = np.uint32(1 << forced % WORD).view(np.int32)
            return words
        own = self._own.get(request)
        if own is None:
            own = self._own[request] = self._of_parameters(request.sampling_params)
        if not begun and not must_go_on:
            return own
        stops = request.sampling_params.all_stop_token_ids if must_go_on else ()
        return self._without(own, [*begun, *stops])

    def _of_parameters(self, params: SamplingParams) -> Words:
        words = self._none
        if params.allowed_token_ids:
            bits = np.zeros(len(words) * WORD, np.uint8)
            bits[params.allowed_token_ids] = 1
            words = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        return self._without(words, [word[0] for word in params.bad_words_token_ids or () if len(word) == 1])

    def _without(self, words: Words, tokens: Iterable[int]) -> Words:
        places = np.array([token for token in tokens if token < self._vocab_size], np.int64)
        found = words.copy()
        bits = (np.uint32(1) << (places % WORD).astype(np.uint32)).view(np.int32)
        np.bitwise_and.at(found, places // WORD, ~bits)
        return found


def _is_limited(request: LiveRequest) -> bool:
    params = request.sampling_params
    return bool(
        params.allowed_token_ids or params.bad_words_token_ids or params.min_tokens > len(request.output_token_ids)
    )
