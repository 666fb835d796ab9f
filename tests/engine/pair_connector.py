"""A connector from outside that works layer by layer, as vLLM's example does, on keys and values as they are here."""

from __future__ import annotations

from typing import Any

import safetensors.torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata

from vllm_gaudi_ucm.kv_cache.pair import KvPair


class PairConnector(ExampleConnector):
    """Keeps each layer's rows in a file after its attention, and loads them before the step that needs them."""

    takes_kv_pairs = True

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._pairs: dict[str, KvPair] = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request in self._metadata().requests:
            if request.is_store:
                continue
            for name, pair in self._pairs.items():
                stored = safetensors.torch.load_file(
                    self._generate_filename_debug(name, request.token_ids, request.mm_hashes)
                )
                for rows, tokens in zip(pair, (stored["key"], stored["value"]), strict=True):
                    rows.index_copy_(0, request.slot_mapping.to(rows.device), tokens.to(rows.device))

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        assert kv_layer is self._pairs[layer_name]
        for request in self._metadata().requests:
            if request.is_store:
                slots = request.slot_mapping
                tokens = {name: rows[slots.to(rows.device)].cpu() for name, rows in kv_layer._asdict().items()}
                file = self._generate_filename_debug(layer_name, request.token_ids, request.mm_hashes)
                safetensors.torch.save_file(tokens, file)

    def _metadata(self) -> ExampleConnectorMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleConnectorMetadata)
        return metadata


class WholeConnector(ExampleConnector):
    """Does with layers what vLLM's example does: it takes one tensor for keys and values."""
