"""Options of memory mode (`ucm.memory_mode`)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, SerializeAsAny, field_validator

from vllm_gaudi_ucm.options.errors import WORDS
from vllm_gaudi_ucm.options.section import Section
from vllm_gaudi_ucm.store.base import StoreOptions
from vllm_gaudi_ucm.store.factory import resolve_store_options

_STORE: dict[str, Any] = {WORDS: "store (docs/guides/stores.md) or null"}


class MemoryModeOptions(Section):
    """Strict, immutable, equal by value."""

    earlier_names: ClassVar[Mapping[str, str]] = {"resident_ratio": "on_device_ratio", "away_ratio": "offloaded_ratio"}

    enabled: bool = Field(
        default=False,
        description="Blocks of a decoding request that its method is not likely to choose leave the device, so that "
        "more requests fit. Needs a sparse method that chooses blocks.",
    )
    on_device_ratio: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5,
        description="Part of a context's full blocks that stays on the device, sinks and local window included; at "
        "least the method's `sparse_ratio`.",
    )
    refresh_steps: Annotated[int, Field(ge=1)] = Field(
        default=16,
        description="Decodes of a request after which all of its blocks, including offloaded ones, are scored again; "
        "at first sooner, after 1, 2, 4 ...",
    )
    max_missed: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.25,
        description="Share of a request's attention that is estimated to fall on offloaded blocks, when it is "
        "scored, above which all of its blocks come back and stay.",
    )
    moves_per_step: Annotated[int, Field(ge=1)] = Field(
        default=8, description="Most blocks that one step copies off the device, and most that it orders back."
    )
    history_decay: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.5, description="Weight of the scores so far against those of a refresh; 0 forgets them, 1 never."
    )
    offloaded_ratio: Annotated[float, Field(gt=0, le=64)] = Field(
        default=2.0,
        description="Most blocks that have a copy off the device, as a multiple of the blocks of the KV cache.",
    )
    store: SerializeAsAny[StoreOptions] | None = Field(
        default=None,
        description="Where the copies are. Without it host memory of the size that `offloaded_ratio` asks for.",
        json_schema_extra=_STORE,
    )

    @field_validator("store", mode="before")
    @classmethod
    def _store_by_kind(cls, value: Any) -> Any:
        return None if value is None else resolve_store_options(value, "ucm.memory_mode.store")

    def max_copies(self, num_blocks: int, block_bytes: int) -> int:
        """Returns how many blocks may have a copy, for a KV cache of `num_blocks` of `block_bytes` each.

        Blocks for which a store would evict others are never sent to it.
        """
        most = max(1, int(self.offloaded_ratio * num_blocks))
        capacity = None if self.store is None else self.store.most_bytes
        return most if capacity is None else min(most, capacity // block_bytes)

    @property
    def is_in_host_memory(self) -> bool:
        """True if copies are in this process, where they cannot be brought nearer to the device."""
        return self.store is None or self.store.ends_with_process

    def open_options(self, max_copies: int, block_bytes: int) -> StoreOptions:
        """The store to open."""
        if self.store is not None:
            return self.store
        return resolve_store_options({"kind": "memory", "capacity": max_copies * block_bytes})
