"""Where the layers of each KV-cache group find the step's metadata of their group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.vllm_api.attention import AttentionMetadata

if TYPE_CHECKING:
    pass


class GroupStep:
    """The running step of one group. Layers hold it, and not the number of their group: that would be one more graph
    for each group where layers are compiled."""

    metadata: Any

    def begin(self, metadata: object) -> None:
        """The layers of the group read this from now on."""
        self.metadata = metadata


@dataclass(frozen=True)
class GroupedMetadata(AttentionMetadata):
    """One step of several groups, in their order; `steps` are where their layers look. The first is of attention."""

    groups: tuple[Any, ...]
    steps: tuple[GroupStep, ...]

    def begin(self) -> None:
        """Before the layers run."""
        for step, metadata in zip(self.steps, self.groups, strict=True):
            step.begin(metadata)
