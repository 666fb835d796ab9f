"""The shape of a step, which decides which captured graph can replay it. Source: seed 001, last section."""

from __future__ import annotations

from typing import NamedTuple

from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES, flat_tiles, is_bounded


def phase_string(causal: bool, shared: bool, unique: bool) -> str:
    """Returns `csu` with `-` for each absent part: `--u` is a decode step, `c--` a step of fresh prompts."""
    return ("c" if causal else "-") + ("s" if shared else "-") + ("u" if unique else "-")


class ForwardShape(NamedTuple):
    """The sizes that a forward graph is captured for.

    selected_blocks: blocks that a sparse method chooses, over all requests; their part has no letter in the phase.
    max_prompt_tiles: tiles of rows of its longest prompt (`prompt_tiles`); `ALL_TILES` for no bound.
    """

    phase: str
    query_len: int
    shared_blocks: int
    unique_blocks: int
    selected_blocks: int = 0
    max_prompt_tiles: int = ALL_TILES

    @classmethod
    def from_sizes(
        cls,
        causal: bool,
        query_len: int,
        shared_blocks: int,
        unique_blocks: int,
        selected_blocks: int = 0,
        max_prompt_tiles: int = ALL_TILES,
    ) -> ForwardShape:
        """The shape whose phase has `s` and `u` if it has such blocks. A bound that saves little is left out."""
        phase = phase_string(causal, shared_blocks > 0, unique_blocks > 0)
        if not causal or not is_bounded(query_len, max_prompt_tiles):
            max_prompt_tiles = ALL_TILES
        return cls(phase, query_len, shared_blocks, unique_blocks, selected_blocks, max_prompt_tiles)

    def step(self, logits: int) -> Bucket:
        """Returns the bucket of this shape and this number of logits rows."""
        return Bucket(*self[:4], logits, *self[4:])

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(query_len, shared_blocks, unique_blocks, selected_blocks, max_prompt_tiles)."""
        return self[1:]

    def with_selected(self, selected_blocks: int) -> ForwardShape:
        """Returns the same shape with another selected part."""
        return self._replace(selected_blocks=selected_blocks)

    def with_prompt_tiles(self, max_prompt_tiles: int) -> ForwardShape:
        """Returns the same shape with other max prompt tiles; without a causal part it has none."""
        return ForwardShape.from_sizes("c" in self.phase, *self.sizes[:4], max_prompt_tiles)

    def to_list(self) -> list[str | int]:
        """Returns a list for files and JSON; selected blocks and max prompt tiles only if there are any, or bounded."""
        return [self.phase, *written_sizes(self.sizes)]


class Bucket(NamedTuple):
    """A forward shape and `logits` rows: tensor shapes follow from it alone."""

    phase: str
    query_len: int
    shared_blocks: int
    unique_blocks: int
    logits: int
    selected_blocks: int = 0
    max_prompt_tiles: int = ALL_TILES

    @property
    def forward(self) -> ForwardShape:
        """The key of the forward graph; the graph of logits and sampling has `logits` alone for its key."""
        return ForwardShape(*self[:4], *self[5:])

    def to_list(self) -> list[str | int]:
        return [self.phase, *written_sizes(self[1:])]


def written_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes without trailing selected blocks and max prompt tiles that carry no information."""
    if sizes[-1] != ALL_TILES:
        return sizes
    return sizes[:-1] if sizes[-2] else sizes[:-2]


def least_prompt_tiles(shape: ForwardShape | Bucket) -> int:
    """The max prompt tiles that a bucket needs for the shape: at most those of all rows; 0 without a causal part."""
    return min(shape.max_prompt_tiles, flat_tiles(shape.query_len)) if "c" in shape.phase else 0


def dominates(bucket: Bucket, step: Bucket) -> bool:
    """True if `step` can run in `bucket`: every dimension is as large, and it has all parts of its phase.

    A part that only the bucket has is legal: it runs over empty ranges.
    """
    step = step._replace(max_prompt_tiles=least_prompt_tiles(step))
    return all(have in (part, "-") for have, part in zip(step.phase, bucket.phase, strict=True)) and all(
        size <= room for size, room in zip(step[1:], bucket[1:], strict=True)
    )
