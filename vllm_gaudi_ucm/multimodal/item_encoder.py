"""Computes embeddings of pictures by the model's encoder, and keeps them in the embedding table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.multimodal.embedding_table import EmbeddingTable
from vllm_gaudi_ucm.multimodal.padded_encoder import PaddedEmbeddings, PaddedEncoder
from vllm_gaudi_ucm.vllm_api.deepstack import num_levels
from vllm_gaudi_ucm.vllm_api.multimodal import (
    MULTIMODAL_REGISTRY,
    MultiModalBudget,
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    SupportsMultiModal,
    group_and_batch_mm_kwargs,
    sanity_check_mm_encoder_outputs,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.device import Device

    Inputs = tuple[str, MultiModalKwargsItem]
    """The modality of an item, and the tensors that its processor has made."""

logger = plugin_logger(__name__)

_ENCODER = "item_encoder"


class ItemEncoder:
    """Runs a model's encoder between steps, outside of their graphs.

    Args:
        model: reads pictures. Gets the embedding table.
        one_by_one: encode each item alone, so that shapes depend only on its size, and those of a warm-up are met
            again. Otherwise items are encoded together. On a Gaudi an encoder of patches or tiles then pads its
            pictures to few sizes.
    """

    def __init__(self, model: nn.Module, vllm_config: VllmConfig, device: Device, one_by_one: bool) -> None:
        config = vllm_config.model_config
        self._budget = MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY, enable_cache=False)
        # as many as vLLM's scheduler counts
        count = self._budget.encoder_cache_size
        width, dtype = (1 + num_levels(model)) * config.get_inputs_embeds_size(), cast(torch.dtype, config.dtype)
        self.table = EmbeddingTable(count, width, dtype, device.torch_device())
        logger.info("Up to %d embeddings of pictures are kept, %.1f MiB", count, self.table.values.nbytes / 2**20)
        self._model = cast(SupportsMultiModal, model)
        self._device = device
        self._one_by_one = one_by_one
        self._known_sizes: set[str] = set()
        self._new_sizes: list[str] = []
        pads = one_by_one and device.kind == "hpu"
        self._padded = PaddedEncoder.of(model, self.longest, device.torch_device(), pads=pads)
        if self._padded is not None and pads:
            logger.info("Pictures are padded to one of %s tokens", self._padded.sizes)
        # not a module
        vars(model)[_ENCODER] = self
        self.table.give_to(model)

    @property
    def longest(self) -> int:
        """Returns the embeddings of the largest item."""
        return max(self._budget.mm_max_toks_per_item.values(), default=1)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Encodes as many of the largest items as a step may have, or one at each padded size, and keeps none of their
        embeddings.
        """
        if self._padded is not None:
            # in lazy mode, what came before would be in the recipe of the first size
            self._device.end_recipe()
            for found in self._padded.warm_up():
                self.table.put("warm-up", *found)
                self.table.free("warm-up")
                self._device.end_recipe()
            return
        inputs = self._budget.get_dummy_encoder_profile_inputs(max_items_per_batch=1 if self._one_by_one else None)
        warmed = {f"warm-up {number}": one for number, one in enumerate(inputs)}
        self._device.end_recipe()
        for key, found in zip(warmed, self._found(warmed), strict=True):
            # the largest video alone may have more than the largest one with pictures, which vLLM's scheduler counts
            self.table.put(key, found.embeddings, min(found.own, self.table.num_free))
        self._device.end_recipe()
        for key in warmed:
            self.table.free(key)
        self._new_sizes.clear()

    @torch.inference_mode()
    def encode(self, items: Sequence[MultiModalFeatureSpec]) -> dict[str, Exception]:
        """Encodes items that the table lacks. Returns the errors of items that cannot be encoded, by `identifier`."""
        missing = {item.identifier: item for item in items if self.table.rows_of(item.identifier) is None}
        found: dict[str, Exception] = {}
        for batch in self._batches(list(missing.values())):
            try:
                self._encode(_inputs_of(batch))
            except Exception as error:
                if len(batch) == 1:
                    found[batch[0].identifier] = error
                else:
                    # the others of the batch may be well
                    for item in batch:
                        found.update(self.encode([item]))
        return found

    def take_new_sizes(self) -> list[str]:
        """Returns sizes that were encoded for the first time since the last call, except those of a warm-up."""
        found, self._new_sizes = self._new_sizes, []
        return found

    def _batches(self, items: list[MultiModalFeatureSpec]) -> Iterator[list[MultiModalFeatureSpec]]:
        if self._one_by_one:
            yield from ([item] for item in items)
        elif items:
            yield items

    def _encode(self, inputs: dict[str, Inputs]) -> None:
        """Encodes items together. inputs: by the key of each item."""
        # in lazy mode, a recipe of its own
        self._device.end_recipe()
        for key, found in zip(inputs, self._found(inputs), strict=True):
            self.table.put(key, *found)
        self._device.end_recipe()

    def _found(self, inputs: Mapping[str, Inputs]) -> Iterator[PaddedEmbeddings]:
        if self._padded is None:
            yield from (PaddedEmbeddings(one, len(one)) for one in self._compute(list(inputs.values())))
            return
        for one in inputs.values():
            ((_, _, batch),) = group_and_batch_mm_kwargs([one])
            padded = self._padded.encode(batch)
            if padded is None:
                (embeddings,) = self._compute([one])
                padded = PaddedEmbeddings(embeddings, len(embeddings))
            yield padded

    def _compute(self, inputs: Sequence[Inputs]) -> list[torch.Tensor]:
        """Returns the embeddings of each item, [embeddings, width]."""
        found: list[torch.Tensor] = []
        tensors_on, pins = self._device.torch_device(), self._device.kind == "cuda"
        for _, count, batch in group_and_batch_mm_kwargs(list(inputs), device=tensors_on, pin_memory=pins):
            self._note_size(batch)
            outputs = self._model.embed_multimodal(**batch)
            sanity_check_mm_encoder_outputs(outputs, expected_num_items=count)
            found += list(outputs)
        return found

    def _note_size(self, batch: Mapping[str, object]) -> None:
        shapes = {name: list(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)}
        size = str(shapes)
        if size not in self._known_sizes:
            self._known_sizes.add(size)
            self._new_sizes.append(size)


def _inputs_of(items: Sequence[MultiModalFeatureSpec]) -> dict[str, Inputs]:
    found = {item.identifier: (item.modality, item.data) for item in items if item.data is not None}
    if len(found) < len(items):
        raise ValueError("its pixels were not sent again")
    return found


def item_encoder_of(model: object) -> ItemEncoder | None:
    """Returns the encoder of a model's pictures; None if it reads only tokens."""
    found: ItemEncoder | None = vars(model).get(_ENCODER) if isinstance(model, nn.Module) else None
    return found
