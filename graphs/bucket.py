"""The shape of a step: what decides which captured graph can replay it. Source: seed 001, last section."""

from __future__ import annotations

from typing import NamedTuple


def phase_string(causal: bool, shared: bool, unique: bool) -> str:
    """`csu` with `-` for each absent part: `--u` is a decode step, `c--` a step of fresh prompts."""
    return ("c" if causal else "-") + ("s" if shared else "-") + ("u" if unique else "-")


class ForwardShape(NamedTuple):
    """What a forward graph is captured for: (phase, query_len, shared_blocks, unique_blocks, selected_blocks).

    selected_blocks: blocks that a sparse method chooses, over all requests; their part has no letter in the phase.
    """

    phase: str
    query_len: int
    shared_blocks: int
    unique_blocks: int
    selected_blocks: int = 0

    @classmethod
    def of(
        cls, causal: bool, query_len: int, shared_blocks: int, unique_blocks: int, selected_blocks: int = 0
    ) -> ForwardShape:
        """The shape whose phase has `s` and `u` exactly where it has such blocks."""
        phase = phase_string(causal, shared_blocks > 0, unique_blocks > 0)
        return cls(phase, query_len, shared_blocks, unique_blocks, selected_blocks)

    def step(self, logits: int) -> Bucket:
        """The bucket of this shape and of so many logits rows."""
        phase, query_len, shared_blocks, unique_blocks, selected_blocks = self
        return Bucket(phase, query_len, shared_blocks, unique_blocks, logits, selected_blocks)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(query_len, shared_blocks, unique_blocks, selected_blocks)."""
        return self.query_len, self.shared_blocks, self.unique_blocks, self.selected_blocks

    def with_selected(self, selected_blocks: int) -> ForwardShape:
        """The same shape with another selected part."""
        return self._replace(selected_blocks=selected_blocks)

    def to_list(self) -> list[str | int]:
        """For files and JSON: selected blocks are written only where there are any."""
        sizes = self.sizes if self.selected_blocks else self.sizes[:3]
        return [self.phase, *sizes]


class Bucket(NamedTuple):
    """(phase, query_len, shared_blocks, unique_blocks, logits, selected_blocks): tensor shapes follow from it alone."""

    phase: str
    query_len: int
    shared_blocks: int
    unique_blocks: int
    logits: int
    selected_blocks: int = 0

    @property
    def forward(self) -> ForwardShape:
        """The key of the forward graph; the graph of logits and sampling has `logits` alone for its key."""
        phase, query_len, shared_blocks, unique_blocks, _, selected_blocks = self
        return ForwardShape(phase, query_len, shared_blocks, unique_blocks, selected_blocks)


def dominates(bucket: Bucket, step: Bucket) -> bool:
    """Whether `step` can run in `bucket`: every dimension is as large, and no part of its phase is missing.

    A part that the bucket has and the step has not is legal: it runs over empty ranges.
    """
    return all(have in (part, "-") for have, part in zip(step.phase, bucket.phase, strict=True)) and all(
        size <= room for size, room in zip(step[1:], bucket[1:], strict=True)
    )
