"""Options of the sparse methods, by the seeds' names. Sources: seed 000 (GSA) 7.1, seed 002 (KVStar) 6.1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from vllm_gaudi_ucm.ops.block_selection.implementation import BLOCK_SELECTION
from vllm_gaudi_ucm.ops.registry import AUTO
from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.options.section import Section
from vllm_gaudi_ucm.options.values import NameOf


class MethodOptions(Section):
    """Base class of every method's options."""

    @property
    def selecting(self) -> MethodOptions:
        """Options of the method that selects: this one, or the one that it wraps."""
        return self

    def with_sections(self, section_of: Callable[[str, str], MethodOptions], key: str) -> MethodOptions:
        """Returns these options, completed by sections of other methods if the method wraps one.

        section_of: (method, key) -> its section. key: the key of all sections. Raises `UcmConfigError`.
        """
        return self


CODED = ("hash", "codes")
"""Summaries of sign codes."""


class BlockOptions(MethodOptions):
    """Options of every method that selects blocks by the scores of their summaries."""

    sparse_ratio: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.3,
        description="Part of the context's full blocks that is attended, sinks and local window included.",
    )
    local_window_sz: Annotated[int, Field(ge=1)] = Field(
        default=2, description="Newest full blocks that are always attended, in addition to the tail block."
    )
    init_window_sz: Annotated[int, Field(ge=0)] = Field(
        default=1, description="First blocks (sinks) that are always attended."
    )
    min_blocks: Annotated[int, Field(ge=1)] = Field(
        default=4, description="Least number of full blocks attended, sinks and local window included."
    )
    # Below 2048 tokens attention is a few per cent of a step, so a selection costs quality and saves nothing.
    min_tokens: Annotated[int, Field(ge=1)] = Field(
        default=2048, description="Shortest context that is sparse, in tokens; below it a request is dense."
    )
    prompt_ratio: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Part of the full blocks before a prompt's chunk that its rows attend to, sinks and local window "
        "included; None: prompts are dense.",
    )
    prompt_tile: Annotated[int, Field(ge=16)] = Field(
        default=256, description="Rows of a prompt that choose blocks together, with `prompt_ratio`."
    )
    summary: Literal["mean", "minmax", "box_mean", "hash", "codes"] = Field(
        # measured by attention mass at blocks of 16 to 128 tokens, no other summary came as close to the exact choice
        default="box_mean",
        description="What is kept of a full block's keys to score it: their mean, the smallest and largest value of "
        "each element, the keys farthest from the mean and the mean of the rest, or sign codes of these. `codes`: "
        "their mean, and a sign code for every key.",
    )
    summary_dtype: Literal["auto", "fp8"] = Field(
        default="auto",
        description="auto: summaries have the dtype of the cached keys; fp8: 8-bit floats (e4m3), which halve what is "
        "read to score blocks compared with 16-bit keys. Sign codes are bytes in any case, and refuse fp8.",
    )
    sparse_steps: Literal["auto", "always"] = Field(
        default="auto",
        description="auto: a step whose choices would cost more time than they save is dense; always: it is sparse.",
    )
    implementation: Annotated[str, NameOf(BLOCK_SELECTION, AUTO)] = Field(
        default=AUTO,
        description="Kernels that score and choose. `auto` takes the fastest for the device: `native`, `hpu` or "
        "`cuda`; `reference` runs everywhere, slower; `cuda_fused` is `cuda` in fewer launches.",
    )
    scores_over_ranks: Literal["all", "per_rank"] = Field(
        default="all",
        description="With tensor parallelism: choose by the scores of all heads, which takes an all-reduce in each "
        "layer that chooses, or on each rank by those of its own heads.",
    )

    @classmethod
    def resolve(cls, value: Any, key: str) -> Self:
        """Resolves options, see MethodOptions. Codes have no dtype to choose."""
        options = super().resolve(value, key)
        if options.is_coded and options.summary_dtype != "auto":
            wanted = f"auto with `summary: {options.summary}`, whose codes are bytes; or another summary"
            raise UcmConfigError([Problem(f"{key}.summary_dtype", repr(options.summary_dtype), wanted)])
        return options

    @property
    def is_coded(self) -> bool:
        """Returns whether summaries are sign codes."""
        return self.summary in CODED

    @property
    def narrow_summaries(self) -> bool:
        """Returns whether summaries are 8-bit floats whatever the dtype of the keys."""
        return self.summary_dtype == "fp8"

    def summary_itemsize(self, key_itemsize: int) -> int:
        """Returns the bytes of an element of a summary. key_itemsize: bytes of an element of the cached keys."""
        return 1 if self.is_coded or self.narrow_summaries else key_itemsize


SWITCH = "ucm_sparse"
_PREFIX = "ucm_"


def read_extra_args(extra_args: Mapping[str, Any] | None) -> bool:
    """Returns whether the request may be sparse, which is the default; keys without our prefix are ignored.

    Raises ValueError, with which the server answers the request.
    """
    if extra_args is None:
        return True
    for key in extra_args:
        if isinstance(key, str) and key.startswith(_PREFIX) and key != SWITCH:
            raise ValueError(f"extra_args[{key!r}]: found an unknown key, expected {SWITCH!r}; correct or remove it")
    switch = extra_args.get(SWITCH, True)
    # vLLM's server reads JSON's true and false in `vllm_xargs` as 1 and 0
    if not isinstance(switch, int) or switch not in (0, 1):
        raise ValueError(f"extra_args[{SWITCH!r}]: found {switch!r}, expected true or false")
    return bool(switch)
