"""Specifies what an expert computes between its two products, and the form of its weights; standard library only."""

import math
from dataclasses import dataclass, fields
from typing import Literal

Form = Literal["silu", "gelu", "gelu_tanh"]
"""The gate function: x sigmoid(alpha x); x times the normal distribution's cumulative function; or its tanh form."""

PLAIN = "plain"
"""Weights as they are: one float tensor for all experts of each product."""
CODES = "codes"
"""Weights as a quantised checkpoint holds them: codes of 4 or 8 bits, with scales."""

# As in vLLM's own kernels, keeps a sum of sigmoids from being zero.
TINY = 1e-20


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """The specification of a layer's experts; hashable.

    form: how a gate enters.
    interleaved: gate and up alternate row by row in the first product; otherwise all gates come first.
    alpha, beta: only for the form silu: (up + beta) * gate * sigmoid(alpha * gate). gpt-oss has 1.702 and 1.
    limit: only for the form silu: the gate is first clamped to at most the limit, and up to plus and minus the limit.
    bias: both products add one.
    weights: the form of the weights. Implementations that read forms other than `PLAIN` declare it in `supports`.
    """

    form: Form = "silu"
    interleaved: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    bias: bool = False
    weights: str = PLAIN

    def __post_init__(self) -> None:
        if self.form not in ("silu", "gelu", "gelu_tanh"):
            raise ValueError(f"MoeSpec: form is {self.form!r}, expected silu, gelu or gelu_tanh")
        if self.limit is not None and not (self.limit > 0 and math.isfinite(self.limit)):
            raise ValueError(f"MoeSpec: limit is {self.limit}, expected a positive number")
        if self.form != "silu" and (self.alpha, self.beta, self.limit) != (1.0, 0.0, None):
            raise ValueError(f"MoeSpec: alpha, beta and limit belong to the form silu, got {self}")

    @property
    def is_plain_gate(self) -> bool:
        """True if gates are `form` itself, and all of them come first."""
        return not self.interleaved and (self.alpha, self.beta, self.limit) == (1.0, 0.0, None)

    def __str__(self) -> str:
        """Describes the difference from SwiGLU experts with plain weights, for errors."""
        plain = MoeSpec()
        more = [
            f"{one.name}={value}"
            for one in fields(self)
            if (value := getattr(self, one.name)) != getattr(plain, one.name)
        ]
        return ", ".join(more) or "SwiGLU experts"
