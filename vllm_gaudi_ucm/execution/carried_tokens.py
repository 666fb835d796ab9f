"""Tokens that a step hands to the next one on the device, which is planned before the host knows them."""

from __future__ import annotations

import torch


class CarriedTokens:
    """The last sampled tokens, by slot of the sampler, in memory that captured graphs read.

    Written behind a step's sampling and read in the next step's forward: both are queued on one stream, in this order.

    Args:
        max_num_seqs: most slots.
        device: where tokens are sampled.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def put(self, tokens: torch.Tensor) -> None:
        """tokens: [at most max_num_seqs] of an integer type, one for each slot."""
        self.tokens[: len(tokens)].copy_(tokens)

    def fill_in(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input ids of a step: int64 [rows], where -1 - s stands for the token of slot s. A new tensor."""
        is_known = token_ids >= 0
        return torch.where(is_known, token_ids, self.tokens[(-1 - token_ids).clamp(min=0)])
