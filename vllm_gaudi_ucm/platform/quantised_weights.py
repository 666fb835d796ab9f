"""The supported methods of quantised weights, by their names in vLLM's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.envs import observed
from vllm_gaudi_ucm.platform.feature import Feature

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

SERVED = frozenset(
    (
        *("fp8", "compressed-tensors", "gptq", "gptq_marlin", "auto_gptq", "awq", "awq_marlin", "auto_awq"),
        *("gpt_oss_mxfp4", "inc"),
    ),
)
"""Methods whose layers are in `layers/quantised/configs.py`. gpt-oss's `mxfp4` is vLLM's `gpt_oss_mxfp4`."""
_WHILE_LOADING = (
    "online",
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "int8_per_channel_weight_only",
    "nvfp4_per_token",
)


def measured_ranges(config: ModelConfig) -> str | None:
    """Returns the file with measured ranges that `QUANT_CONFIG` names, if the model is not served with them."""
    return observed("QUANT_CONFIG") if config.quantization not in ("inc", "fp8") else None


def take_measured_cache(config: VllmConfig) -> None:
    """Takes the vendor's name of an 8-bit KV cache with measured scales, whose numbers are like `fp8`."""
    model = config.model_config
    if config.cache_config.cache_dtype != "fp8_inc" or model is None:
        return
    if model.quantization == "inc" or (model.quantization == "fp8" and observed("QUANT_CONFIG")):
        config.cache_config.cache_dtype = "fp8"


def auto_round(config: ModelConfig) -> str | None:
    """Returns the format of a checkpoint by Intel's AutoRound, whose method vLLM calls `inc`, too."""
    found = config.model_arch_config.quantization_config
    return None if found is None or config.quantization not in ("inc", "auto-round") else found["quant_method"]


def quantised_while_loading(config: ModelConfig) -> str | None:
    """A method that makes quantised weights of plain ones."""
    found = config.quantization
    # the two whose checkpoints always say so themselves
    is_plain = found in ("fp8", "compressed-tensors") and config.model_arch_config.quantization_config is None
    asks = found in _WHILE_LOADING or is_plain or (found and config.quantization_config is not None)
    return found if asks else None


def other_method(config: ModelConfig) -> str | None:
    """A method that is neither served nor named by the functions above."""
    found = config.quantization
    known = found is None or found in SERVED or auto_round(config) or quantised_while_loading(config)
    return None if known else found


OF_WEIGHTS: tuple[Feature[ModelConfig], ...] = (
    Feature(
        "weights quantised by Intel's tools ({found})",
        "{model} or --quantization",
        "no layer here reads this format; export by AutoRound as `auto_gptq` or `auto_awq`, or quantise by "
        "llm-compressor; with --quantization inc a checkpoint has plain weights",
        auto_round,
    ),
    Feature(
        "weights that are quantised while they are loaded ({found})",
        "--quantization {found}",
        "layers take the numbers of a checkpoint; quantise it by llm-compressor",
        quantised_while_loading,
    ),
    Feature(
        "quantised weights ({found})",
        "{model} or --quantization",
        "`fp8`, `compressed-tensors`, `gptq`, `awq` and gpt-oss's `mxfp4` are read; quantise by llm-compressor, or "
        "take bfloat16",
        other_method,
    ),
)
"""Weights of models that are refused."""
