"""Formats in which checkpoints store a linear layer's weight: the parameters that vLLM's loader fills, and how to
decode them.

A format makes parameters under the checkpoint's own names, for the part of the layer that a rank has, and reads them
when they are loaded. Scales are kept in float32, whatever the model's dtype is: they are never rounded. Experts load
other parameters (`expert_formats.py`) with the same meaning.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from vllm_gaudi_ucm.ops.quantised_linear.rounding import joined
from vllm_gaudi_ucm.ops.quantised_linear.weight import (
    QuantisedWeight,
    RowRounding,
    dequantise,
    scales_of_exponents,
    unpack_e2m1,
    unpack_integers,
)
from vllm_gaudi_ucm.vllm_api.quantisation import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
    validate_fp8_block_shape,
)


class LayerPart(NamedTuple):
    """A rank's part of a linear layer.

    outputs: the outputs of each matrix that is fused in it. inputs: the inputs of this rank. all_inputs, all_outputs:
        the sizes on all ranks. load: the function that fills a parameter.
    """

    outputs: Sequence[int]
    inputs: int
    all_inputs: int
    all_outputs: int
    load: Callable[..., None]

    @property
    def rows(self) -> int:
        return sum(self.outputs)

    def groups(self, size: int) -> int:
        """Groups of inputs with a scale of their own, in this part.

        Raises ValueError if a group would span two ranks.
        """
        if size == self.all_inputs:
            return 1
        if self.inputs % size:
            raise ValueError(
                f"a layer of {self.all_inputs} inputs has {self.inputs} on each rank, which is not a multiple of "
                f"the group size {size}; take fewer ranks (--tensor-parallel-size)"
            )
        return self.inputs // size


class WeightFormat(Protocol):
    """A format in which a checkpoint stores a weight."""

    def create(self, layer: nn.Module, part: LayerPart) -> None:
        """Registers the parameters that are loaded."""

    def read(self, layer: nn.Module) -> QuantisedWeight:
        """Returns the loaded weight, and removes the parameters from the layer."""

    def decode(self, parts: Mapping[str, Tensor]) -> QuantisedWeight:
        """Decodes the tensors of one weight, by the names of a linear layer's parameters."""


def _take(layer: nn.Module, name: str) -> Tensor:
    """Removes a loaded parameter from the layer, and returns it."""
    found = cast(Tensor, getattr(layer, name)).data
    delattr(layer, name)
    return found


def _matrix(part: LayerPart, dtype: torch.dtype, shape: tuple[int, int] | None = None) -> ModelWeightParameter:
    data = torch.empty(shape or (part.rows, part.inputs), dtype=dtype)
    return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=part.load)


def _unloaded(*shape: int) -> Tensor:
    """Returns scales that are NaN until they are loaded, so that missing ones are detected."""
    return torch.full(shape, torch.nan, dtype=torch.float32)


def _ignore(*args: object, **options: object) -> None:
    """Loads nothing."""


def _register_unread(layer: nn.Module, name: str) -> None:
    """Registers a parameter without elements for a tensor that the weight does not depend on.

    The checkpoint may have the tensor, which is not loaded, or lack it.
    """
    parameter = nn.Parameter(torch.empty(0), requires_grad=False)
    cast(Any, parameter).weight_loader = _ignore
    layer.register_parameter(name, parameter)


@dataclass(frozen=True)
class ScaledFormat:
    """Codes of 8 bits, one per element, with a scale for each matrix, each output, or each block.

    codes: e4m3 or int8. strategy: tensor, channel or block. block: outputs and inputs. scale: the parameter's name.
    static_inputs: whether the checkpoint has scales of activations, too. With 8-bit floats products read activations in
        the model's dtype or give each row its own scale; both are more exact, and these scales are not needed.
    zero_of_inputs: whether activations have zeros, which are in the checkpoint if they are static.
    rounds_inputs: whether activations are rounded to int8 before the product.
    """

    codes: torch.dtype
    strategy: str
    block: tuple[int, int] | None = None
    scale: str = "weight_scale"
    static_inputs: bool = False
    zero_of_inputs: bool = False
    rounds_inputs: bool = False

    def create(self, layer: nn.Module, part: LayerPart) -> None:
        layer.register_parameter("weight", _matrix(part, self.codes))
        layer.register_parameter(self.scale, self._scale(layer, part))
        if self.static_inputs:
            self._create_rounding(layer, part)
        # the widths of the matrices in a rank's part of a fused layer, which `read` needs
        cast(Any, layer).logical_widths = list(part.outputs)

    def _create_rounding(self, layer: nn.Module, part: LayerPart) -> None:
        """Registers scales and zeros of activations, a number for each matrix."""
        found = {"input_scale": _unloaded(len(part.outputs))}
        if self.zero_of_inputs:
            found["input_zero_point"] = torch.zeros(len(part.outputs), dtype=torch.int8)
        for name, data in found.items():
            if self.rounds_inputs:
                layer.register_parameter(name, PerTensorScaleParameter(data=data, weight_loader=part.load))
            else:
                _register_unread(layer, name)

    def _scale(self, layer: nn.Module, part: LayerPart) -> nn.Parameter:
        if self.strategy == "tensor":
            return PerTensorScaleParameter(data=_unloaded(len(part.outputs)), weight_loader=part.load)
        if self.strategy == "channel":
            return ChannelQuantScaleParameter(data=_unloaded(part.rows, 1), output_dim=0, weight_loader=part.load)
        assert self.block is not None, self.strategy
        sizes = list(self.block)
        validate_fp8_block_shape(layer, part.all_inputs, part.all_outputs, part.inputs, list(part.outputs), sizes)
        # vLLM's loader of fused layers reads it
        cast(Any, layer).weight_block_size = sizes
        shape = (-(-part.rows // self.block[0]), -(-part.inputs // self.block[1]))
        return BlockQuantScaleParameter(data=_unloaded(*shape), input_dim=1, output_dim=0, weight_loader=part.load)

    def read(self, layer: nn.Module) -> QuantisedWeight:
        codes, scale = _take(layer, "weight"), _take(layer, self.scale)
        rounding = self._rounding(layer)
        if self.strategy == "tensor":
            # every matrix of a fused layer keeps its own scale, as the scale of its outputs: no code changes
            widths = torch.tensor(cast(Any, layer).logical_widths, device=scale.device)
            scale = scale.repeat_interleave(widths).unsqueeze(1)
        return self.decode({"weight": codes, self.scale: scale})._replace(rounding=rounding)

    def _rounding(self, layer: nn.Module) -> RowRounding | None:
        """Returns how rows are rounded, and removes the loaded parameters."""
        scales = _take(layer, "input_scale") if self.static_inputs else None
        zeros = _take(layer, "input_zero_point") if self.static_inputs and self.zero_of_inputs else None
        if not self.rounds_inputs:
            return None
        return RowRounding(not self.zero_of_inputs) if scales is None else joined(scales, zeros)

    def decode(self, parts: Mapping[str, Tensor]) -> QuantisedWeight:
        """Decodes a weight. The scale of a whole matrix becomes one for each of its outputs."""
        codes = parts["weight"]
        block = (1, codes.shape[1]) if self.block is None else self.block
        return QuantisedWeight(codes, parts[self.scale], block)


@dataclass(frozen=True)
class PackedIntegers:
    """compressed-tensors `pack-quantized`: integers of 4 or 8 bits in int32 along the inputs, with groups of inputs.

    group: inputs that share a scale; None: all inputs of an output.
    symmetric: the middle of the range stands for zero; if not, each group has a zero of its own.
    """

    bits: int
    group: int | None
    symmetric: bool

    def create(self, layer: nn.Module, part: LayerPart) -> None:
        per_word = 32 // self.bits
        groups = part.groups(self.group or part.all_inputs)
        split: dict[str, Any] = {"input_dim": 1, "output_dim": 0, "weight_loader": part.load}
        words = torch.empty(part.rows, part.inputs // per_word, dtype=torch.int32)
        layer.register_parameter(
            "weight_packed", PackedvLLMParameter(data=words, packed_dim=1, packed_factor=per_word, **split)
        )
        scales = _unloaded(part.rows, groups)
        zeros = torch.zeros(part.rows // per_word, groups, dtype=torch.int32)
        packed: dict[str, Any] = {"data": zeros, "packed_dim": 0, "packed_factor": per_word}
        if self.group is None:
            del split["input_dim"]
            layer.register_parameter("weight_scale", ChannelQuantScaleParameter(data=scales, **split))
            zero: type[nn.Parameter] = PackedColumnParameter
        else:
            layer.register_parameter("weight_scale", GroupQuantScaleParameter(data=scales, **split))
            zero = PackedvLLMParameter
        if not self.symmetric:
            layer.register_parameter("weight_zero_point", cast(Any, zero)(**packed, **split))
        # the shape before packing, which adds no information
        _register_unread(layer, "weight_shape")

    def read(self, layer: nn.Module) -> QuantisedWeight:
        _take(layer, "weight_shape")
        names = ("weight_packed", "weight_scale", *(() if self.symmetric else ("weight_zero_point",)))
        return self.decode({name: _take(layer, name) for name in names})

    def decode(self, parts: Mapping[str, Tensor]) -> QuantisedWeight:
        codes = unpack_integers(parts["weight_packed"], self.bits, 1)
        zeros = None if self.symmetric else unpack_integers(parts["weight_zero_point"], self.bits, 0)
        return _integers(codes, parts["weight_scale"], self.group, zeros, self.bits)


def _integers(codes: Tensor, scales: Tensor, group: int | None, zeros: Tensor | None, bits: int) -> QuantisedWeight:
    """Unsigned codes; zeros None: the middle of the range."""
    block = (1, group or codes.shape[1])
    if zeros is None:
        zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8, device=codes.device)
    return QuantisedWeight(codes, scales.contiguous(), block, zeros.contiguous())


@dataclass(frozen=True)
class GptqFormat:
    """GPTQ, symmetric: `qweight` int32 [inputs / n, outputs], `scales` [groups, outputs]; `qzeros` hold the middle."""

    bits: int
    group: int | None

    def create(self, layer: nn.Module, part: LayerPart) -> None:
        per_word = 32 // self.bits
        groups = part.groups(self.group or part.all_inputs)
        split: dict[str, Any] = {"input_dim": 0, "output_dim": 1, "weight_loader": part.load}
        words = torch.empty(part.inputs // per_word, part.rows, dtype=torch.int32)
        layer.register_parameter(
            "qweight", PackedvLLMParameter(data=words, packed_dim=0, packed_factor=per_word, **split)
        )
        _register_unread(layer, "qzeros")
        if self.group is None:
            del split["input_dim"]
            layer.register_parameter("scales", ChannelQuantScaleParameter(data=_unloaded(groups, part.rows), **split))
        else:
            layer.register_parameter("scales", GroupQuantScaleParameter(data=_unloaded(groups, part.rows), **split))

    def read(self, layer: nn.Module) -> QuantisedWeight:
        _take(layer, "qzeros")
        return self.decode({name: _take(layer, name) for name in ("qweight", "scales")})

    def decode(self, parts: Mapping[str, Tensor]) -> QuantisedWeight:
        codes = unpack_integers(parts["qweight"], self.bits, 0).t().contiguous()
        return _integers(codes, parts["scales"].t(), self.group, None, self.bits)


# In an int32 of AWQ, the number at place i belongs to output AWQ_ORDER[i] of eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class AwqFormat:
    """AWQ, 4 bits: `qweight` int32 [inputs, outputs / 8], `qzeros` [groups, outputs / 8], `scales` [groups, outputs].

    has_zeros: if not, the middle of the range stands for zero.
    """

    group: int | None
    has_zeros: bool

    def create(self, layer: nn.Module, part: LayerPart) -> None:
        groups = part.groups(self.group or part.all_inputs)
        split: dict[str, Any] = {"input_dim": 0, "output_dim": 1, "weight_loader": part.load}
        packed: dict[str, Any] = {"packed_dim": 1, "packed_factor": 8, **split}
        words = torch.empty(part.inputs, part.rows // 8, dtype=torch.int32)
        layer.register_parameter("qweight", PackedvLLMParameter(data=words, **packed))
        zeros = torch.zeros(groups, part.rows // 8, dtype=torch.int32)
        scales = _unloaded(groups, part.rows)
        kinds: tuple[type[nn.Parameter], type[nn.Parameter]] = PackedvLLMParameter, GroupQuantScaleParameter
        if self.group is None:
            del split["input_dim"], packed["input_dim"]
            kinds = PackedColumnParameter, ChannelQuantScaleParameter
        if self.has_zeros:
            layer.register_parameter("qzeros", cast(Any, kinds[0])(data=zeros, **packed))
        else:
            _register_unread(layer, "qzeros")
        layer.register_parameter("scales", cast(Any, kinds[1])(data=scales, **split))

    def read(self, layer: nn.Module) -> QuantisedWeight:
        return self.decode({name: _take(layer, name) for name in ("qweight", "qzeros", "scales")})

    def decode(self, parts: Mapping[str, Tensor]) -> QuantisedWeight:
        codes = _in_order(parts["qweight"]).t().contiguous()
        zeros = _in_order(parts["qzeros"]).t() if self.has_zeros else None
        return _integers(codes, parts["scales"].t(), self.group, zeros, 4)


def _in_order(packed: Tensor) -> Tensor:
    """Unpacks [n, outputs] from AWQ's words [n, outputs / 8]."""
    places = torch.tensor(AWQ_ORDER, device=packed.device).argsort()
    return unpack_integers(packed, 4, 1).unflatten(1, (-1, 8)).index_select(2, places).flatten(1)


@dataclass(frozen=True)
class Mxfp4Format:
    """compressed-tensors `mxfp4-pack-quantized`: two 4-bit floats per byte, a power of two for every 32 inputs."""

    group: int = 32
    codes: str = "weight_packed"

    def create(self, layer: nn.Module, part: LayerPart) -> None:
        layer.register_parameter(self.codes, _matrix(part, torch.uint8, (part.rows, part.inputs // 2)))
        exponents = torch.full((part.rows, part.groups(self.group)), 255, dtype=torch.uint8)
        layer.register_parameter(
            "weight_scale",
            GroupQuantScaleParameter(data=exponents, input_dim=1, output_dim=0, weight_loader=part.load),
        )

    def read(self, layer: nn.Module) -> QuantisedWeight:
        return self.decode({name: _take(layer, name) for name in (self.codes, "weight_scale")})

    def decode(self, parts: Mapping[str, Tensor]) -> QuantisedWeight:
        scales = scales_of_exponents(parts["weight_scale"])
        return QuantisedWeight(unpack_e2m1(parts[self.codes]), scales, (1, self.group))


@dataclass(frozen=True)
class PlainFormat:
    """A plain weight, or one in another format, which is quantised once it is loaded.

    dtype: the dtype in which it is loaded, or written out. quantise: makes the codes of a weight [outputs, inputs].
    stored: the checkpoint's format; None: plain weights.
    """

    dtype: torch.dtype
    quantise: Callable[[Tensor], QuantisedWeight]
    stored: WeightFormat | None = None

    def create(self, layer: nn.Module, part: LayerPart) -> None:
        if self.stored is not None:
            self.stored.create(layer, part)
            return
        layer.register_parameter("weight", _matrix(part, self.dtype))

    def read(self, layer: nn.Module) -> QuantisedWeight:
        if self.stored is not None:
            return self.quantise(dequantise(self.stored.read(layer), self.dtype))
        return self.decode({"weight": _take(layer, "weight")})

    def decode(self, parts: Mapping[str, Tensor]) -> QuantisedWeight:
        return self.quantise(parts["weight"])
