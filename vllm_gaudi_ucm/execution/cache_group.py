"""Kinds of KV-cache groups: the data that layers keep for a request, and how a step reads and writes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.registry import Registry

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.batch.batch_plan import BatchInput, PlanOfGroup, UnifiedPlan
    from vllm_gaudi_ucm.batch.block_use import Room
    from vllm_gaudi_ucm.batch.group_planner import GroupPlanner
    from vllm_gaudi_ucm.batch.kv_group import KvGroup
    from vllm_gaudi_ucm.batch.request_table import KeepsOfRequests
    from vllm_gaudi_ucm.execution.step_tensors import StepTensor
    from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
    from vllm_gaudi_ucm.graphs.shapes.group_room import GroupBlocks
    from vllm_gaudi_ucm.graphs.shapes.limits import Limits
    from vllm_gaudi_ucm.ops.unified_attention.api import Plan
    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheSpec

ToDevice = Callable[[NDArray[Any]], "torch.Tensor"]
Tensors = Mapping[str, "torch.Tensor"]


class GroupInBuckets(Protocol):
    """Makes the inputs of one group's layers from the static tensors of a bucket."""

    def make_inputs(self, shape: ForwardShape, tensors: Tensors) -> Any:
        """Returns the group's inputs. tensors: tensors of the group, by their plain names."""
        ...

    def refill(self) -> None:
        """Fills its own tensors again, after a warm-up that computed nothing."""
        ...


class CacheGroup(ABC):
    """Layers that keep the same kind of data, planned and copied to the device once per step.

    A subclass in `CACHE_GROUPS` is supported at true shapes and in buckets, with drafts and in stages of a pipeline.

    spec: vLLM's class of the KV-cache specs of its layers.
    layer_classes: the exact classes of its layers, without subclasses, which may compute something else.
    """

    spec: ClassVar[type[KVCacheSpec]]
    layer_classes: ClassVar[tuple[type, ...]]

    def __init__(self, kv: KvGroup) -> None:
        self.kv = kv

    @classmethod
    def make(cls, kv: KvGroup, vllm_config: VllmConfig) -> CacheGroup:
        """Returns a group of this kind for an engine."""
        return cls(kv)

    @classmethod
    def serves(cls, layer_class: type) -> bool:
        """Returns whether this is the exact class of a layer of this kind. A kind may not want to import its classes
        for models without them.
        """
        return layer_class in cls.layer_classes

    @property
    def follows_requests(self) -> KeepsOfRequests | None:
        """Returns an object that must know which requests have ended or were preempted; None if there is none."""
        return None

    def bytes_per_block(self, spec: KVCacheSpec) -> int:
        """Returns the bytes that a layer of the group takes for each block in addition to those that vLLM counts."""
        return 0

    def bytes_of_requests(self, spec: KVCacheSpec) -> int:
        """Returns the bytes that a layer of the group takes outside vLLM's blocks whatever their number."""
        return 0

    def allocate(self, specs: Mapping[str, KVCacheSpec], num_blocks: int, device: torch.device) -> dict[str, Any]:
        """Returns zeroed tensors, by layer name, for data outside vLLM's blocks. They are bound to the layers.

        specs: specs of the group's layers. num_blocks: blocks of the KV cache.
        """
        return {}

    def refill(self) -> None:  # noqa: B027  # most kinds have nothing to do
        """Zeroes the tensors of `allocate` again, after a warm-up that computed nothing."""

    @abstractmethod
    def planner(self, causal_slice: int, batches: int) -> GroupPlanner:
        """Returns the planner of the group's steps. batches: batches of different requests in flight at once."""

    @abstractmethod
    def tensors(self, number: int) -> Sequence[StepTensor]:
        """Returns the tensors of a step for the group. number: its place; see `group_suffix` for names."""

    def blocks(self, plan: PlanOfGroup) -> tuple[GroupBlocks, int | None] | None:
        """Returns the blocks of a planned step for which a bucket needs room (see `with_groups`); None if none."""
        return None

    def divide(self, batch: BatchInput, room: Room | None) -> list[NDArray[np.int64]]:
        """Returns the requests, by index, of each part into which a step must be divided, in the order to run them.

        batch: with only the group's table. room: blocks of the largest bucket; None if steps run at their true shapes.
        """
        return [np.arange(len(batch.num_scheduled))]

    @abstractmethod
    def at_true_shape(self, plan: UnifiedPlan, own: PlanOfGroup, tensors: Tensors, to_device: ToDevice) -> Any:
        """Returns the group's inputs of a step without padding.

        own: the group's plan. tensors: tensors of the group, by their plain names.
        """

    @abstractmethod
    def in_buckets(self, number: int, limits: Limits, causal_slice: int, device: torch.device) -> GroupInBuckets:
        """Returns the object that makes the group's inputs in buckets. number: its place. causal_slice: its rows."""

    @abstractmethod
    def metadata(self, inputs: Any, implementation: str, plan: Plan | None) -> object:
        """Returns the metadata of the group's layers in a forward. implementation, plan: as for attention."""


CACHE_GROUPS: Registry[type[CacheGroup]] = Registry(
    "kind of cache group",
    "vllm_gaudi_ucm.cache_groups",
    attention="vllm_gaudi_ucm.execution.attention_group:AttentionGroup",
    encoder="vllm_gaudi_ucm.execution.encoder_group:EncoderGroup",
    recurrent="vllm_gaudi_ucm.execution.recurrent_group:RecurrentGroup",
)


def kind_of(spec: KVCacheSpec) -> type[CacheGroup] | None:
    """Returns the registered kind for the spec of a layer; None if there is none.

    Raises:
        RegistryError: a registered kind cannot be loaded.
    """
    kinds = map(CACHE_GROUPS.get, CACHE_GROUPS.names())
    return next((kind for kind in kinds if isinstance(spec, kind.spec)), None)


def is_served(layer_class: type) -> bool:
    """Returns whether a registered kind has layers of this class."""
    return any(CACHE_GROUPS.get(name).serves(layer_class) for name in CACHE_GROUPS.names())
