"""Computes how many blocks of a context a request attends to, and which of them are not chosen: pure arithmetic.

Source: seed 000 (GSA) 5.1, `_select_blocks`, clamped to the existing blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.protocol.attachments import computed_tokens

if TYPE_CHECKING:
    from vllm_gaudi_ucm.sparse.options import BlockOptions
    from vllm_gaudi_ucm.vllm_api.steps import Request, SchedulerOutput


class Budget(NamedTuple):
    """The blocks [0, sink_blocks) and [window_start, end) are always attended, `num_selected` chosen between."""

    sink_blocks: int
    window_start: int
    num_selected: int

    @property
    def num_candidates(self) -> int:
        return self.window_start - self.sink_blocks


def block_budget(context_tokens: int, block_size: int, options: BlockOptions) -> Budget | None:
    """Returns the budget of a context; None if it is dense: too short, or without blocks between sinks and window.

    Args:
        context_tokens: certain tokens, including the new one, excluding drafts.
        options: ratio, windows and minima. `min_blocks` and the ratio count full blocks, including sinks and window;
            the tail block is attended in addition.
    """
    return _budget(context_tokens, block_size, options, options.sparse_ratio)


def prompt_budget(cached_tokens: int, block_size: int, options: BlockOptions) -> Budget | None:
    """Returns the budget of each tile of a prompt's chunk; None if it is dense.

    Args:
        cached_tokens: tokens before the chunk. Rows always attend to the chunk itself, and to the block in which it
            begins.
    """
    ratio = options.prompt_ratio
    return None if ratio is None else _budget(cached_tokens, block_size, options, ratio)


def _budget(tokens: int, block_size: int, options: BlockOptions, ratio: float) -> Budget | None:
    if tokens < options.min_tokens:
        return None
    full = tokens // block_size
    sinks = min(options.init_window_sz, full)
    window_start = max(sinks, full - options.local_window_sz)
    candidates = window_start - sinks
    if candidates == 0:
        return None
    live = full - candidates
    # 0.7 * 10 is 7.000000000000001 in binary: a tiny excess must not cost a block
    wanted = max(options.min_blocks, math.ceil(ratio * full - 1e-9))
    # at least one: if sinks and window are the whole budget, no block would be chosen at all
    return Budget(sinks, window_start, min(max(1, wanted - live), candidates))


def shortest_sparse_context(block_size: int, options: BlockOptions) -> int:
    """Returns the tokens of the shortest context that has a budget."""
    return max(options.min_tokens, (options.init_window_sz + options.local_window_sz + 1) * block_size)


def prompt_chunks(scheduler_output: SchedulerOutput, requests: Mapping[str, Request]) -> Iterator[tuple[str, int, int]]:
    """Yields the chunks of prompts of a step: the request, the tokens before the chunk, and its tokens.

    A decode is none, nor a verification; a request that computes its tokens again after a preemption has chunks.
    """
    drafts = scheduler_output.scheduled_spec_decode_tokens
    for request_id, computed in computed_tokens(scheduler_output):
        request, count = requests.get(request_id), scheduler_output.num_scheduled_tokens[request_id]
        if request is None or drafts.get(request_id):
            continue
        if count > 1 or computed + count < request.num_tokens:
            yield request_id, computed, count


class DecodeRow(NamedTuple):
    """A decode or a verification, with one certain token and its drafts; or several certain tokens of a prompt.

    context_tokens: certain tokens that are attended, including the new ones.
    """

    request_id: str
    context_tokens: int
    num_drafts: int


HasGaps = Callable[[str, int], bool]
"""(request id, certain tokens of a step) -> whether the context has gaps and these rows may choose from the rest."""


def no_gaps(request_id: str, num_rows: int) -> bool:
    """Returns False: without KV offload every context is complete."""
    return False


def decode_rows(
    scheduler_output: SchedulerOutput, requests: Mapping[str, Request], has_gaps: HasGaps = no_gaps
) -> Iterator[DecodeRow]:
    """Yields the decodes of a step. A chunk of one token that does not reach the request's last token is not a decode.

    If the context has gaps, prompt rows cannot attend to all of it: they choose together, like a token and its drafts.

    Under asynchronous scheduling the last tokens are not known yet, only their number. With drafts this is called when
    the tokens of the previous step are known (`LateDecisions`).
    """
    drafts = scheduler_output.scheduled_spec_decode_tokens
    for request_id, computed in computed_tokens(scheduler_output):
        num_drafts = len(drafts.get(request_id, ()))
        certain = scheduler_output.num_scheduled_tokens[request_id] - num_drafts
        request = requests.get(request_id)
        if request is None:
            continue
        end = computed + certain
        if (certain == 1 and end >= request.num_tokens) or has_gaps(request_id, certain):
            yield DecodeRow(request_id, end, num_drafts)
