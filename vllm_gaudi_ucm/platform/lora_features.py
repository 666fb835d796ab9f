"""Features that adapters (LoRA) refuse: options of `--enable-lora`, and what does not go with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.connector.transfer_config import OURS, connector_names
from vllm_gaudi_ucm.platform.feature import Feature, where
from vllm_gaudi_ucm.vllm_api.blocks import tells_clients_of_errors
from vllm_gaudi_ucm.vllm_api.platforms import is_pooling

if TYPE_CHECKING:
    from vllm.config import LoRAConfig, VllmConfig


def _option(name: str, flag: str, why: str, found: Callable[[LoRAConfig], object]) -> Feature[VllmConfig]:
    return Feature(name, flag, why, lambda c: c.lora_config is not None and found(c.lora_config))


def _other_connector(config: VllmConfig) -> str | None:
    if config.lora_config is None:
        return None
    return ", ".join(name for name in connector_names(config) if name != OURS) or None


def _latents(config: VllmConfig) -> bool:
    return config.lora_config is not None and config.model_config is not None and config.model_config.use_mla


OF_LORA: tuple[Feature[VllmConfig], ...] = (
    _option(
        "adapters (LoRA) whose matrices ranks share out",
        "--fully-sharded-loras",
        "each rank has the first matrices whole, which are small; leave the flag out",
        lambda c: c.fully_sharded_loras,
    ),
    _option(
        "graphs for each number of adapters",
        "--specialize-active-lora",
        "a graph serves any adapters; leave the flag out",
        lambda c: c.specialize_active_lora,
    ),
    _option(
        "adapters (LoRA) of experts",
        "--enable-mixed-moe-lora-format or --enable-moe-shared-loras",
        "only linear layers and embeddings take adapters; leave the flag out for adapters of attention",
        lambda c: c.enable_mixed_moe_lora_format or c.enable_moe_shared_loras,
    ),
    _option(
        "adapters (LoRA) of encoders and modalities",
        "--default-mm-loras or --enable-tower-connector-lora",
        "only the text model takes adapters; name the adapter in the request",
        lambda c: bool(c.default_mm_loras) or c.enable_tower_connector_lora,
    ),
    _option(
        "heads for classification in adapters (LoRA)",
        "--max-lora-cls-labels",
        "a step computes tokens; leave the flag out",
        lambda c: c.max_lora_cls_labels,
    ),
    Feature(
        "adapters (LoRA) with multi-head latent attention",
        "--enable-lora",
        "it multiplies by matrices that are made of the weights at start; merge the adapter into them",
        _latents,
    ),
    Feature(
        "adapters (LoRA) with a model that pools",
        "--enable-lora",
        "vLLM 0.32 would answer a request whose adapter cannot be loaded with an empty vector; take a newer vLLM, or "
        "merge the adapter into the weights",
        where(is_pooling, lambda c: c.lora_config is not None and not tells_clients_of_errors()),
    ),
    Feature(
        "the KV connector {found} with adapters (LoRA)",
        "--enable-lora with --kv-transfer-config or --kv-offloading-size",
        f"it would keep blocks of a request whose adapter is gone; take `{OURS}`",
        _other_connector,
    ),
)
