"""vLLM's method `inc`: layers quantised while they load, by ranges that Intel Neural Compressor (INC) measured.

`QUANT_CONFIG` names the configuration, as for the vendor's plugin. Linear layers and experts become 8-bit floats, rows
of linear layers are rounded by a measured scale, and a KV cache of 8-bit floats gets measured scales.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.envs import observed
from vllm_gaudi_ucm.layers.measured.measurements import LINEAR_KINDS, Measurements, Node, read_measurements
from vllm_gaudi_ucm.layers.measured.quant_config import QuantConfig, QuantConfigError, read_quant_config
from vllm_gaudi_ucm.layers.measured.scales import RANGES, CardRange, narrowing_of, quantise, row_scale
from vllm_gaudi_ucm.layers.quantised.experts import QuantisedExpertsMethod
from vllm_gaudi_ucm.layers.quantised.formats import PlainFormat, WeightFormat
from vllm_gaudi_ucm.layers.quantised.method import QuantisedLinearMethod
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.ops.quantised_linear.weight import QuantisedWeight
from vllm_gaudi_ucm.vllm_api.distributed import get_tp_group
from vllm_gaudi_ucm.vllm_api.model import Attention, AttentionLayerBase, LinearBase, UnquantizedLinearMethod
from vllm_gaudi_ucm.vllm_api.quantisation import (
    BaseKVCacheMethod,
    LinearMethodBase,
    QuantizationConfig,
    QuantizeMethodBase,
    RoutedExperts,
)

KV_CACHE, EXPERTS = "VLLMKVCache", "VllmMixtureOfExpertsOp"
"""Classes of the vendor's plugin that a configuration may name, for which vLLM has others here."""
# INC rounds maxima to bfloat16, and so by up to 2 ** -8 of themselves.
SAME_WEIGHT = 2.0**-7

logger = plugin_logger(__name__)


class Ranges(NamedTuple):
    """A configuration with its measurements; None if its method needs none."""

    config: QuantConfig
    measured: Measurements | None


def read_ranges() -> Ranges:
    """Reads the files that `QUANT_CONFIG` names. Raises QuantConfigError if they cannot be used."""
    path = observed("QUANT_CONFIG")
    if not path:
        raise QuantConfigError(
            "--quantization inc: the variable QUANT_CONFIG is not set; let it name maxabs_quant_<g2 or g3>.json of a "
            "calibration (`gaudi-ucm calibrate` makes one), or leave out --quantization"
        )
    config = read_quant_config(Path(path))
    if not config.method.needs_maxima:
        return Ranges(config, None)
    return Ranges(config, read_measurements(config))


class UcmIncConfig(QuantizationConfig):
    """`inc`: plain weights, quantised by measured ranges.

    AutoRound's checkpoints have the same name in vLLM. The platform refuses them after this object is made.
    """

    def __init__(self, ranges: Ranges | None = None, *, of_checkpoint: bool = False) -> None:
        """Makes the method from the files of `QUANT_CONFIG`, or from `ranges`."""
        super().__init__()
        self._ranges = None if of_checkpoint else ranges or read_ranges()
        self._left: set[str] = set()
        self._device: str | None = None

    def get_name(self) -> Any:
        return "inc"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Returns none: the configuration is not part of a checkpoint."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> UcmIncConfig:
        return cls(of_checkpoint=True)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Claims checkpoints of AutoRound, as vLLM's own method of this name does."""
        return "inc" if hf_quant_cfg.get("quant_method") == "auto-round" else None

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, Attention):
            return self._of_cache(layer.kv_cache_dtype, f"{prefix}.impl", ("k_cache", "v_cache"))
        if isinstance(layer, AttentionLayerBase):
            # the vendor's plugin has the layer of vLLM in this place, in a wrapper
            name = re.sub(r"\.attn$", ".mla_attn.mla_attn", prefix)
            return self._of_cache(cast(Any, layer).kv_cache_dtype, f"{name}.impl", ("latent_cache_k",))
        if isinstance(layer, RoutedExperts):
            return self._of_experts(layer, prefix)
        return self.of_linear(layer, prefix) if isinstance(layer, LinearBase) else None

    def of_linear(self, layer: LinearBase, prefix: str, stored: WeightFormat | None = None) -> LinearMethodBase:
        """Returns the method of a linear layer. stored: how the checkpoint has its weight; None: plainly."""
        ranges, kind = self._needed(), type(layer).__name__
        # latent attention turns this matrix into two, and multiplies none of its rows
        is_taken_apart = prefix.endswith(".kv_b_proj")
        if is_taken_apart or kind not in LINEAR_KINDS or not ranges.config.covers(prefix, kind):
            return _unchanged(stored, plain=is_taken_apart)
        node = self._node(prefix, "inputs")
        if ranges.measured is not None and node is None:
            return _unchanged(stored)
        rows = narrowing_of(self._scale(node or Node(), prefix), self._card)
        form = PlainFormat(torch.get_default_dtype(), partial(self._quantise, prefix, node, rows=rows), stored)
        return QuantisedLinearMethod(form)

    def _of_experts(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase | None:
        """Returns the method of experts, whose weights are quantised one by one; rows have no measured scales here."""
        ranges = self._needed()
        if not ranges.config.covers(f"{prefix}.moe_op", EXPERTS):
            return None
        if ranges.measured is not None and not any(name.startswith(f"{prefix}.") for name in ranges.measured.nodes):
            self._leave(f"{prefix}.moe_op")
            return None
        quantise_expert = partial(self._quantise, prefix, None, rows=None)
        return QuantisedExpertsMethod(layer.moe_config, PlainFormat(torch.get_default_dtype(), quantise_expert))

    def _of_cache(self, dtype: str, prefix: str, names: tuple[str, ...]) -> QuantizeMethodBase:
        """Returns the method that sets scales of keys and values. names: modules of the vendor's plugin."""
        ranges = self._needed()
        scales = []
        if dtype.startswith("fp8"):
            for name in (f"{prefix}.{end}" for end in names):
                if not ranges.config.covers(name, KV_CACHE):
                    raise QuantConfigError(
                        f"--kv-cache-dtype {dtype}: QUANT_CONFIG {ranges.config.path} leaves {name} out (blocklist or "
                        "allowlist), so it has no scale; take --kv-cache-dtype auto, or change the list"
                    )
                node = self._node(name, "inputs", needed=True)
                scales.append(self._scale(node or Node(), name))
        return MeasuredCacheMethod(self, scales)

    def _quantise(self, prefix: str, node: Node | None, weight: Tensor, *, rows: Any) -> QuantisedWeight:
        """Quantises a loaded weight. Raises QuantConfigError if another model's was measured."""
        ranges = self._needed()
        measured = ranges.measured
        if node is not None and node.weight is not None and measured is not None and measured.mode == "DynamicRange":
            largest = float(weight.abs().amax())
            # a rank of several may have a part without the largest number
            least = 0.0 if measured.ranks > 1 or get_tp_group().world_size > 1 else node.weight * (1 - SAME_WEIGHT)
            if not least <= largest <= node.weight * (1 + SAME_WEIGHT):
                raise QuantConfigError(
                    f"{prefix}: the largest weight was {node.weight:.6g} when {measured.files[0]} was measured, and is "
                    f"{largest:.6g} in this checkpoint; the measurements are of another model: calibrate this one "
                    "(`gaudi-ucm calibrate`), or correct QUANT_CONFIG"
                )
        return quantise(weight, ranges.config.method, self._card, rows)

    def _node(self, name: str, part: str, *, needed: bool = False) -> Node | None:
        """Returns what was measured of a module; None if it stays as it is, or if the method needs no measurements.

        Raises QuantConfigError for a module without measurements, unless the configuration skips it.
        """
        measured = self._needed().measured
        if measured is None:
            return None
        node = measured.nodes.get(name)
        if node is not None and getattr(node, part):
            return node
        self._leave(name, needed=needed)
        return None

    def _leave(self, name: str, *, needed: bool = False) -> None:
        """Notes that a module without measurements is not quantised, if the configuration allows it."""
        ranges = self._needed()
        assert ranges.measured is not None, "methods without measurements need none"
        if needed or not ranges.config.skips_unmeasured:
            raise QuantConfigError(
                f"{ranges.measured.files[0]}: found no measurement of {name} among {len(ranges.measured.nodes)} "
                "modules, expected one of each layer; calibrate this model (`gaudi-ucm calibrate`), or "
                + (
                    "take --kv-cache-dtype auto"
                    if needed
                    else "let the QUANT_CONFIG name the module in blocklist.names, or have ignore_modules_wo_measures"
                )
            )
        kind = re.sub(r"\d+", "*", name)
        if kind not in self._left:
            self._left.add(kind)
            logger.warning("Modules %s were not measured, and stay in the model's dtype", kind)

    def _scale(self, node: Node, name: str) -> float:
        """Returns the scale of a module's rows."""
        ranges = self._needed()
        config, card = ranges.config, self._card
        if ranges.measured is None or ranges.measured.mode == "DynamicRange":
            return row_scale(node.inputs[0] if node.inputs else 0.0, config.method, card)
        scale = node.inputs[0]
        if config.method.rows == "hardware":
            exponents = range(card.least, card.most + 1, card.step)
            if scale not in [2.0**exponent for exponent in exponents]:
                raise QuantConfigError(
                    f"{ranges.measured.files[0]}: Nodes.{name}.inputs: found the scale {scale:g}, expected 2 to the "
                    f"power of {card.least} to {card.most} in steps of {card.step}, of a {self._device}; the scales "
                    "are of another card: copy the measured maxima (inc_output_hooks_maxabs_<rank>_<world>.json), too"
                )
        if scale <= 0:
            raise QuantConfigError(
                f"{ranges.measured.files[0]}: Nodes.{name}.inputs: found the scale {scale:g}, expected more than 0; "
                "copy the measured maxima, too"
            )
        return scale

    def _needed(self) -> Ranges:
        assert self._ranges is not None, "the platform refuses checkpoints of AutoRound"
        return self._ranges

    @property
    def _card(self) -> CardRange:
        """Returns the range that scales have. Raises QuantConfigError for scales that this card does not take."""
        if self._device is None:
            self._device = _device_of_scales(self._needed().config)
        return RANGES[self._device]


def _device_of_scales(config: QuantConfig) -> str:
    """Chooses the card whose range scales have: the configuration's, or this machine's; Gaudi 3's on other devices."""
    if torch.empty(0).device.type != "hpu":
        return config.device or "GAUDI3"
    here = "GAUDI2" if get_device("hpu").name() == "GAUDI2" else "GAUDI3"
    if config.device in (None, here):
        return here
    if here == "GAUDI2" or config.method.name != "MAXABS_HW":
        config.refuse(
            "device_for_scales", config.device, f"{here} with {config.method.name.lower()}",
            "remove the key; measured maxima serve on both cards",
        )  # fmt: skip
    return "GAUDI2"


def _unchanged(stored: WeightFormat | None, *, plain: bool = False) -> LinearMethodBase:
    """Returns the method of a layer that is not quantised by measured ranges."""
    return UnquantizedLinearMethod() if stored is None else QuantisedLinearMethod(stored, plain=plain)


class MeasuredCacheMethod(BaseKVCacheMethod):
    """Sets measured scales of a KV cache of 8-bit floats, in place of a checkpoint's.

    Args:
        scales: of keys and values, or one for both; none: the cache is not quantised.
    """

    def __init__(self, config: QuantizationConfig, scales: list[float]) -> None:
        super().__init__(config)
        self._scales = scales

    def create_weights(self, layer: nn.Module) -> None:
        super().create_weights(layer)
        if self._scales:
            for name, scale in (("k_scale", self._scales[0]), ("v_scale", self._scales[-1])):
                cast(Tensor, getattr(layer, name)).data.fill_(scale)
