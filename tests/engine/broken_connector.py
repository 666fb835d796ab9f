"""A connector of vLLM's kind that promises blocks, and finds only within the step that it cannot load them."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata


class BrokenConnector(ExampleConnector):
    """Stores as ExampleConnector does, and loads nothing."""

    failures = 0

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleConnectorMetadata)
        slots = [request.slot_mapping // self._block_size for request in metadata.requests if not request.is_store]
        self._lost = {int(block) for found in slots for block in found.tolist()}
        BrokenConnector.failures += bool(self._lost)

    def get_block_ids_with_load_errors(self) -> set[int]:
        lost, self._lost = self._lost, set()
        return lost
