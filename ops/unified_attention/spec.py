"""Specifies what an attention layer computes, but for which rows see which tokens: scale, soft cap, sinks, slopes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The specification of a layer; hashable. None, or False, means that the layer does not have the feature.

    scale: factor of query times key.
    logits_soft_cap: scores become `cap * tanh(score / cap)` before masking.
    is_local: the layer has a sliding window, or chunks of local attention. The parts say what its rows see, in
        `CausalPart.first_rows`, `SharedPart.rise` and the ranges; they have no selected part.
    has_sinks: each head has a learned logit, which is one more term of the softmax's sum; see `PerHead`.
    has_slopes: scores get a bias by distance (ALiBi); see `PerHead`. The parts have `positions`.
    values_in_keys: the values are the first elements of the keys, as they lie in memory: `value_cache` is a view of
        `key_cache`, and `value` one of `key` (multi-head latent attention). It changes no result; an implementation
        reads them once.
    both_ways: rows see the new tokens of their request behind them, too (encoders). There are no cached blocks; the
        causal part says which rows belong together.
    reach: with `both_ways`, rows see tokens less than this far away, in either direction. None: all.
    """

    scale: float
    logits_soft_cap: float | None = None
    is_local: bool = False
    has_sinks: bool = False
    has_slopes: bool = False
    values_in_keys: bool = False
    both_ways: bool = False
    reach: int | None = None

    def __post_init__(self) -> None:
        cap = self.logits_soft_cap
        if cap is not None and not (cap > 0 and math.isfinite(cap)):
            raise ValueError(f"AttentionSpec: logits_soft_cap is {cap}, expected a positive number")
        if self.is_local and self.has_slopes:
            raise ValueError("AttentionSpec: found slopes and a window, expected one of them: ranges are of one kind")
        if self.both_ways and (self.is_local or self.has_slopes):
            raise ValueError("AttentionSpec: found both_ways with a window or slopes, expected `reach` alone")
        if self.reach is not None and not (self.both_ways and self.reach > 0):
            raise ValueError(f"AttentionSpec: reach is {self.reach}, expected a positive number, with both_ways")

    @property
    def is_plain(self) -> bool:
        """True if it is only the softmax of scaled scores, which every implementation supports."""
        return not self.both_ways and self._is_softmax

    @property
    def is_plain_encoder(self) -> bool:
        """True if rows see new tokens in both directions, and it is only the softmax of scaled scores."""
        return self.both_ways and self._is_softmax

    @property
    def _is_softmax(self) -> bool:
        return self.logits_soft_cap is None and not (self.is_local or self.has_sinks or self.has_slopes)

    def __str__(self) -> str:
        """Lists the features beyond plain attention, for errors."""
        return ", ".join(f"{one.name}={value}" for one in fields(self)[1:] if (value := getattr(self, one.name))) or (
            "plain attention"
        )


class PerHead(NamedTuple):
    """Values that a layer has learned, or was given, for each of its query heads: fp32 [heads], or None.

    sinks: the logit of a head that is added to the sum of every row's softmax, but has no value. It is neither scaled
        nor capped. A row that sees nothing else is zeros.
    slopes: the score of a token gets `-slope` times its distance from the row, in tokens, after a soft cap (ALiBi).
    """

    sinks: Tensor | None = None
    slopes: Tensor | None = None


NOTHING_PER_HEAD = PerHead()

PLAIN = AttentionSpec(1.0)
"""A layer of a decoder with nothing but the softmax of scaled scores."""
