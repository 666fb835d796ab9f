"""vLLM's methods of quantised weights, with our layers instead of those that need vLLM's CUDA kernels.

vLLM decides what a checkpoint's configuration means, and which layers it applies to. Registered by
`register_quantization_config`, before any configuration of an engine is made.
"""

from functools import cached_property
from typing import Any, cast

import torch
from torch import nn

from vllm_gaudi_ucm.envs import observed
from vllm_gaudi_ucm.layers.measured.config import UcmIncConfig
from vllm_gaudi_ucm.layers.quantised.experts import QuantisedExpertsMethod
from vllm_gaudi_ucm.layers.quantised.formats import (
    AwqFormat,
    GptqFormat,
    Mxfp4Format,
    PackedIntegers,
    ScaledFormat,
    WeightFormat,
)
from vllm_gaudi_ucm.layers.quantised.method import QuantisedLinearMethod
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.model import (
    Attention,
    AttentionLayerBase,
    LinearBase,
    ParallelLMHead,
    UnquantizedLinearMethod,
)
from vllm_gaudi_ucm.vllm_api.quantisation import (
    AutoAWQConfig,
    AutoGPTQConfig,
    BaseKVCacheMethod,
    CompressedTensorsConfig,
    Fp8Config,
    GptOssMxfp4Config,
    QuantizationConfig,
    QuantizeMethodBase,
    RoutedExperts,
    WeightsMapper,
    get_linear_quant_method,
    get_moe_quant_method,
    is_layer_skipped,
    register_quantization_config,
)

_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_ASKED_BY = "the model's quantization_config"


def _check_layer(layer: nn.Module, method: str) -> None:
    """Refuses layers whose weights would be read wrongly.

    Raises UnsupportedFeatureError.
    """
    if isinstance(layer, ParallelLMHead):
        raise UnsupportedFeatureError(
            f"a quantised output head ({method}); leave `lm_head` out when you quantise", _ASKED_BY
        )


def _linear_method(form: WeightFormat, prefix: str) -> QuantisedLinearMethod:
    # latent attention turns this matrix into two
    return QuantisedLinearMethod(form, plain=prefix.endswith(".kv_b_proj"))


_TO_LATENTS = WeightsMapper(
    orig_to_new_suffix={f".attn.{name}_scale": f".mla_attn.mla_attn.{name}_scale" for name in ("q", "k", "v")}
)


class ScaleOfLatents:
    """Maps the scale of a cache of latents, which vLLM names for a layer that such a model does not have."""

    _has_latents = False

    def _of_latents(self) -> BaseKVCacheMethod:
        self._has_latents = True
        return BaseKVCacheMethod(cast(QuantizationConfig, self))

    def get_cache_scale_mapper(self) -> WeightsMapper:
        """Maps names in a checkpoint to names of parameters."""
        of_vllm: WeightsMapper = cast(Any, super()).get_cache_scale_mapper()
        return of_vllm | _TO_LATENTS if self._has_latents else of_vllm


class UcmFp8Config(ScaleOfLatents, Fp8Config):
    """`fp8`: e4m3 weights with a scale per matrix, or per block (DeepSeek).

    With `QUANT_CONFIG` linear layers are quantised anew, by measured ranges; experts keep their codes.
    """

    @cached_property
    def _measured(self) -> UcmIncConfig | None:
        return UcmIncConfig() if observed("QUANT_CONFIG") else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "UcmFp8Config":
        """Makes the method of a checkpoint. Raises QuantConfigError for measured ranges that cannot be used."""
        found = cast(UcmFp8Config, super().from_config(config))
        # files are read now, and not while a model is built
        _ = found._measured
        return found

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return _DTYPES

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        measured = self._measured
        if measured is not None and isinstance(layer, AttentionLayerBase):
            return measured.get_quant_method(layer, prefix)
        if isinstance(layer, Attention):
            return super().get_quant_method(layer, prefix)
        if isinstance(layer, AttentionLayerBase):
            return self._of_latents()
        is_linear = isinstance(layer, LinearBase)
        if not is_linear and not isinstance(layer, RoutedExperts):
            return None
        mode = self.ignored_layers_match_mode
        if is_layer_skipped(prefix, self.ignored_layers, self.packed_modules_mapping, match_mode=mode):
            return UnquantizedLinearMethod() if is_linear else None
        if isinstance(layer, RoutedExperts):
            if self.store_dtype is not None:
                raise UnsupportedFeatureError(f"experts of {self.store_dtype} in an fp8 checkpoint", _ASKED_BY)
            return QuantisedExpertsMethod(layer.moe_config, self._format())
        if measured is not None:
            return measured.of_linear(cast(LinearBase, layer), prefix, self._format())
        return _linear_method(self._format(), prefix)

    def _format(self) -> ScaledFormat:
        if self.weight_block_size is not None:
            rows, columns = self.weight_block_size
            return ScaledFormat(torch.float8_e4m3fn, "block", (rows, columns), scale="weight_scale_inv")
        return ScaledFormat(torch.float8_e4m3fn, "tensor", static_inputs=self.activation_scheme == "static")


class UcmCompressedTensorsConfig(ScaleOfLatents, CompressedTensorsConfig):
    """`compressed-tensors`: e4m3, int8, packed integers of 4 or 8 bits, and MXFP4."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, Attention):
            return super().get_quant_method(layer, prefix)
        if isinstance(layer, AttentionLayerBase):
            return self._of_latents()
        if self.transform_config is not None:
            raise UnsupportedFeatureError(
                "transforms of activations (`transform_config`); quantise without them", _ASKED_BY
            )
        if isinstance(layer, RoutedExperts):
            scheme = self._scheme_of_experts(layer, prefix)
            return None if scheme is None else QuantisedExpertsMethod(layer.moe_config, format_of_scheme(scheme))
        scheme = self.get_scheme_dict(layer, prefix)
        if scheme is None or scheme.get("weights") is None:
            # as in vLLM: None makes a layer that is not linear compute as usual
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        _check_layer(layer, "compressed-tensors")
        if not isinstance(layer, LinearBase):
            raise UnsupportedFeatureError(
                f"quantised weights of {type(layer).__name__} (compressed-tensors); quantise linear layers", _ASKED_BY
            )
        return _linear_method(format_of_scheme(scheme), prefix)

    def _scheme_of_experts(self, layer: Any, prefix: str) -> dict[str, Any] | None:
        """Returns the scheme of the experts' projections, listed as linear layers; None if they are not quantised."""
        self._add_fused_moe_to_target_scheme_map()
        names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        first, *others = (self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names)
        if any(other != first for other in others):
            raise UnsupportedFeatureError(f"projections of the experts {prefix} in different schemes", _ASKED_BY)
        return None if first is None or first.get("weights") is None else first


def format_of_scheme(scheme: dict[str, Any]) -> WeightFormat:
    """Returns how a compressed-tensors checkpoint stores weights.

    scheme: `weights`, `input_activations`, `output_activations` (QuantizationArgs or None) and `format` of a layer.
    Integer activations are rounded as the scheme specifies if a device has such products. Activations of 8-bit floats
    are not rounded: their products are at least as exact.

    Raises UnsupportedFeatureError for a scheme that is not supported.
    """
    weights, inputs = scheme["weights"], scheme.get("input_activations")
    kind, bits, strategy = _word(weights.type), weights.num_bits, _word(weights.strategy)
    layout, group = scheme.get("format"), weights.group_size
    if weights.dynamic or scheme.get("output_activations") is not None:
        raise _unread(scheme)
    if layout in ("float-quantized", "naive-quantized") and (kind, bits) == ("float", 8) and weights.symmetric:
        static = inputs is not None and not inputs.dynamic
        if strategy in ("tensor", "channel"):
            return ScaledFormat(torch.float8_e4m3fn, strategy, static_inputs=static)
        if strategy == "block":
            rows, columns = weights.block_structure
            return ScaledFormat(torch.float8_e4m3fn, strategy, (rows, columns))
    is_int8 = layout in ("int-quantized", "naive-quantized") and (kind, bits) == ("int", 8) and weights.symmetric
    if is_int8 and strategy in ("tensor", "channel"):
        if inputs is None:
            return ScaledFormat(torch.int8, strategy)
        of_inputs = _word(inputs.type), inputs.num_bits, _word(inputs.strategy)
        if of_inputs == ("int", 8, "token" if inputs.dynamic else "tensor"):
            static, zeros = not inputs.dynamic, not inputs.symmetric
            return ScaledFormat(torch.int8, strategy, static_inputs=static, zero_of_inputs=zeros, rounds_inputs=True)
    if layout == "pack-quantized" and kind == "int" and bits in (4, 8) and strategy in ("group", "channel"):
        size = group if strategy == "group" else None
        if inputs is None:
            return PackedIntegers(bits, size, weights.symmetric)
    if layout == "mxfp4-pack-quantized" and (kind, bits, group) == ("float", 4, 32):
        return Mxfp4Format()
    raise _unread(scheme)


def _word(value: str) -> str:
    """Returns the string of an enumeration member or a string: these configurations hold both."""
    return str.__str__(value)


def _unread(scheme: dict[str, Any]) -> UnsupportedFeatureError:
    weights, inputs = scheme["weights"], scheme.get("input_activations")
    found = f"{_word(weights.type)} weights of {weights.num_bits} bits per {_word(weights.strategy)}"
    with_inputs = "" if inputs is None else f" with activations of {inputs.num_bits} bits"
    return UnsupportedFeatureError(
        f"compressed-tensors {scheme.get('format')}, {found}{with_inputs}; quantise with the scheme FP8_DYNAMIC, "
        "FP8_BLOCK, W8A8, W4A16, W8A16 or MXFP4",
        _ASKED_BY,
    )


class UcmGPTQConfig(AutoGPTQConfig):
    """`gptq`: symmetric integers of 4 or 8 bits in groups. vLLM refuses activation reordering in groups."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return _DTYPES

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            found: Any = get_moe_quant_method(self, layer, prefix, _GptqChoice)
        else:
            found = get_linear_quant_method(self, layer, prefix, _GptqChoice)
        if not isinstance(found, _GptqChoice):
            return found  # vLLM's own, or None
        _check_layer(layer, "gptq")
        chosen = found.config
        form = GptqFormat(chosen.weight_bits, None if chosen.group_size == -1 else chosen.group_size)
        if isinstance(layer, RoutedExperts):
            return QuantisedExpertsMethod(layer.moe_config, form)
        return _linear_method(form, prefix)


class _GptqChoice:
    """The configuration of one layer, after vLLM has applied the checkpoint's rules."""

    def __init__(self, config: AutoGPTQConfig, experts: object = None) -> None:
        self.config = config


class UcmAWQConfig(AutoAWQConfig):
    """`awq`: integers of 4 bits in groups, each with its own zero."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return _DTYPES

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, ParallelLMHead) and self.lm_head_quantized:
            _check_layer(layer, "awq")
        is_linear = isinstance(layer, LinearBase)
        if not is_linear and not isinstance(layer, RoutedExperts):
            return None
        skipped = self.modules_to_not_convert
        if is_layer_skipped(prefix, skipped, self.packed_modules_mapping, match_mode="substring"):
            return UnquantizedLinearMethod() if is_linear else None
        form = AwqFormat(None if self.group_size == -1 else self.group_size, self.zero_point)
        if isinstance(layer, RoutedExperts):
            return QuantisedExpertsMethod(layer.moe_config, form)
        return _linear_method(form, prefix)


class UcmGptOssMxfp4Config(GptOssMxfp4Config):
    """`mxfp4` of gpt-oss: only experts, 4-bit floats with a power of two for every 32 inputs."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return _DTYPES

    def _make_moe_method(self, moe: Any) -> QuantisedExpertsMethod:
        return QuantisedExpertsMethod(moe, Mxfp4Format(codes="weight"), whole_groups=True)


METHODS: dict[str, type] = {
    "fp8": UcmFp8Config,
    "compressed-tensors": UcmCompressedTensorsConfig,
    **dict.fromkeys(("gptq", "gptq_marlin", "auto_gptq"), UcmGPTQConfig),
    "gpt_oss_mxfp4": UcmGptOssMxfp4Config,
    "inc": UcmIncConfig,
    **dict.fromkeys(("awq", "awq_marlin", "auto_awq"), UcmAWQConfig),
}
"""Methods by vLLM's names; several names stand for one format."""


def register_quantisation() -> None:
    """Registers the methods with vLLM. Safe to call more than once."""
    for name, config in METHODS.items():
        register_quantization_config(name)(config)
