"""Quantised experts of a model: loaded in the checkpoint's format, then kept as codes or dequantised."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from vllm_gaudi_ucm.layers.experts import ExpertForm, ExpertsMethod, checked_spec, moe_spec
from vllm_gaudi_ucm.layers.quantised.expert_formats import (
    NOT_LOADED,
    ONE,
    ExpertMatrix,
    ExpertSizes,
    Stacked,
    decode,
    kind_of,
    matrices,
    refined,
    stacked,
)
from vllm_gaudi_ucm.layers.quantised.formats import Mxfp4Format, WeightFormat
from vllm_gaudi_ucm.layers.quantised.method import largest_e4m3
from vllm_gaudi_ucm.ops.moe.api import are_codes_enough, prepare_coded_experts
from vllm_gaudi_ucm.ops.moe.codes import CodedExperts, ExpertCodes, ExpertPacker
from vllm_gaudi_ucm.ops.moe.spec import MoeSpec
from vllm_gaudi_ucm.ops.registry import has_folders
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.quantisation import RoutedExperts, set_weight_attrs

BIASES = ("w13_bias", "w2_bias")


class QuantisedExpertsMethod(ExpertsMethod):
    """Loads experts in a checkpoint's format, and keeps their codes, or gives the layer plain weights.

    Each plain element is the exact value in the model's dtype, rounded once. Code that computes them, or packs them on
    a CPU, treats them like any other weights.
    """

    # by `prepare` itself
    requires_device_loading = False
    quantised = True

    def __init__(self, moe: Any, form: WeightFormat, *, whole_groups: bool = False) -> None:
        """Makes the method. whole_groups: each rank gets whole groups of inputs, and the last one the rest."""
        super().__init__(moe)
        self._form = form
        self._whole_groups = whole_groups
        # vLLM's loaders read both of a method
        self.weight_scale_refine: tuple[int, int] | None = None
        self.weight_dtype = "gpt_oss_mxfp4" if whole_groups else ""
        self._device, self._dtype = torch.device("cpu"), torch.float32
        self._stacks: ExpertStacks | None = None
        self._codes: dict[str, ExpertCodes] = {}

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        hidden, inner = super().maybe_roundup_sizes(
            hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
        )
        if self._whole_groups and isinstance(self._form, Mxfp4Format):
            inner = -(-inner // self._form.group) * self._form.group
        return hidden, inner

    def create_weights(self, layer: Any, *arguments: Any, **named: Any) -> None:
        if checked_spec(layer).interleaved and not self._whole_groups:
            raise UnsupportedFeatureError(
                "quantised experts with alternating gates and ups in a format other than gpt-oss's `mxfp4`",
                f"the model's layer {layer.layer_name}",
            )
        parallel, whole = self.moe.moe_parallel_config, self.moe.intermediate_size
        inner, self._dtype = named["intermediate_size_per_partition"], named["params_dtype"]
        filled = min(max(whole - parallel.tp_rank * inner, 0), inner)
        sizes = ExpertSizes(named["hidden_size"], inner, whole, parallel.tp_size, filled)
        self._stacks = ExpertStacks(self._form, sizes)
        self.weight_scale_refine = self._stacks.refine
        # the loader makes layers on the model's device; a Gaudi 2 cannot hold all 8-bit floats
        self._device = torch.empty(0).device
        experts, load = named["num_experts"], named["weight_loader"]
        with torch.device("cpu") if self._device.type == "hpu" else self._device:
            self._stacks.create(layer, experts, load)
        # vLLM's loader drops biases without a parameter: a checkpoint may have some that its model lacks
        for name, matrix in zip(BIASES, self._stacks.matrices, strict=True):
            _register(layer, name, torch.zeros(experts, matrix.outputs, dtype=self._dtype), {"weight_loader": load})

    def process_weights_after_loading(self, layer: Any) -> None:
        """Takes the codes. `prepare`, which knows how steps are computed, decides their form."""
        assert self._stacks is not None, "weights are created before they are loaded"
        for matrix in self._stacks.matrices:
            self._codes[matrix.name] = self._stacks.read(layer, matrix)
        if not self.moe.has_bias:
            for name in BIASES:
                if bool(getattr(layer, name).data.any()):
                    raise ValueError(
                        f"{layer.layer_name}: the checkpoint has biases of experts, but its model has none"
                    )
                delattr(layer, name)
        self._complete(layer)

    def prepare(self, layer: Any, captured: bool, packed: bool, compact: bool, keep: ExpertForm) -> None:
        found = (getattr(layer, name, None) for name in BIASES)
        of_w13, of_w2 = (None if bias is None else bias.data for bias in found)
        weights = CodedExperts(self._codes.pop("w13"), self._codes.pop("w2"), self._dtype, of_w13, of_w2)
        spec = moe_spec(layer)
        if keep == "codes" and self._device.type == "hpu" and has_folders("hpu"):
            weights = _for_gaudi(weights, spec)
        stay = keep == "codes" or (keep == "auto" and are_codes_enough(weights, spec, captured=captured))
        if stay:
            there = weights._replace(w13=weights.w13.to(self._device), w2=weights.w2.to(self._device))
            self._register_codes(layer, there)
            self._experts = prepare_coded_experts(there, spec, captured=captured)
            return
        for name, codes in (("w13", weights.w13), ("w2", weights.w2)):
            plain = torch.empty(codes.shape, dtype=self._dtype, device=self._device)
            for expert in range(len(plain)):
                plain[expert] = codes.write_out(expert, self._dtype)
            layer.register_parameter(f"{name}_weight", nn.Parameter(plain, requires_grad=False))
        del weights, codes
        super().prepare(layer, captured, packed, compact, keep)

    def _register_codes(self, layer: nn.Module, weights: CodedExperts) -> None:
        """Registers codes as the layer's parameters, so that they count as memory of the model."""
        for name, codes in (("w13", weights.w13), ("w2", weights.w2)):
            parts = {"weight": codes.codes, "weight_scale": codes.scales, "weight_zeros": codes.zeros}
            for end, tensor in parts.items():
                if tensor is not None:
                    layer.register_parameter(f"{name}_{end}", nn.Parameter(tensor, requires_grad=False))


def _for_gaudi(weights: CodedExperts, spec: MoeSpec) -> CodedExperts:
    """Brings codes into the card's range.

    Raises UnsupportedFeatureError if the card has no product with them.
    """
    from vllm_gaudi_ucm.ops.moe.impl.hpu.experts import why_not_codes, within_range

    reason = why_not_codes(weights, spec)
    if reason is not None:
        raise UnsupportedFeatureError(
            f"`codes` of these experts on a Gaudi: {reason} (take `plain`)", "ucm.quantised_experts"
        )
    largest = largest_e4m3("hpu")
    w13, w2 = (within_range(codes, largest) for codes in (weights.w13, weights.w2))
    return weights._replace(w13=w13, w2=w2, largest=largest)


class ExpertStacks:
    """The parameters of a layer's quantised experts, from creation until they are read."""

    def __init__(self, form: WeightFormat, sizes: ExpertSizes) -> None:
        """Raises ValueError if ranks cannot divide elements that share one scale in the checkpoint."""
        self.form, self.refine = refined(form, sizes)
        self.matrices = matrices(sizes)
        self._parts = {matrix.name: list(stacked(self.form, matrix, self.refine)) for matrix in self.matrices}

    def create(self, layer: RoutedExperts, experts: int, load: Callable[..., object]) -> None:
        for matrix in self.matrices:
            for part in self._parts[matrix.name]:
                _register(layer, f"{matrix.name}_{part.name}", _padded(part, matrix, experts), _marks(part, load))

    def read(self, layer: RoutedExperts, matrix: ExpertMatrix) -> ExpertCodes:
        """Returns the loaded weights, and removes the parameters from the layer.

        Raises ValueError for scales that were not loaded.
        """
        loaded: dict[str, Tensor] = {}
        for part in self._parts[matrix.name]:
            name = f"{matrix.name}_{part.name}"
            if part.loaded:
                loaded[part.name] = cast(Tensor, getattr(layer, name)).data
                _check_loaded(loaded[part.name], part, f"{layer.layer_name}: {name}")
            delattr(layer, name)
        (experts,) = {len(tensor) for tensor in loaded.values()}
        packer = ExpertPacker(experts, kind_of(self.form))
        for expert in range(experts):
            weight = decode(self.form, matrix, {name: tensor[expert] for name, tensor in loaded.items()})
            weight.check()
            packer.add(expert, weight)
        return packer.finish()


def _padded(part: Stacked, matrix: ExpertMatrix, experts: int) -> Tensor:
    """Sets scales that no checkpoint fills to one; their codes are zeros."""
    found = part.empty(experts)
    sizes = matrix.sizes
    if sizes.filled < sizes.inner and part.scale:
        if matrix.halves == 2:
            found[:, 2 * sizes.filled :] = ONE
        else:
            found[:, :, found.shape[2] * sizes.filled // sizes.inner :] = ONE
    return found


def _register(layer: nn.Module, name: str, data: Tensor, marks: dict[str, Any]) -> None:
    parameter = nn.Parameter(data, requires_grad=False)
    set_weight_attrs(parameter, marks)
    layer.register_parameter(name, parameter)


def _marks(part: Stacked, load: Callable[..., object]) -> dict[str, Any]:
    """Returns the attributes of a parameter that vLLM's loader reads."""
    marks = {"weight_loader": load if part.loaded else _ignore, "is_transposed": part.inputs_first}
    return {**marks, "quant_method": part.scale} if part.scale else marks


def _ignore(*args: object, **options: object) -> bool:
    """Loads nothing, and reports success."""
    return True


def _check_loaded(tensor: Tensor, part: Stacked, name: str) -> None:
    """Raises ValueError if scales are missing in the checkpoint, or NaN."""
    if part.scale is None or tensor.dtype == torch.int32:
        return
    lacks = tensor == NOT_LOADED if tensor.dtype == torch.uint8 else tensor.isnan()
    if bool(lacks.any()):
        raise ValueError(f"{name}: scales of experts are missing in the checkpoint, or are not numbers")
