"""The table of mutually exclusive options: policies of the KV cache's blocks, other options, and vLLM's features.

Refusals at start and the matrix in docs/memory.md are made from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_gaudi_ucm.options.errors import Problem

if TYPE_CHECKING:
    from pydantic import BaseModel
    from vllm.config import VllmConfig


class Option(NamedTuple):
    """An option and how to tell whether it is switched on.

    Args:
        title: its name in docs.
        key: its place in the configuration.
        off: its values that switch it off.
        words: its name when something else is refused because of it.
        gives_orders: whether the scheduler's messages to workers carry orders or counts of it.
    """

    title: str
    key: str
    off: tuple[Any, ...]
    words: str
    gives_orders: bool = True

    def value(self, config: BaseModel) -> Any:
        """Returns the option's value in a whole configuration."""
        found: Any = config
        for name in self.key.split(".")[1:]:
            found = getattr(found, name)
        return found

    def is_on(self, config: BaseModel) -> bool:
        return self.value(config) not in self.off


PARTIAL_HITS = Option("partial hits", "ucm.kv_cache.partial_hits", (False,), "ucm.kv_cache.partial_hits")
SWAP = Option("swap", "ucm.preemption.mode", ("recompute",), "ucm.preemption.mode swap or auto")
ADMISSION = Option("admission", "ucm.scheduler.admission", ("greedy",), "ucm.scheduler.admission exact")
COMPACTION = Option("compaction", "ucm.kv_cache.compaction", (False,), "ucm.kv_cache.compaction")
TOKEN_SLOTS = Option(
    "slots for tokens",
    "ucm.kv_cache.granularity",
    ("block",),
    "ucm.kv_cache.granularity 'token'",
    gives_orders=False,
)
KEPT_STATES = Option("kept states", "ucm.kv_cache.kept_states", (0,), "ucm.kv_cache.kept_states")
POLICIES = (PARTIAL_HITS, SWAP, ADMISSION, COMPACTION, KEPT_STATES, TOKEN_SLOTS)
"""Options that decide which blocks requests get: the columns of the matrix."""

MEMORY_MODE = Option("memory mode", "ucm.memory_mode.enabled", (False,), "ucm.memory_mode")
SPARSE = Option("sparse methods", "ucm.ucm_sparse_method", (None,), "ucm.ucm_sparse_method")
CONTIGUOUS = Option(
    "contiguous reads", "ucm.attention.contiguous_pa", ("auto", False), "ucm.attention.contiguous_pa true"
)


def policies_give_orders(config: BaseModel) -> bool:
    """Returns whether a policy of this configuration makes the scheduler send orders that workers carry out."""
    return any(policy.gives_orders and policy.is_on(config) for policy in POLICIES)


class OptionExclusion(NamedTuple):
    """Two of our options that exclude each other.

    Args:
        refused: the option that the refusal names.
    """

    refused: Option
    excluded_by: Option
    why: str

    def problem(self, config: BaseModel) -> Problem | None:
        """Returns what to change in a configuration that has both; None if it does not have both."""
        if not (self.refused.is_on(config) and self.excluded_by.is_on(config)):
            return None
        off = " or ".join(map(_shown, self.refused.off))
        wanted = f"{off} with {self.excluded_by.words}: {self.why}"
        return Problem(self.refused.key, _shown(self.refused.value(config)), wanted)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value)


_BLOCKS_LEAVE = "blocks leave the device and come back"

OF_OPTIONS = (
    *(OptionExclusion(policy, MEMORY_MODE, _BLOCKS_LEAVE) for policy in POLICIES),
    OptionExclusion(SPARSE, TOKEN_SLOTS, "a sparse method chooses blocks, and there are none"),
    OptionExclusion(CONTIGUOUS, TOKEN_SLOTS, "rows share what attention reads as a block"),
    OptionExclusion(PARTIAL_HITS, TOKEN_SLOTS, "it shares prefixes to the token without copies"),
    OptionExclusion(COMPACTION, TOKEN_SLOTS, "each slot would be a move of its own"),
    OptionExclusion(SWAP, TOKEN_SLOTS, "each slot would be a copy of its own"),
    OptionExclusion(KEPT_STATES, TOKEN_SLOTS, "a request begins behind whole blocks"),
)


def excluded_options(config: BaseModel) -> Iterator[Problem]:
    """Yields the problem of every option in a whole configuration that another option excludes."""
    for exclusion in OF_OPTIONS:
        problem = exclusion.problem(config)
        if problem is not None:
            yield problem


class EngineExclusion(NamedTuple):
    """A policy, and a feature or flag of vLLM that it excludes or needs.

    Args:
        policy: our option.
        title: the row of the matrix in docs/memory.md; empty for a flag, which has none.
        name, asked_by, why, found: as in a row of `platform.features`.
    """

    policy: Option
    title: str
    name: str
    asked_by: str
    why: str
    found: Callable[[VllmConfig], object]


def _connector(config: VllmConfig) -> str | None:
    # vLLM sets the connector of --kv-offloading-size later
    if config.kv_transfer_config is not None and config.kv_transfer_config.kv_connector:
        return config.kv_transfer_config.kv_connector
    return "OffloadingConnector" if config.cache_config.kv_offloading_size is not None else None


_CONNECTORS, _CONNECTOR_FLAGS = "KV connectors", "--kv-transfer-config or --kv-offloading-size"

OF_ENGINE = (
    EngineExclusion(
        TOKEN_SLOTS,
        _CONNECTORS,
        f"the KV connector {{found}} with {TOKEN_SLOTS.words}",
        _CONNECTOR_FLAGS,
        "stores keep blocks",
        _connector,
    ),
    EngineExclusion(
        TOKEN_SLOTS,
        "",
        f"a number of blocks with {TOKEN_SLOTS.words}",
        "--num-gpu-blocks-override {found}",
        "there are no blocks; `ucm.kv_cache.max_total_token_num` counts slots",
        lambda c: c.cache_config.num_gpu_blocks_override,
    ),
    EngineExclusion(
        PARTIAL_HITS,
        "prefix cache",
        f"{PARTIAL_HITS.words} without a prefix cache",
        "--no-enable-prefix-caching",
        "nothing is kept that a request could hit",
        lambda c: not c.cache_config.enable_prefix_caching,
    ),
    EngineExclusion(
        KEPT_STATES,
        "prefix cache",
        f"{KEPT_STATES.words} without a prefix cache",
        "--no-enable-prefix-caching",
        "nothing is kept that a request could hit",
        lambda c: not c.cache_config.enable_prefix_caching,
    ),
    EngineExclusion(
        KEPT_STATES,
        _CONNECTORS,
        f"a KV connector with {KEPT_STATES.words} ({{found}})",
        _CONNECTOR_FLAGS,
        "it brings blocks without the state behind them",
        _connector,
    ),
    EngineExclusion(
        KEPT_STATES,
        "",
        f"{KEPT_STATES.words} with a model whose layers keep no state",
        "the model",
        "prefix caching needs blocks alone; leave the option out",
        lambda c: c.model_config is not None and not c.model_config.is_hybrid,
    ),
    EngineExclusion(
        SWAP,
        _CONNECTORS,
        f"a KV connector with {SWAP.words} ({{found}})",
        _CONNECTOR_FLAGS,
        "it decides which blocks a resumed request gets, too; with a store in host memory it has a copy of them",
        _connector,
    ),
    EngineExclusion(
        COMPACTION,
        _CONNECTORS,
        f"a KV connector with {COMPACTION.words} ({{found}})",
        _CONNECTOR_FLAGS,
        "it keeps ids of blocks that it reads and writes on its own",
        _connector,
    ),
)
