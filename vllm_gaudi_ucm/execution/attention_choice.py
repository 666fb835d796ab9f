"""The fastest way to compute a step's attention at its true shape, by the cost model fitted on this device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.ops.unified_attention.cost.layer_shape import LayerShape
from vllm_gaudi_ucm.ops.unified_attention.cost.model_file import (
    FITTED_DEVICES,
    Facts,
    ModelFileError,
    default_path,
    load_model,
)
from vllm_gaudi_ucm.ops.unified_attention.cost.passes import uses_of
from vllm_gaudi_ucm.ops.unified_attention.cost.way import Way, candidates, cheapest_way, reads_slice

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

    from vllm_gaudi_ucm.ops.unified_attention.cost.cost_model import CostModel
    from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts

logger = plugin_logger(__name__)

CostModelOption = Literal["auto", "off"] | Path


class AttentionChoice:
    """Chooses for one step after the other; results are the same in every way.

    Args:
        model: fitted on the device that steps run on.
        shape: the model's attention layers.
        block_size: tokens per cache block.
        implementations: to choose from, the one of the fixed rule first, which the model has to know; with one alone
            only whether shared groups are split, and how unique blocks are read, are chosen.
    """

    def __init__(self, model: CostModel, shape: LayerShape, block_size: int, implementations: tuple[str, ...]) -> None:
        self._model = model
        self._shape = shape
        self._block_size = block_size
        self._candidates = implementations
        self._key: tuple[object, ...] = ()
        self._way = Way(self._candidates[0])

    def way(self, parts: AttentionParts) -> Way:
        """The fastest way of these parts; with a selected part, which was not measured, no other implementation."""
        uses = uses_of(parts, self._block_size)
        key = (parts.selected is None, *uses.key())
        if key != self._key:  # predicting takes a tenth of a millisecond, and a decode's next step is mostly the same
            names = self._candidates if parts.selected is None else self._candidates[:1]
            self._key, self._way = key, cheapest_way(self._model, uses, self._shape, names)
        return self._way

    def reads_slice(self, slice_len: int, in_use: int) -> bool:
        """For the implementation of the step before: the next one's parts do not exist yet, and it rarely changes."""
        return reads_slice(self._model, self._way.implementation, self._shape, slice_len, in_use, self._block_size)


def find_model(option: CostModelOption, device: torch.device, threads: int | None = None) -> CostModel | None:
    """The model that `ucm.attention.cost_model` asks for; None: fixed rules. threads: None for torch's own.

    Raises ValueError for a file that the option names and that is not usable here; one in the cache is ignored with a
    warning.
    """
    if option == "off" or (option == "auto" and device.type not in FITTED_DEVICES):
        return None
    if device.type not in FITTED_DEVICES:
        raise ValueError(
            f"ucm.attention.cost_model: found {str(option)!r} with device {device.type}, where nothing is chosen; "
            'expected "auto" or "off"'
        )
    facts = Facts.of(device, threads)
    if isinstance(option, Path):
        try:
            return load_model(option, facts)
        except (ModelFileError, FileNotFoundError) as error:
            raise ValueError(
                f"ucm.attention.cost_model: {error}; `gaudi-ucm fit-attention -o FILE` writes one"
            ) from error
    try:
        path = default_path(facts)
        model = load_model(path, facts)
    except FileNotFoundError:
        on = f"{facts.device}, {facts.threads} threads" if facts.threads else facts.device
        logger.info("Attention is chosen by fixed rules: `gaudi-ucm fit-attention` was not run on %s", on)
        return None
    except (ModelFileError, RuntimeError) as error:  # RuntimeError: there is no home folder
        logger.warning("ucm.attention.cost_model: fixed rules instead of what was fitted: %s", error)
        return None
    logger.info("Attention is computed in the way that is the fastest by %s", path)
    return model


def make_choice(
    option: CostModelOption,
    implementation: str,
    device: torch.device,
    vllm_config: VllmConfig,
    spec: AttentionSpec,
    layers: int,
) -> AttentionChoice | None:
    """None where there is no model for the device, or none is wanted, or it knows nothing of the implementation."""
    model = find_model(option, device)
    names = candidates(device.type) if implementation == "auto" else (implementation,)
    if model is None or names[0] not in model.coefficients:
        return None
    heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
    dim = spec.head_size
    shape = LayerShape(heads, spec.num_kv_heads, dim, dim, spec.dtype.itemsize, layers)
    return AttentionChoice(model, shape, spec.block_size, names)
