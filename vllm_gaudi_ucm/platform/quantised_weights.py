"""The supported methods of quantised weights, by their names in vLLM's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.envs import observed

if TYPE_CHECKING:
    from vllm.config import ModelConfig

SERVED = frozenset(
    ("fp8", "compressed-tensors", "gptq", "gptq_marlin", "auto_gptq", "awq", "awq_marlin", "auto_awq", "gpt_oss_mxfp4"),
)
"""Methods whose layers are in `layers/quantised/configs.py`. gpt-oss's `mxfp4` is vLLM's `gpt_oss_mxfp4`."""
_CALIBRATED = ("inc", "auto-round")
_WHILE_LOADING = (
    "online",
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "int8_per_channel_weight_only",
    "nvfp4_per_token",
)


def measured_ranges() -> str | None:
    """The file that Intel Neural Compressor is asked to read, by the variable that vllm-gaudi has for it."""
    return observed("QUANT_CONFIG")


def calibrated(config: ModelConfig) -> str | None:
    """A method of Intel's tools, whose layers vLLM computes by kernels that are not here."""
    return config.quantization if config.quantization in _CALIBRATED else None


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
    known = found is None or found in SERVED or calibrated(config) or quantised_while_loading(config)
    return None if known else found
