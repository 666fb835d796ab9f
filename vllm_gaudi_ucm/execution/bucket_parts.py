"""The parts of attention at the static shapes of a bucket."""

from collections.abc import Mapping

import torch

from vllm_gaudi_ucm.batch.kv_group import KvGroup
from vllm_gaudi_ucm.graphs.shapes import prompt_tiles
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.group_room import GroupBlocks, group_room, most_blocks
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.ops.unified_attention.parts import (
    AttentionParts,
    CausalPart,
    CausalSlice,
    CausalTiles,
    SharedGroup,
    SharedPart,
    UniquePart,
)

# Rows that Gaudi's matrix engine multiplies at once.
SHORTEST_SLICE = 128


def group_blocks(number: int, group: KvGroup, shape: ForwardShape, limits: Limits) -> GroupBlocks:
    """Returns the blocks of a group for which a bucket has room. number: its place among the groups."""
    if not number:
        return GroupBlocks(shape.shared_blocks, shape.unique_blocks)
    return group_room(shape, limits, group.most_blocks)


class BucketParts:
    """Makes the parts of an attention group from the static tensors of a bucket.

    Args:
        number: the group's place among the groups.
        limits: limits of the steps; `contiguous` decides whether the first group's unique part reads a slice of the
            cache or gathers.
        causal_slice: rows per slice of the causal part.
    """

    def __init__(self, number: int, group: KvGroup, limits: Limits, causal_slice: int, device: torch.device) -> None:
        self._number = number
        self._group = group
        self._limits = limits
        self._max_decode_rows = limits.max_decode_rows
        self._causal_slice = causal_slice
        self._zero = torch.zeros(1, dtype=torch.int64, device=device)
        self._row_numbers = torch.arange(limits.max_num_batched_tokens, device=device)

    def attention_parts(self, shape: ForwardShape, tensors: Mapping[str, torch.Tensor]) -> AttentionParts:
        """Returns the parts. tensors: tensors of the group, by their plain names."""
        return AttentionParts(
            causal=self._causal(shape, tensors) if "groups" in tensors else None,
            shared=self._shared(shape, tensors) if "shared_hi" in tensors else None,
            unique=self._unique(shape, tensors) if "unique_hi" in tensors else None,
            positions=tensors["positions"] if self._window else None,
        )

    @property
    def _window(self) -> int:
        """Returns the number of tokens that a row sees; 0 for all."""
        if not self._number:
            return self._limits.window
        window = self._group.window
        return 0 if window is None else window.tokens

    def refill(self) -> None:
        """Fills its tensors again, after a warm-up that computed nothing."""
        self._zero.zero_()
        self._row_numbers.copy_(torch.arange(len(self._row_numbers)))

    def _causal(self, shape: ForwardShape, tensors: Mapping[str, torch.Tensor]) -> CausalPart:
        """Returns the causal part: a slice sees as many earlier rows as a request can have, or as a window shows."""
        q, step, longest = shape.query_len, self._causal_slice, self._limits.max_model_len
        longest = min(longest, self._window or longest)
        if q > longest:
            # packed prompts: all rows of a slice look back as far as its first row, so short slices waste less
            step = min(step, max(SHORTEST_SLICE, longest // 4))
        before = longest - 1
        slices = (
            CausalSlice(lo, min(lo + step, q), max(0, lo - before), min(lo + step, q)) for lo in range(0, q, step)
        )
        tiles = None
        if "tiles" in tensors:
            rows, levels = prompt_tiles.TILE_ROWS, prompt_tiles.levels(q, shape.max_prompt_tiles)
            tiles = CausalTiles(tensors["tiles"][0], tensors["tiles"][1], rows, levels)
        return CausalPart(tensors["groups"], tuple(slices), tiles, tensors.get("causal_first_rows"))

    def _shared(self, shape: ForwardShape, tensors: Mapping[str, torch.Tensor]) -> SharedPart:
        hi = tensors["shared_hi"]
        blocks = group_blocks(self._number, self._group, shape, self._limits).shared
        everything = SharedGroup(self._row_numbers[: shape.query_len], 0, blocks)
        if "shared_lo" in tensors:
            lo, from_first = tensors["shared_lo"], False
        else:
            lo, from_first = tensors.get("shared_from", self._zero).expand(hi.shape), "shared_from" not in tensors
        spans, rise = tensors["row_spans"], tensors.get("shared_rise")
        most = self._most_blocks
        if self._group.chooses_tokens:
            most = min(blocks, self._limits.blocks_per_request)
        return SharedPart(
            blocks=tensors["shared_blocks"],
            row_spans=spans,
            lo=lo,
            hi=hi,
            groups=(everything,),
            from_first=from_first,
            rise=rise,
            most_of_span=most,
        )

    def _unique(self, shape: ForwardShape, tensors: Mapping[str, torch.Tensor]) -> UniquePart:
        hi = tensors["unique_hi"]
        return UniquePart(
            blocks=None if self._limits.contiguous and not self._number else tensors["unique_blocks"],
            rows=tensors["unique_rows"],
            lo=tensors.get("unique_lo", self._zero).expand(hi.shape),
            hi=hi,
            num_rows=min(shape.query_len, self._max_decode_rows),
            from_first="unique_lo" not in tensors,
            most_of_row=self._most_of_row(len(hi)),
            places=tensors.get("unique_places"),
        )

    def _most_of_row(self, blocks: int) -> int | None:
        """Returns the most unique blocks of a row; None if nothing bounds them, or nothing reads the number."""
        if self._group.chooses_tokens:
            return min(blocks, self._limits.blocks_per_request)
        return self._most_blocks

    @property
    def _most_blocks(self) -> int | None:
        """Returns the most cached blocks that a request sees; None without a window that bounds them."""
        window = self._window
        size = self._group.block_size if self._number else self._limits.block_size
        return most_blocks(window, size) if window else None
