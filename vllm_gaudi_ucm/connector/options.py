"""Options of the connector: `kv_connector_extra_config` of `--kv-transfer-config`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from vllm_gaudi_ucm.options.section import Section
from vllm_gaudi_ucm.prefetch.options import PrefetchOptions
from vllm_gaudi_ucm.store.options import StoreOptions, resolve_store_options

EXTRA_CONFIG = "kv_connector_extra_config"


class ConnectorOptions(Section):
    """Strict, immutable; made from a mapping by `ConnectorOptions.resolve(mapping, key)`."""

    store: StoreOptions = Field(description="Where blocks are kept, and its options: see docs/guides/stores.md.")
    prefetch: PrefetchOptions = Field(
        default=PrefetchOptions(), description="The engine that loads blocks: see docs/guides/prefetch.md."
    )
    load_deadline: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=10.0,
        description="Seconds that a request waits for its blocks; those that are late are computed instead.",
    )
    lookup_deadline: Annotated[float, Field(gt=0, le=60)] = Field(
        default=1.0, description="Seconds that a request waits for the store to say what it holds; then it is a miss."
    )
    load_failure: Literal["recompute", "fail"] = Field(
        default="recompute",
        description="What becomes of a request with blocks that could not be loaded. Takes the place of vLLM's "
        "kv_load_failure_policy, whose default would fail it.",
    )
    min_hit_blocks: Annotated[int, Field(ge=1)] = Field(
        default=1, description="Fewest blocks that are worth loading; with fewer hits the prompt is computed."
    )
    partial_loads: bool = Field(
        default=True,
        description="Under memory mode a stored prompt of which no more than a block of tokens is to be computed gets "
        "only the blocks that its first step is likely to choose; false loads all. Needs `load_failure` recompute.",
    )
    save: bool = Field(default=True, description="Keep new full blocks; false only reads what others have stored.")
    save_queue: Annotated[int, Field(ge=1, le=65536)] = Field(
        default=64,
        description="Most blocks in host memory on their way to the store; what comes while it is full is not stored.",
    )
    save_patience: Annotated[float, Field(ge=0, le=60)] | Literal["auto"] = Field(
        default="auto",
        description="Seconds that a block may wait for the engine to be idle before it is stored beside steps; 0: none "
        "waits. `auto`: 1 on a CPU, where it takes time from steps, else 0.",
    )
    save_workers: Annotated[int, Field(ge=1, le=64)] = Field(default=2, description="Threads that store blocks.")

    def patience(self, device_kind: str) -> float:
        """Seconds: `save_patience` on a device of this kind."""
        if self.save_patience == "auto":
            return 1.0 if device_kind == "cpu" else 0.0
        return self.save_patience

    @property
    def loads_partly(self) -> bool:
        """Whether loads may leave blocks in the store, where there is memory mode."""
        return self.partial_loads and self.load_failure == "recompute"

    @field_validator("store", mode="before")
    @classmethod
    def _resolve_store(cls, value: Any) -> Any:
        return resolve_store_options(value, f"{EXTRA_CONFIG}.store")
