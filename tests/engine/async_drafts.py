"""Helpers of `test_async_drafts.py` that other tests use, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.async_traffic import (
    MIX,
)

NUM_DRAFTS = 3


# vLLM takes no other beside drafts
DRAFTED = [index for index, (_, _, asked, _) in enumerate(MIX) if not asked.min_p and not asked.logit_bias]


ASKED = [MIX[index] for index in DRAFTED]


def drafted_by(model: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": NUM_DRAFTS}
