"""Plans a model that pools: it has no graphs for logits; an encoder has no KV cache, and whole prompts in a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ENCODERS = ("bert", "camembert", "modernbert", "roberta", "xlm-roberta")
"""Families whose rows see a prompt in both directions."""
_AFTER_PADDING = ("camembert", "roberta", "xlm-roberta")
"""Families whose positions begin after the id of the padding token."""
RUNNERS = ("auto", "generate", "pooling")


@dataclass(frozen=True)
class PoolingPlan:
    """Says how a model answers.

    pools: it yields embeddings, scores or classes instead of tokens, so it has no graphs for logits.
    is_encoder: it has no KV cache, and a step holds whole prompts.
    longest: tokens of its longest prompt; None if its configuration does not say.
    """

    pools: bool = False
    is_encoder: bool = False
    longest: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], runner: str) -> PoolingPlan:
        """Returns the plan of a model.

        config: its config.json. runner: as vLLM's `--runner`.

        Raises:
            ValueError: an encoder is asked for tokens.
        """
        family = config.get("model_type")
        is_encoder = family in ENCODERS or config.get("is_causal") is False
        if is_encoder and runner == "generate":
            raise ValueError(
                f"--runner is 'generate', but a model of the family {family} yields no tokens; leave it out"
            )
        if not is_encoder:
            return cls(pools=runner == "pooling")
        longest = config.get("max_position_embeddings")
        if not isinstance(longest, int) or longest < 1:
            return cls(pools=True, is_encoder=True)
        skipped = int(config.get("pad_token_id") or 0) + 1 if family in _AFTER_PADDING else 0
        return cls(pools=True, is_encoder=True, longest=max(1, longest - skipped))

    def check(self, num_blocks: int | None, mix: str | None) -> None:
        """Raises ValueError for options that do not go with the model."""
        if self.pools and mix is not None:
            raise ValueError(
                f"--mix is {mix!r}, whose requests decode, but a model that pools only reads prompts; leave it out, or "
                "give --log with a phase log of its server"
            )
        if self.is_encoder and num_blocks not in (None, 1):
            raise ValueError(f"--num-blocks is {num_blocks}, expected none: an encoder has no KV cache; leave it out")

    def limits(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the limits of a server without options. known: of a decoder."""
        if not self.is_encoder:
            return dict(known)
        longest = min(known["max_model_len"], self.longest or known["max_model_len"])
        tokens = max(known["max_num_batched_tokens"], longest)
        return {**known, "max_model_len": longest, "max_num_batched_tokens": tokens, "num_blocks": 1}
