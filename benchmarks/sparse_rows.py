"""The last tokens of a text, each decoded against a dense context: under full attention, or with some blocks only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.sparse_step import Step

# The blocks that rows of a layer attend to, bool [rows, blocks] or [heads, rows, blocks]; None is everything.
Policy = Callable[[Step], Tensor | None]
ATTENTION = "benchmark_of_selected_blocks"

_policy: ContextVar[tuple[Policy, int] | None] = ContextVar("policy", default=None)


class DecodedRows:
    """Rows `tokens[first:]` of a causal language model by Hugging Face, the tokens before them computed once.

    All rows are computed together, and each attends to the policy's choice, in every layer: a row leaves in the cache
    what decoding with that selection would have left.

    Args:
        chunk: the tokens before `first` are computed in chunks of this size; None: at once.
        policy_of: returns the policy of the chunk that begins at a token; without it they are dense.
        block_size: of the policies.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Any,
        tokens: Tensor,
        first: int,
        chunk: int | None = None,
        policy_of: Callable[[int], Policy | None] = lambda begin: None,
        block_size: int = 1,
    ) -> None:
        from transformers import DynamicCache

        self._model, self._tokens, self._first = model, tokens, first
        # without the model's configuration layers with windows keep everything, so that rows can be taken back
        self._cache = DynamicCache()
        for begin in range(0, first, chunk or first):
            rows = tokens[None, begin : min(first, begin + (chunk or first))]
            with selecting(policy_of(begin), block_size):
                model.model(input_ids=rows, past_key_values=self._cache, use_cache=True)

    @torch.inference_mode()
    def advance(self, count: int) -> None:
        """Adds `count` of the rows, computed densely, to the context."""
        rows = self._tokens[None, self._first : self._first + count]
        self._model.model(input_ids=rows, past_key_values=self._cache, use_cache=True)
        self._first += count

    @torch.inference_mode()
    def logits(self, policy: Policy, block_size: int) -> Tensor:
        """Float32 `[rows, vocabulary]` under a policy that is asked once for each layer."""
        try:
            with selecting(policy, block_size):
                rows = self._tokens[None, self._first :]
                return self._model(input_ids=rows, past_key_values=self._cache, use_cache=True).logits[0].float()
        finally:
            self._cache.crop(self._first - len(self._tokens))


@contextmanager
def selecting(policy: Policy | None, block_size: int) -> Iterator[None]:
    """A context that sets what models of `load_causal` attend to; without a policy, everything."""
    token = _policy.set(None if policy is None else (policy, block_size))
    try:
        yield
    finally:
        _policy.reset(token)


def load_causal(folder: Path, device: str = "cpu") -> Any:
    """A model in float32 on `device` whose attention obeys the policy."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=ATTENTION)
    return model.to(device).eval()


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query `[1, heads, rows, dim]`, key and value `[1, kv_heads, tokens, dim]` -> `[1, rows, heads, dim]`."""
    active = _policy.get()
    mask = attention_mask
    window = getattr(module, "sliding_window", None)
    if window is not None:  # computed as without a method
        return _in_window(query, key, value, window, scaling).transpose(1, 2), None
    if active is not None:
        policy, block_size = active
        rows, tokens = query.shape[2], key.shape[2]
        contexts = torch.arange(tokens - rows + 1, tokens + 1)
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        step = Step(module.layer_idx, query[0].transpose(0, 1), key[0].transpose(0, 1), contexts, scale, block_size)
        mask = torch.arange(tokens) < contexts[:, None]
        blocks = policy(step)
        if blocks is not None:
            mask = mask & blocks.repeat_interleave(block_size, dim=-1)[..., :tokens]
    # without a mask a single row sees every key, while torch's causal mask would show only the first
    causal = mask is None and query.shape[2] > 1
    return _attend(query, key, value, mask, scaling, causal).transpose(1, 2), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, causal: bool = False
) -> Tensor:
    """Returns `[1, heads, rows, dim]`. Query heads of a group are next to each other."""
    grouped = not query.is_cuda
    if not grouped:  # only the kernel that writes every score to memory takes groups in float32
        key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], 1) for one in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _in_window(query: Tensor, key: Tensor, value: Tensor, window: int, scaling: float | None) -> Tensor:
    """Returns `[1, heads, rows, dim]`, each row over the `window` newest tokens of its context, its own included.

    A window of rows is computed at a time: over all keys of 4,096 tokens, windows of 512 took half of a prompt's time.
    """
    rows, tokens = query.shape[2], key.shape[2]
    found = []
    for begin in range(tokens - rows, tokens, window):
        end, start = min(tokens, begin + window), max(0, begin - window + 1)
        row, column = torch.arange(begin, end)[:, None], torch.arange(start, end)
        few, part = slice(begin - tokens + rows, end - tokens + rows), slice(start, end)
        mask = (column <= row) & (column > row - window)
        found.append(_attend(query[:, :, few], key[:, :, part], value[:, :, part], mask, scaling))
    return torch.cat(found, 2)
