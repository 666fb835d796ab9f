"""Makes a request follow given tokens, whatever the model would choose; its logprobs still tell its choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm import SamplingParams

from vllm_gaudi_ucm.vllm_api.sampling import AnyRunnerLogitsProcessor, BatchUpdate, MoveDirectionality

if TYPE_CHECKING:
    from vllm.config import VllmConfig


FORCED = "forced_token_ids"
"""Key of `SamplingParams.extra_args`: the tokens, a list of int."""

# the tokens to follow, and the request's output so far, which the runner appends to
_Followed = tuple[list[int], list[int]]


class ForcedTokens(AnyRunnerLogitsProcessor):
    """A logits processor of vLLM; requests without the key, and tokens beyond the given ones, are left alone."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._slots: dict[int, _Followed] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError for anything but a list of int."""
        tokens = (sampling_params.extra_args or {}).get(FORCED, [])
        if not (isinstance(tokens, list) and all(isinstance(token, int) for token in tokens)):
            raise ValueError(f"extra_args[{FORCED!r}]: found {type(tokens).__name__}, expected a list of token ids")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the requests from slot to slot; vLLM's order is removed, added, moved."""
        if batch_update is None:
            return
        for slot in batch_update.removed:
            self._slots.pop(slot, None)
        for slot, params, _, output_token_ids in batch_update.added:
            self._put(slot, ((params.extra_args or {}).get(FORCED, []), output_token_ids))
        for source, target, direction in batch_update.moved:
            first, second = self._slots.pop(source, None), self._slots.pop(target, None)
            self._put(target, first)
            if direction == MoveDirectionality.SWAP:
                self._put(source, second)

    def _put(self, slot: int, followed: _Followed | None) -> None:
        self._slots.pop(slot, None)
        if followed is not None and followed[0]:
            self._slots[slot] = followed

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: float32 [slots, vocabulary]; changed in place."""
        for slot, (tokens, output_token_ids) in self._slots.items():
            if len(output_token_ids) < len(tokens):
                logits[slot] = -torch.inf
                logits[slot, tokens[len(output_token_ids)]] = 0.0
        return logits
