"""The section `ucm.graphs`: buckets, captured graphs, their warm-up, and the options of bucket strategies."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import Field, SerializeAsAny, ValidationInfo, create_model, field_validator

from vllm_gaudi_ucm.developer_tools import DISTRIBUTION, is_installed
from vllm_gaudi_ucm.graphs.strategies import STRATEGIES
from vllm_gaudi_ucm.options.errors import WORDS, Problem, UcmConfigError, shown
from vllm_gaudi_ucm.options.section import Section
from vllm_gaudi_ucm.options.values import NameOf

if TYPE_CHECKING:
    from vllm_gaudi_ucm.graphs.strategies.base import BucketStrategy

STRATEGY_OPTIONS = "ucm.graphs.strategy_options"
# values of options that need the package of tools
OF_THE_TOOLS = {"strategy": ("trace",), "recipe_check": ("count", "fail")}


class GraphsConfig(Section):
    """Static shapes: buckets, captured graphs and their warm-up."""

    mode: Literal["auto", "off", "eager", "capture", "compile"] = Field(
        default="auto",
        description="How a step runs. `off`: at its true shape. `eager`: padded to a bucket, operator by operator. "
        "`capture`: buckets as HPU graphs or CUDA graphs. `compile`: buckets through torch.compile. `auto`: on Gaudi "
        "`compile`, or `capture` in lazy mode (`PT_HPU_LAZY_MODE=1`); `capture` on CUDA; `off` on a CPU.",
    )
    backend: Literal["inductor", "aot_eager", "eager"] = Field(
        default="inductor", description="torch.compile's backend on CUDA and on a CPU; Gaudi has its own."
    )
    skip_guards: bool = Field(
        default=True, description="On Gaudi, once all is warm: skip torch.compile's checks that tell no buckets apart."
    )
    strategy: Annotated[str, NameOf(STRATEGIES, "auto")] = Field(
        default="auto",
        description="How buckets are chosen. `auto`: `file` where `buckets` is set, `trace` where `trace` is, else "
        "`padding_aware`.",
    )
    strategy_options: SerializeAsAny[Section] = Field(
        default=Section(),
        json_schema_extra={WORDS: "mapping with the options of the strategy"},
        description="Options of the strategy, for one that has any.",
    )
    buckets: Path | None = Field(default=None, strict=False, description="Bucket file, as `gaudi-ucm tune` writes it.")
    trace: Path | None = Field(
        default=None,
        strict=False,
        description="Phase log of earlier traffic: buckets in frequent use are warmed first, and strategy `trace` "
        "tunes the buckets to it, which needs the package `vllm-gaudi-ucm-tools`.",
    )
    max_graphs: Annotated[int, Field(ge=2, le=4096)] = Field(
        default=64, description="Most graphs: forward, logits, and those for prompt remainders."
    )
    max_shared_blocks: Annotated[int, Field(ge=1, le=2147483647)] | None = Field(
        default=None,
        description="Distinct shared blocks of the largest bucket; a step with more runs in several parts. Without it "
        "twice the blocks of the longest request, or what `step_memory` allows; on a GPU all that requests can use.",
    )
    step_memory: Annotated[float, Field(gt=0)] = Field(
        default=8.0,
        description="On Gaudi: most GiB that attention of a step may take, modelled. Larger steps are divided: by "
        "fewer shared blocks, then by fewer tokens (`--max-num-batched-tokens` is lowered).",
    )
    warm_up: Literal["idle", "full", "skeleton"] = Field(
        default="idle",
        description="`idle` serves once the skeleton is warm and warms the rest while there is nothing to do; `full` "
        "warms everything before serving; `skeleton` stops there.",
    )
    skeleton: Annotated[int, Field(ge=1, le=64)] = Field(
        default=3, description="Forward buckets that are warm before serving starts."
    )
    memory_budget: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="GiB that captured graphs may take; buckets that do not fit are left out, the most wasteful first. "
        "Without it a tenth of the device's memory.",
    )
    recipe_check: Literal["off", "count", "fail"] = Field(
        default="off",
        description="Hash every operator stream as a device would compile it: `count` logs and counts those first seen "
        "after warm-up, `fail` raises. For finding them without a Gaudi; costs time in every operator, and needs the "
        "package `vllm-gaudi-ucm-tools`.",
    )
    recipe_cache: Path | None = Field(
        default=None, strict=False, description="Folder where recipes stay for the next start: Gaudi's, or inductor's."
    )

    @field_validator("strategy", "recipe_check", mode="before")
    @classmethod
    def _of_the_tools(cls, value: Any, info: ValidationInfo) -> Any:
        if value in OF_THE_TOOLS.get(info.field_name or "", ()):
            _check_tools(f"ucm.graphs.{info.field_name}", value, "another value")
        return value

    @field_validator("trace")
    @classmethod
    def _tuned_by_the_tools(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("strategy") == "auto" and info.data.get("buckets") is None:
            _check_tools("ucm.graphs.trace", str(value), "`strategy` or `buckets` as well")
        return value

    @field_validator("strategy_options", mode="before")
    @classmethod
    def _options_of_the_strategy(cls, value: Any, info: ValidationInfo) -> Section:
        strategy, key = info.data.get("strategy"), STRATEGY_OPTIONS
        if strategy is None:  # an unknown strategy, which has been reported already
            return Section()
        options = strategy_section(strategy)
        if value and options is Section:
            raise UcmConfigError([Problem(key, shown(value), f"none: the strategy {strategy!r} has no options")])
        return options.resolve(value, key)


def _check_tools(key: str, value: object, instead: str) -> None:
    """Raises UcmConfigError if the package of tools is missing."""
    if not is_installed():
        expected = f"{instead}, or the package {DISTRIBUTION}: pip install 'vllm-gaudi-ucm[tools]'"
        raise UcmConfigError([Problem(key, shown(value), expected)])


@cache
def _section_of(strategy: type[BucketStrategy]) -> type[Section]:
    types = get_type_hints(strategy, include_extras=True)
    options: dict[str, Any] = {
        option.name: (types[option.name], Field(default=option.default, description=option.metadata.get("description")))
        for option in dataclasses.fields(strategy)
    }
    return create_model(strategy.__name__, __base__=Section, **options) if options else Section


def strategy_section(name: str) -> type[Section]:
    """Returns the options of a bucket strategy as a section, empty for `auto` and for strategies without any."""
    return Section if name == "auto" else _section_of(STRATEGIES.get(name))
