"""`ucm.kv_cache`: which blocks of the KV cache requests get."""

from __future__ import annotations

from typing import Annotated, Literal

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
    granularity: Literal["block", "token"] = Field(
        default="block",
        description="What a request is given of the KV cache. `block`: blocks of `--block-size` tokens, the last one "
        "partly empty. `token`: a slot for each token, nothing rounded up; prefixes are shared to the token. More work "
        "for the scheduler. `--block-size` is then only what attention reads at once.",
    )
    max_total_token_num: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="With `granularity` `token`: slots of the KV cache, allocated at start. Without it as many as its "
        "memory holds.",
    )
    compaction: bool = Field(
        default=False,
        description="Requests get blocks that follow each other where there are any, and before a step a few blocks in "
        "use move down, at most a hundredth of the KV cache, so that attention goes on reading one slice of it "
        "(`ucm.attention.contiguous_pa`) after hours of arrivals and ends.",
    )

    @property
    def switches(self) -> dict[str, bool]:
        """By name; blocks that leave the device go with none of them."""
        return {"partial_hits": self.partial_hits, "compaction": self.compaction}
