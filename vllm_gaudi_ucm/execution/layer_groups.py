"""The KV-cache groups of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vllm_gaudi_ucm.attention.groups import GroupedMetadata, GroupStep
from vllm_gaudi_ucm.batch.kv_group import KvGroup
from vllm_gaudi_ucm.execution.attention_group import AttentionGroup, StepMetadata
from vllm_gaudi_ucm.graphs.shapes.group_room import with_groups

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vllm_gaudi_ucm.attention.backend import UnifiedAttentionMetadata
    from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan
    from vllm_gaudi_ucm.batch.block_use import Room
    from vllm_gaudi_ucm.batch.window import Window
    from vllm_gaudi_ucm.execution.cache_group import CacheGroup
    from vllm_gaudi_ucm.execution.step_tensors import StepInputs
    from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
    from vllm_gaudi_ucm.ops.unified_attention.api import Plan


class GroupLayer(Protocol):
    """A layer, or the object that computes it."""

    def join(self, group: GroupStep | None) -> None:
        """Makes the layer read the step of this group. None if there is one group, whose metadata is the step's."""
        ...


class LayerGroups(NamedTuple):
    """The groups, at least one, of which the first has attention. steps: step of each group, if there are several."""

    groups: tuple[CacheGroup, ...]
    steps: tuple[GroupStep, ...] = ()

    @classmethod
    def from_layers(cls, groups: Sequence[CacheGroup], layers: Mapping[str, GroupLayer]) -> LayerGroups:
        """Gives each layer the step object of its group. layers: all layers in groups, by name."""
        if len(groups) == 1:
            for layer in layers.values():
                layer.join(None)
            return cls(tuple(groups))
        steps = tuple(GroupStep() for _ in groups)
        for group, step in zip(groups, steps, strict=True):
            for name in group.kv.layers:
                layers[name].join(step)
        return cls(tuple(groups), steps)

    @classmethod
    def alone(cls, block_size: int, window: Window | None) -> LayerGroups:
        """Returns one attention group with all layers. window: how far back its rows see."""
        return cls((AttentionGroup(KvGroup(0, block_size, window)),))

    def held(self, true: Bucket, plan: UnifiedPlan) -> Bucket:
        """Returns the true shape of a step, raised until buckets that hold it have room for all groups."""
        needs = (group.blocks(one) for one, group in zip(plan.groups[1:], self.groups[1:], strict=True))
        return with_groups(true, [need for need in needs if need is not None])

    def divide(
        self, batch: BatchInput, divisions: list[NDArray[np.int64]], room: Room | None
    ) -> list[NDArray[np.int64]]:
        """Returns the parts of a step, divided further if a group after the first needs that.

        divisions: requests of each part, by index. room: see `CacheGroup.divide`.
        """
        for number, group in enumerate(self.groups[1:], 1):
            whole = batch.of_group(number)
            # one part has all requests in their order: nothing is copied in most steps
            members = [whole] if len(divisions) == 1 else [whole.take(index) for index in divisions]
            parts = [(index, group.divide(part, room)) for index, part in zip(divisions, members, strict=True)]
            divisions = [index[part] for index, found in parts for part in found]
        return divisions

    def metadata(
        self, first: UnifiedAttentionMetadata, inputs: StepInputs, implementation: str, plan: Plan | None = None
    ) -> StepMetadata:
        """Returns the metadata of all groups. first: metadata of the first group, with sparse method and summaries."""
        if len(inputs.groups) == 1:
            return first
        others = (
            group.metadata(one, implementation, plan)
            for one, group in zip(inputs.groups[1:], self.groups[1:], strict=True)
        )
        return GroupedMetadata((first, *others), self.steps)

    @property
    def kv(self) -> tuple[KvGroup, ...]:
        """Returns the layers and blocks of each group."""
        return tuple(group.kv for group in self.groups)
