"""A quantised linear layer of a model: loaded in the checkpoint's format, then given the device's form."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.layers.quantised.formats import LayerPart, WeightFormat
from vllm_gaudi_ucm.ops.quantised_linear.api import Product, Target, choose_product, dequantise
from vllm_gaudi_ucm.vllm_api.model import UnquantizedLinearMethod
from vllm_gaudi_ucm.vllm_api.quantisation import LinearMethodBase, register_weight_loader_v2_supported_method

LARGEST, LARGEST_OF_GAUDI_2 = 448.0, 240.0


@register_weight_loader_v2_supported_method
class QuantisedLinearMethod(LinearMethodBase):
    """Loads a weight in a checkpoint's format.

    If the device has a product for it, the layer keeps its codes. Otherwise it becomes a layer of plain weights in the
    model's dtype, each element the exact value rounded once, which other code (packing on a CPU) treats like any other.
    """

    # by `process_weights_after_loading` itself: weights must be within a Gaudi 2's range before they move there
    requires_device_loading = False

    def __init__(self, form: WeightFormat, *, plain: bool = False) -> None:
        """Makes the method. plain: dequantise on every device, for code that reads the weight as a matrix."""
        self._form = form
        self.plain = plain
        self._product: Product | None = None
        self._device = torch.device("cpu")

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        load = cast(Callable[..., None], extra_weight_attrs["weight_loader"])
        part = LayerPart(output_partition_sizes, input_size_per_partition, input_size, output_size, load)
        cast(Any, layer).params_dtype = params_dtype
        # the loader makes layers on the model's device
        self._device = torch.empty(0).device
        with torch.device("cpu") if self._device.type == "hpu" else self._device:
            self._form.create(layer, part)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = self._form.read(layer)
        weight.check()
        of_rows = None if weight.rounding is None else weight.rounding.scale
        if bool(weight.scales.isnan().any()) or (of_rows is not None and bool(of_rows.isnan())):
            name = cast(Any, layer).prefix
            raise ValueError(f"{name}: scales of a quantised layer are missing in the checkpoint, or are not numbers")
        dtype = cast(torch.dtype, layer.params_dtype)
        target = Target(self._device.type, dtype, largest_e4m3(self._device.type))
        self._product = None if self.plain else choose_product(weight, target)
        if self._product is None:
            layer.weight = nn.Parameter(dequantise(weight, dtype).to(self._device), requires_grad=False)
            cast(Any, layer).quant_method = UnquantizedLinearMethod()
            return
        # as parameters of the layer: one compiled region serves all layers
        for name, tensor in self._product.pack(weight).items():
            setattr(layer, name, nn.Parameter(tensor.to(self._device), requires_grad=False))

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert self._product is not None, "weights are processed after loading"
        return self._product.multiply(x, layer, bias)


def largest_e4m3(device: str) -> float:
    """Returns the largest magnitude of an e4m3 on a device of this type."""
    return LARGEST_OF_GAUDI_2 if device == "hpu" and get_device(device).name() == "GAUDI2" else LARGEST
