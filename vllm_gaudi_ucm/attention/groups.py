"""The KV-cache groups of a model, and where the layers of each find the step's metadata of their group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.batch.kv_group import KvGroup
from vllm_gaudi_ucm.vllm_api.attention import AttentionMetadata

if TYPE_CHECKING:
    from vllm_gaudi_ucm.attention.backend import UnifiedAttentionImpl, UnifiedAttentionMetadata


class GroupStep:
    """The running step of one group. Layers hold it, and not the number of their group: that would be one more graph
    for each group where layers are compiled."""

    metadata: UnifiedAttentionMetadata

    def begin(self, metadata: UnifiedAttentionMetadata) -> None:
        """The layers of the group read this from now on."""
        self.metadata = metadata


@dataclass(frozen=True)
class GroupedMetadata(AttentionMetadata):
    """One step's attention of several groups, in their order; `steps` are where their layers look."""

    groups: tuple[UnifiedAttentionMetadata, ...]
    steps: tuple[GroupStep, ...]

    def begin(self) -> None:
        """Before the layers run."""
        for step, metadata in zip(self.steps, self.groups, strict=True):
            step.begin(metadata)


class LayerGroups(NamedTuple):
    """groups: at least one. steps: of each, where there are several; with one, layers read the step's only metadata."""

    groups: tuple[KvGroup, ...]
    steps: tuple[GroupStep, ...] = ()

    @classmethod
    def of(cls, groups: Sequence[KvGroup], layers: Mapping[str, UnifiedAttentionImpl]) -> LayerGroups:
        """Tells each layer where to look. layers: by name, all that are in a group."""
        if len(groups) == 1:
            for layer in layers.values():
                layer.join(None)
            return cls(tuple(groups))
        steps = tuple(GroupStep() for _ in groups)
        for group, step in zip(groups, steps, strict=True):
            for name in group.layers:
                layers[name].join(step)
        return cls(tuple(groups), steps)
