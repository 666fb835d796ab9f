"""What the CUDA kernels read beside the parts: sorted lists and places, made on the device once per step.

Shapes are functions of the shapes of the parts, and nothing is read on the host: a graph that is captured with `plan`
inside works for every step of its bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, SelectedPart, SharedPart, UniquePart

T = TypeVar("T")


class Lists(NamedTuple):
    """Entries (a block and the range of its tokens that is seen) by list, those that nobody sees last.

    order: int64 [entries] place of each in the part. blocks: int64, lo, hi: int32 [entries].
    owners: int32 [entries] list of each. offsets: int32 [lists + 1] where each list begins.
    """

    order: Tensor
    blocks: Tensor
    lo: Tensor
    hi: Tensor
    owners: Tensor
    offsets: Tensor

    @property
    def num_lists(self) -> int:
        return self.offsets.shape[0] - 1


class Tiles(NamedTuple):
    """Rows in tiles of `rows_per_tile`, and the columns (shared blocks) that each tile uses.

    order: int32 [tiles * rows_per_tile] rows, -1: none. place: int32 [rows] the inverse, -1: uses no shared block.
    columns, column_blocks: int32 [tiles, shared]; offsets: int32 [tiles + 1] of the columns in use; of these
    `whole_counts` int32 [tiles] come first, which all rows of the tile see whole.
    """

    order: Tensor
    place: Tensor
    columns: Tensor
    column_blocks: Tensor
    whole_counts: Tensor
    offsets: Tensor

    @property
    def num_tiles(self) -> int:
        return self.offsets.shape[0] - 1


@dataclass
class Plan:
    """Of one step; one layer at a time may use it, for `scratch` is kept from layer to layer.

    starts: int32 [rows] first row that a row sees in the causal part, beyond the row itself where it takes no part.
    derived: what depends on the layer's heads or rows, too.
    """

    parts: AttentionParts
    block_size: int
    starts: Tensor | None
    unique: Lists | None
    selected: Lists | None
    derived: dict[tuple[str, int], Any] = field(default_factory=dict)
    scratch: dict[str, Tensor] = field(default_factory=dict)

    def kept(self, key: tuple[str, int], derive: Callable[[], T]) -> T:
        """What was derived under this key, or is now."""
        if key not in self.derived:
            self.derived[key] = derive()
        return cast(T, self.derived[key])


def make_plan(parts: AttentionParts, block_size: int) -> Plan:
    """Sorts the entries of the parts; queues device work only."""
    return Plan(
        parts,
        block_size,
        None if parts.causal is None else _starts(parts.causal.groups),
        None if parts.unique is None or not parts.unique.rows.numel() else _unique_lists(parts.unique, block_size),
        None if parts.selected is None or not _has_room(parts.selected) else _selected_lists(parts.selected),
    )


def unique_place(lists: Lists, rows: int) -> Tensor:
    """int32 [rows]: the list of a row, or -1 where it is empty; list i is row i's.

    A bucket counts any row that may be a single one; rows of a prompt among these have no unique block.
    """
    place = torch.full((rows,), -1, dtype=torch.int32, device=lists.offsets.device)
    known = min(rows, lists.num_lists)
    index = torch.arange(known, dtype=torch.int32, device=place.device)
    place[:known] = torch.where(lists.offsets[1 : known + 1] > lists.offsets[:known], index, -1)
    return place


def selected_place(part: SelectedPart, rows: int) -> Tensor:
    """int32 [rows]: span * max_rows + lane of a row, or -1. A row is of one span at most."""
    spans, device = part.first_rows.shape[0], part.first_rows.device
    lane = torch.arange(part.max_rows, device=device)
    # what is no row of a span goes to one more entry, which is cut off
    row = torch.where(lane < part.num_rows[:, None], part.first_rows[:, None] + lane, rows).clamp(max=rows)
    place = torch.full((rows + 1,), -1, dtype=torch.int32, device=device)
    places = torch.arange(spans * part.max_rows, dtype=torch.int32, device=device)
    return place.scatter_(0, row.flatten(), places)[:rows]


def row_order(part: SharedPart, block_size: int, rows: int, rows_per_tile: int) -> tuple[Tensor, Tensor]:
    """Rows by the first shared block that they use, so that a tile's rows mostly use the same; see Tiles."""
    count = part.blocks.shape[0]
    used = part.hi.clamp(max=block_size) > part.lo.clamp(min=0)
    column = torch.arange(count, dtype=torch.int32, device=used.device)
    first = torch.where(used, column, count).amin(1)[part.row_spans[:rows]]
    sorted_first, order = torch.sort(first, stable=True)
    uses = sorted_first < count
    position = torch.arange(rows, dtype=torch.int32, device=used.device)
    place = torch.empty_like(position).scatter_(0, order, torch.where(uses, position, -1))
    padded = torch.full((-(-rows // rows_per_tile) * rows_per_tile,), -1, dtype=torch.int32, device=used.device)
    padded[:rows] = torch.where(uses, order, -1)
    return padded, place


def _starts(groups: Tensor) -> Tensor:
    row = torch.arange(groups.shape[0], device=groups.device)
    before = torch.cat((groups[:1] - 1, groups[:-1]))
    first = torch.where(groups != before, row, 0).cummax(0).values
    return torch.where(groups >= 0, first, row + 1).int()


def _unique_lists(part: UniquePart, block_size: int) -> Lists:
    seen = part.hi.clamp(max=block_size) > part.lo.clamp(min=0)
    order, owners, offsets = _sorted(part.rows, seen, part.num_rows)
    blocks = order if part.blocks is None else part.blocks[order]
    return Lists(order, blocks, part.lo[order].int(), part.hi[order].int(), owners, offsets)


def _selected_lists(part: SelectedPart) -> Lists:
    seen = (part.hi > 0) & (part.num_rows > 0)[part.spans]
    order, owners, offsets = _sorted(part.spans, seen, part.first_rows.shape[0])
    hi = part.hi[order].int()
    return Lists(order, part.blocks[order], torch.zeros_like(hi), hi, owners, offsets)


def _sorted(owners: Tensor, seen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Entries by owner, int64 [entries], those that nobody sees last; the owner of each, int32; offsets, see Lists."""
    key = torch.where(seen, owners, count).int()
    by_owner, order = torch.sort(key, stable=True)
    bounds = torch.arange(count + 1, dtype=key.dtype, device=key.device)
    return order, by_owner, torch.searchsorted(by_owner, bounds).int()


def _has_room(part: SelectedPart) -> bool:
    return part.blocks.shape[0] > 0 and part.first_rows.shape[0] > 0
