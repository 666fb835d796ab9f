"""The hooks that KVStar hands on to its base method as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_gaudi_ucm.sparse.base import UcmSparseBase


class BaseMethodHooks:
    """Every hook but those that decide about locks."""

    base_sparse: UcmSparseBase

    @property
    def selecting_method(self) -> UcmSparseBase:
        return self.base_sparse.selecting_method

    def register_block_size(self, block_size: int) -> None:
        self.base_sparse.register_block_size(block_size)

    def estimate_num_slots_sparsed(self, request: Request) -> int:
        return self.base_sparse.estimate_num_slots_sparsed(request)

    def allocate_slots(self, request: Request, num_slots_sparsed: int) -> Any:
        return self.base_sparse.allocate_slots(request, num_slots_sparsed)

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self.base_sparse.register_kv_caches(kv_caches)

    def execute_begin(self, step: Any) -> None:
        self.base_sparse.execute_begin(step)

    def attention_begin(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: Any,
        output: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return self.base_sparse.attention_begin(layer_idx, query, key, value, metadata, output)

    def attention_finished(self, layer_idx: int, output: Tensor | None) -> Tensor | None:
        return self.base_sparse.attention_finished(layer_idx, output)

    def execute_finished(self) -> None:
        self.base_sparse.execute_finished()

    def update_states(self, scheduler_output: SchedulerOutput) -> None:
        self.base_sparse.update_states(scheduler_output)

    def request_finished_in_worker(self, request_id: str) -> None:
        self.base_sparse.request_finished_in_worker(request_id)
