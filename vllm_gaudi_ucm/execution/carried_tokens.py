"""Tokens that a step passes to the next one on the device; the next one is planned before the host knows them."""

import torch


class CarriedTokens:
    """The last sampled tokens, by slot of the sampler, in memory that captured graphs read; in an engine with a draft
    model, its last drafts.

    They are written after the operators that choose them and read in the next forward: both are queued on one stream,
    in this order.

    Args:
        most: number of tokens of a step.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self.tokens = torch.zeros(most, dtype=torch.int64, device=device)

    def put(self, tokens: torch.Tensor, first: int = 0) -> None:
        """Stores tokens. tokens: [n] of an integer type, for slots first to first + n - 1."""
        self.tokens[first : first + len(tokens)].copy_(tokens)

    def fill_in(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns a step's input ids as a new tensor. token_ids: int64 [rows]; -1 - s stands for slot s's token."""
        is_known = token_ids >= 0
        return torch.where(is_known, token_ids, self.tokens[(-1 - token_ids).clamp(min=0)])
