"""Ends a request's thinking once it has taken `thinking_token_budget` tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from vllm_gaudi_ucm.vllm_api.sampling import EndOfThinking

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.batch.request_table import LiveRequest


class ThinkingMarkers(NamedTuple):
    """Token ids around the thinking of a model.

    start: begins it. natural_end: ends it. forced_end: ends it when the budget is spent; it may be longer, with words
    that lead to the answer.
    """

    start: tuple[int, ...]
    natural_end: tuple[int, ...]
    forced_end: tuple[int, ...]


def thinking_markers(vllm_config: VllmConfig) -> ThinkingMarkers | None:
    """Returns the markers of `--reasoning-config` or `--reasoning-parser`; None without them, and vLLM then refuses
    requests with a budget.
    """
    config = vllm_config.reasoning_config
    if config is None or not config.enabled:
        return None
    return ThinkingMarkers(
        tuple(config.reasoning_start_token_ids or ()),
        tuple(config.natural_reasoning_end_token_ids or ()),
        tuple(config.reasoning_end_token_ids or ()),
    )


class _Scan(NamedTuple):
    """The last markers among a request's first `length` tokens; -1 if there is none."""

    length: int = 0
    start: int = -1
    end: int = -1


class ThinkingBudget:
    """Finds the token that a request must get next, a pure function of its tokens. Source: the kernel of vLLM's V2
    runner (`vllm/v1/worker/gpu/sample/thinking_budget.py`).

    Thinking that is in the prompt counts, too. So does a second thinking after an answer has begun, by itself.

    Args:
        markers: None if no request can have a budget.
    """

    def __init__(self, markers: ThinkingMarkers | None) -> None:
        self._markers = markers
        self._scans: WeakKeyDictionary[LiveRequest, _Scan] = WeakKeyDictionary()

    def forced(self, request: LiveRequest) -> int | None:
        """Returns the next token of a request whose budget is spent; None if it may get any."""
        budget, markers = request.sampling_params.thinking_token_budget, self._markers
        if budget is None or markers is None:
            return None
        prompt, output = request.prompt_token_ids, request.output_token_ids
        scan = self._scan(request, markers, len(prompt) + len(output))
        if scan.start < 0 or scan.start <= scan.end:
            return None
        thought = scan.length - scan.start - len(markers.start)
        if thought < budget:
            return None
        tail = _tail(prompt, output, len(markers.forced_end) - 1)
        begun = next(n for n in range(len(tail), -1, -1) if tuple(tail[len(tail) - n :]) == markers.forced_end[:n])
        return markers.forced_end[begun]

    def holder(self, slots: Sequence[LiveRequest]) -> EndOfThinking | None:
        """Returns what forces these tokens in vLLM's sampler; None if no request has a budget.

        slots: the requests of the rows, the same while the result is used.
        """
        params = [request.sampling_params for request in slots]
        if all(p.thinking_token_budget is None for p in params):
            return None
        return EndOfThinking(lambda: [self.forced(request) for request in slots], params)

    def _scan(self, request: LiveRequest, markers: ThinkingMarkers, length: int) -> _Scan:
        """Looks at the tokens that are new since the last call."""
        scan = self._scans.get(request, _Scan())
        if scan.length > length:
            scan = _Scan()
        if scan.length < length:
            overlap = max(len(markers.start), len(markers.natural_end)) - 1
            first = max(0, scan.length - overlap)
            new = _tail(request.prompt_token_ids, request.output_token_ids, length - first)
            start, end = _last(new, markers.start), _last(new, markers.natural_end)
            scan = _Scan(length, scan.start if start < 0 else first + start, scan.end if end < 0 else first + end)
            self._scans[request] = scan
        return scan


def _tail(prompt: Sequence[int], output: Sequence[int], count: int) -> list[int]:
    """Returns the last tokens, at most `count`."""
    if count <= 0:
        return []
    missing = count - len(output)
    return [*(prompt[-missing:] if missing > 0 else ()), *output[-count:]]


def _last(tokens: list[int], marker: tuple[int, ...]) -> int:
    """Returns where the marker begins for the last time; -1 if nowhere."""
    width = len(marker)
    places = range(len(tokens) - width, -1, -1)
    return next((at for at in places if tokens[at] == marker[0] and tuple(tokens[at : at + width]) == marker), -1)
