"""Methods of quantised weights: `vllm.model_executor.layers.quantization`, and the parameters that load shards.

Extension point: `register_quantization_config`, by which a platform replaces a method; `QuantizationConfig`,
`QuantizeMethodBase` and `LinearMethodBase`; `register_weight_loader_v2_supported_method`.
Internal: `AutoAWQConfig`, `AutoGPTQConfig`, `CompressedTensorsConfig`, `Fp8Config` and `GptOssMxfp4Config`, which read
a checkpoint's configuration; `get_linear_quant_method`, `get_moe_quant_method` and `is_layer_skipped`, which tell which
layers are quantised; `RoutedExperts`, and `set_weight_attrs`, by which its loader knows what a parameter is; the
parameters `BlockQuantScaleParameter`, `ChannelQuantScaleParameter`, `GroupQuantScaleParameter`, `ModelWeightParameter`,
`PackedColumnParameter`, `PackedvLLMParameter` and `PerTensorScaleParameter`, which load a rank's part;
`validate_fp8_block_shape`; `BaseKVCacheMethod`, which loads scales of caches, and `WeightsMapper`, which renames them.
"""

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig, get_moe_quant_method
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.model_executor.layers.quantization.utils.fp8_utils import validate_fp8_block_shape
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_linear_quant_method
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.parameter import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)
from vllm.model_executor.utils import set_weight_attrs

__all__ = [
    "AutoAWQConfig",
    "AutoGPTQConfig",
    "BaseKVCacheMethod",
    "BlockQuantScaleParameter",
    "ChannelQuantScaleParameter",
    "CompressedTensorsConfig",
    "Fp8Config",
    "GptOssMxfp4Config",
    "GroupQuantScaleParameter",
    "LinearMethodBase",
    "ModelWeightParameter",
    "PackedColumnParameter",
    "PackedvLLMParameter",
    "PerTensorScaleParameter",
    "QuantizationConfig",
    "QuantizeMethodBase",
    "RoutedExperts",
    "WeightsMapper",
    "get_linear_quant_method",
    "get_moe_quant_method",
    "is_layer_skipped",
    "register_quantization_config",
    "register_weight_loader_v2_supported_method",
    "set_weight_attrs",
    "validate_fp8_block_shape",
]
