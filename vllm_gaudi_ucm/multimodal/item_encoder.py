"""Computes embeddings of pictures by the model's encoder, and keeps them in the embedding table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_gaudi_ucm.vllm_api.multimodal import (
    MultiModalFeatureSpec,
    SupportsMultiModal,
    group_and_batch_mm_kwargs,
    sanity_check_mm_encoder_outputs,
)

if TYPE_CHECKING:
    from vllm_gaudi_ucm.multimodal.embedding_table import EmbeddingTable


class Item(NamedTuple):
    """An item to be encoded. key: vLLM's hash of its content."""

    key: str
    feature: MultiModalFeatureSpec


class ItemEncoder:
    """Runs the model's encoder outside of the graphs of steps.

    Args:
        table: the model's embedding table.
        one_by_one: encode each item alone, so that the shapes depend on its size only. Otherwise items of one size are
            a batch.
    """

    def __init__(
        self, model: SupportsMultiModal, table: EmbeddingTable, device: torch.device, one_by_one: bool
    ) -> None:
        self.table = table
        self._model = model
        self._device = device
        self._one_by_one = one_by_one

    @torch.inference_mode()
    def encode(self, items: Sequence[Item]) -> dict[str, Exception]:
        """Encodes items that the table lacks. Returns the errors of items that cannot be encoded, by their keys."""
        missing = {item.key: item for item in items if self.table.rows_of(item.key) is None}
        found: dict[str, Exception] = {}
        for batch in self._batches(list(missing.values())):
            try:
                self._encode(batch)
            except Exception as error:
                if len(batch) == 1:
                    found[batch[0].key] = error
                else:
                    # the others of the batch may be well
                    for item in batch:
                        found.update(self.encode([item]))
        return found

    def _batches(self, items: list[Item]) -> Iterator[list[Item]]:
        """Yields items that are encoded together: of one modality, in the given order."""
        if self._one_by_one:
            yield from ([item] for item in items)
            return
        for modality in dict.fromkeys(item.feature.modality for item in items):
            yield [item for item in items if item.feature.modality == modality]

    def _encode(self, items: list[Item]) -> None:
        kwargs = []
        for item in items:
            if item.feature.data is None:
                raise ValueError("its pixels were not sent again")
            kwargs.append((item.feature.modality, item.feature.data))
        outputs: list[torch.Tensor] = []
        pins = self._device.type == "cuda"
        for _, count, inputs in group_and_batch_mm_kwargs(kwargs, device=self._device, pin_memory=pins):
            found = self._model.embed_multimodal(**inputs)
            sanity_check_mm_encoder_outputs(found, expected_num_items=count)
            outputs += list(found)
        for item, embeddings in zip(items, outputs, strict=True):
            self.table.put(item.key, embeddings)
