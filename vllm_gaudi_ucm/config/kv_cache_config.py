"""`ucm.kv_cache`: which blocks of the KV cache requests get."""

from __future__ import annotations

from pydantic import Field

from vllm_gaudi_ucm.options.section import Section


class KvCacheConfig(Section):
    """Which blocks of the KV cache requests get."""

    partial_hits: bool = Field(
        default=False,
        description="Prefix caching to the token: a request takes the part of a block that agrees with its prompt, as "
        "a copy, where it would compute up to a block's tokens again. For parallel sampling, beam search and prompts "
        "with a common start.",
    )
