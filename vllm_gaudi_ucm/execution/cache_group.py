"""Kinds of KV-cache groups: what layers keep of a request, and how a step reads and writes it."""

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
    """Makes what layers of one group read from the static tensors of a bucket."""

    def of(self, shape: ForwardShape, tensors: Tensors) -> Any:
        """Returns the group's inputs. tensors: of the group, by their plain names."""
        ...

    def refill(self) -> None:
        """Fills tensors of its own anew, after a warm-up that computed nothing."""
        ...


class CacheGroup(ABC):
    """Layers that keep the same kind of thing, planned and copied to the device once per step.

    A subclass in `CACHE_GROUPS` is served at true shapes and in buckets, with drafts and in stages of a pipeline.

    spec: vLLM's class of KV-cache specifications that its layers give.
    layer_classes: the classes of its layers, exactly: a subclass may compute something else.

    Args:
        kv: which layers and blocks are of the group.
    """

    spec: ClassVar[type[KVCacheSpec]]
    layer_classes: ClassVar[tuple[type, ...]]

    def __init__(self, kv: KvGroup) -> None:
        self.kv = kv

    @classmethod
    def make(cls, kv: KvGroup, vllm_config: VllmConfig) -> CacheGroup:
        """Returns a group of this kind for an engine."""
        return cls(kv)

    @property
    def follows_requests(self) -> KeepsOfRequests | None:
        """What has to know which requests have ended or were preempted; None: nothing."""
        return None

    def bytes_per_block(self, spec: KVCacheSpec) -> int:
        """Returns the bytes that a layer of the group takes for each block beyond what vLLM counts."""
        return 0

    def allocate(self, specs: Mapping[str, KVCacheSpec], num_blocks: int, device: torch.device) -> dict[str, Any]:
        """Returns, by layer name, what vLLM's blocks do not hold, made of zeros. It is bound to the layers.

        specs: of the group's layers. num_blocks: of the KV cache.
        """
        return {}

    def refill(self) -> None:  # noqa: B027  # most kinds have nothing to do
        """Fills what `allocate` made with zeros again, after a warm-up that computed nothing."""

    @abstractmethod
    def planner(self, causal_slice: int, batches: int) -> GroupPlanner:
        """Returns what plans the group's steps. batches: in flight at once, of different requests."""

    @abstractmethod
    def tensors(self, number: int) -> Sequence[StepTensor]:
        """Returns the tensors that a step has for the group. number: its place; see `group_suffix` for names."""

    def blocks(self, plan: PlanOfGroup) -> tuple[GroupBlocks, int | None] | None:
        """Returns the blocks of a planned step that a bucket needs room for; see `with_groups`. None: it needs none."""
        return None

    def divide(self, batch: BatchInput, room: Room | None) -> list[NDArray[np.int64]]:
        """Returns the requests, by index, of each part that a step has to be divided in, in the order to run them.

        batch: with the group's table alone. room: blocks of the largest bucket; None: steps run at their true
        shapes.
        """
        return [np.arange(len(batch.num_scheduled))]

    @abstractmethod
    def at_true_shape(self, plan: UnifiedPlan, own: PlanOfGroup, tensors: Tensors, to_device: ToDevice) -> Any:
        """Returns the group's inputs of a step without padding.

        own: the group's plan. tensors: of the group, by their plain names.
        """

    @abstractmethod
    def in_buckets(self, number: int, limits: Limits, causal_slice: int, device: torch.device) -> GroupInBuckets:
        """Returns what makes the group's inputs in buckets. number: its place. causal_slice: rows of a slice."""

    @abstractmethod
    def metadata(self, inputs: Any, implementation: str, plan: Plan | None) -> object:
        """Returns what the group's layers read in a forward. implementation, plan: of attention."""


CACHE_GROUPS: Registry[type[CacheGroup]] = Registry(
    "kind of cache group",
    "vllm_gaudi_ucm.cache_groups",
    attention="vllm_gaudi_ucm.execution.attention_group:AttentionGroup",
)


def kind_of(spec: KVCacheSpec) -> type[CacheGroup] | None:
    """Returns the registered kind of what a layer keeps. Raises RegistryError for one that cannot be loaded."""
    kinds = map(CACHE_GROUPS.get, CACHE_GROUPS.names())
    return next((kind for kind in kinds if isinstance(spec, kind.spec)), None)


def served_layers() -> tuple[type, ...]:
    """Returns the classes of layers of all registered kinds."""
    return tuple(one for name in CACHE_GROUPS.names() for one in CACHE_GROUPS.get(name).layer_classes)
