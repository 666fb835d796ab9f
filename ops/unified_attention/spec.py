"""What an attention layer computes, apart from which rows see which tokens: scale, sliding window, soft cap."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The specification of a layer; hashable. None means that the layer does not have the feature.

    scale: factor of query times key.
    sliding_window: a row at position p sees only positions above `p - sliding_window`, including itself. The operation
        applies it to the causal part. For cached blocks the maker of the parts applies it: it raises `lo` of the token
        ranges, and gives the shared part a row of ranges for each row of the batch. A selected part is impossible,
        because its ranges begin at 0.
    logits_soft_cap: scores become `cap * tanh(score / cap)` before masking.
    """

    scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"AttentionSpec: sliding_window is {self.sliding_window}, expected at least 1 token")
        cap = self.logits_soft_cap
        if cap is not None and not (cap > 0 and math.isfinite(cap)):
            raise ValueError(f"AttentionSpec: logits_soft_cap is {cap}, expected a positive number")

    @property
    def is_plain(self) -> bool:
        """Whether it is the softmax of scaled scores and nothing else, which every implementation supports."""
        return self.sliding_window is None and self.logits_soft_cap is None

    def __str__(self) -> str:
        """The features beyond plain attention, for errors."""
        more = [f"{one.name}={value}" for one in fields(self)[1:] if (value := getattr(self, one.name)) is not None]
        return ", ".join(more) or "plain attention"
