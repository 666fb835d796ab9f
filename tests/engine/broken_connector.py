"""A connector of vLLM's kind that promises blocks, and finds only within the step that it cannot load them."""

from __future__ import annotations

from typing import Any

from tests.engine.pair_connector import PairConnector


class BrokenConnector(PairConnector):
    """Stores as its base class does, and loads nothing."""

    failures = 0

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        requests = self._metadata().requests
        slots = [request.slot_mapping // self._block_size for request in requests if not request.is_store]
        self._lost = {int(block) for found in slots for block in found.tolist()}
        BrokenConnector.failures += bool(self._lost)

    def get_block_ids_with_load_errors(self) -> set[int]:
        lost, self._lost = self._lost, set()
        return lost


class BrokenOnOneRank(BrokenConnector):
    """Only the first of several workers says so."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        lost = super().get_block_ids_with_load_errors()
        return lost if self._vllm_config.parallel_config.rank == 0 else set()
