"""Gives the layers of each KV-cache group the step's metadata of their group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.vllm_api.attention import AttentionMetadata

if TYPE_CHECKING:
    pass


class GroupStep:
    """The running step of one group. Layers hold it, not a number, for which each would need one more graph."""

    metadata: Any

    def begin(self, metadata: object) -> None:
        """Makes the layers of the group read this metadata from now on."""
        self.metadata = metadata


@dataclass(frozen=True)
class GroupedMetadata(AttentionMetadata):
    """The metadata of one step for several groups, in their order; the first is an attention group.

    steps: the objects from which the layers of each group read their metadata.
    """

    groups: tuple[Any, ...]
    steps: tuple[GroupStep, ...]

    def begin(self) -> None:
        """Passes each group its metadata; must be called before the layers run."""
        for step, metadata in zip(self.steps, self.groups, strict=True):
            step.begin(metadata)
