"""Refuses, when an engine starts, what reads block tables of requests and does not know of blocks that are away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.features import UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MODE = "with ucm.memory_mode"


def refuse_beside_memory_mode(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedFeatureError for a KV connector, and for a draft model, whose layers share the block tables."""
    speculation = vllm_config.speculative_config
    if vllm_config.kv_transfer_config is not None:
        raise UnsupportedFeatureError(f"a KV connector {_MODE}", "--kv-transfer-config")
    if speculation is not None and speculation.method == "draft_model":
        raise UnsupportedFeatureError(f"a draft model {_MODE}", "--speculative-config")
