"""What one attention layer computes, beside who sees whom: scale, sliding window, soft cap."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Of a layer; hashable. None stands for "the layer has none".

    scale: factor of query times key.
    sliding_window: a row at position p sees positions above `p - sliding_window` only, itself included. The operation
        applies it to the causal part. Cached blocks show what a row sees by their token ranges: whoever makes the parts
        of such a layer raises `lo`, with a row of ranges for each row of the batch in the shared part. There is no
        selected part, whose ranges begin at 0.
    logits_soft_cap: scores become `cap * tanh(score / cap)` before they are masked.
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
        """Softmax of scaled scores, and nothing else: what every implementation computes."""
        return self.sliding_window is None and self.logits_soft_cap is None

    def __str__(self) -> str:
        """What goes beyond plain attention, for errors."""
        more = [f"{one.name}={value}" for one in fields(self)[1:] if (value := getattr(self, one.name)) is not None]
        return ", ".join(more) or "plain attention"
