"""The data that the CUDA kernels read in addition to the parts: sorted lists and places, made on the device once per
step.

Shapes depend only on the shapes of the parts, and nothing is read on the host. So a graph with `plan` inside works for
every step of its bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cuda.early_start import starts_early
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.layer import (
    Layer,
    multiprocessors,
    power_of_two,
)
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, CausalPart, SelectedPart, SharedPart, UniquePart

T = TypeVar("T")


class Lists(NamedTuple):
    """Entries (a block and its visible token range) sorted by list; invisible entries come last.

    order: int64 [entries] index of each in the part. blocks: int64, lo, hi: int32 [entries].
    owners: int32 [entries] list of each. offsets: int32 [lists + 1] start of each list.
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


class SharedTiles(NamedTuple):
    """Rows in tiles of `rows_per_tile`, and the columns (shared blocks) that each tile uses.

    order: int32 [tiles * rows_per_tile] rows, or -1. place: int32 [rows] the inverse; -1 if a row uses no shared block.
    columns, column_blocks: int32 [tiles, shared]. offsets: int32 [tiles + 1] of the columns in use. whole_counts: int32
    [tiles]: this many first columns of a tile are completely visible to all of its rows.
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
class CudaPlan:
    """The plan of one step. Only one layer may use it at a time, because the layers share `scratch`.

    starts: int32 [rows] first row that a row sees in the causal part; later than the row itself if it has none.
    tokens: the unique part as a token table whose entries are slots; None if blocks are read.
    joined: whether unique and selected part are one list, see `cuda_joined`; neither then has a list of its own.
    joined_own: whether the blocks selected for requests with several rows form one list with their own blocks in the
        shared part, see `own.py`; the selected part then has no list of its own.
    derived: cached values that also depend on the heads or rows of a layer.
    """

    parts: AttentionParts
    block_size: int
    starts: Tensor | None
    unique: Lists | None
    selected: Lists | None
    tokens: Lists | None = None
    joined: bool = False
    joined_own: bool = False
    derived: dict[tuple[str, int], Any] = field(default_factory=dict)
    scratch: dict[str, Tensor] = field(default_factory=dict)

    @property
    def most_of_row(self) -> int | None:
        """The most blocks of a single row, if that is known."""
        return None if self.parts.unique is None else self.parts.unique.most_of_row

    def selected_lists(self) -> Lists | None:
        """Returns the lists of the selected part alone."""
        part = self.parts.selected
        if part is None or not self.joined_own:
            return self.selected
        return self.kept(("selected lists", 0), lambda: _selected_lists(part))

    def kept(self, key: tuple[str, int], derive: Callable[[], T]) -> T:
        """Returns the value for this key, derived on the first call."""
        if key not in self.derived:
            self.derived[key] = derive()
        return cast(T, self.derived[key])


def make_plan(parts: AttentionParts, block_size: int) -> CudaPlan:
    """Sorts the entries of the parts; only queues work on the device."""
    starts = None if parts.causal is None else _starts(parts.causal)
    if _joins(parts, block_size):
        return CudaPlan(parts, block_size, starts, None, None, joined=True)
    unique = None if parts.unique is None or not parts.unique.rows.numel() else _unique_lists(parts.unique, block_size)
    selected = None if parts.selected is None or not _has_room(parts.selected) else parts.selected
    joined_own = selected is not None and _joins_own(parts, selected)
    return CudaPlan(
        parts,
        block_size,
        starts,
        unique,
        None if selected is None or joined_own else _selected_lists(selected),
        None if parts.unique is None or unique is None else _token_lists(parts.unique, unique, block_size),
        joined_own=joined_own,
    )


# A block is read as a whole, however few of its tokens are seen; a slot is read by itself. From this many tokens read
# per token in use, a table of slots is faster (H200, 64 requests of 440 tokens in runs of 1, 8, 64, 128: by blocks
# 2.11, 0.278, 0.050, 0.043 ms, by slots 0.051, 0.049, 0.048, 0.048).
SCATTERED = 1.35


def _reads_blocks(part: UniquePart, block_size: int) -> bool:
    """True if whole blocks are read, not single slots."""
    return part.num_tokens is None or part.num_tokens * SCATTERED > part.rows.shape[0] * block_size


def _joins(parts: AttentionParts, block_size: int) -> bool:
    """True if there are a unique and a selected part, and every choice is for a single row."""
    unique, selected = parts.unique, parts.selected
    if unique is None or selected is None or not unique.num_rows or not unique.rows.numel():
        return False
    return _has_room(selected) and selected.max_rows == 1 and _reads_blocks(unique, block_size)


# Rows of a span whose chosen blocks and own blocks are one list.
MOST_JOINED = 16


def _joins_own(parts: AttentionParts, selected: SelectedPart) -> bool:
    """True if there are choices for several rows, and other blocks that may be these rows' own.

    False under a window, whose rows see different tokens, with slopes, which need the distance of every block, and for
    more rows than a verification has, whose choices are read in tiles of rows (`chosen_tiles.py`).
    """
    shared = parts.shared
    if parts.causal is None or shared is None or not shared.blocks.numel():
        return False
    return 1 < selected.max_rows <= MOST_JOINED and shared.rise is None and parts.positions is None


def _token_lists(part: UniquePart, unique: Lists, block_size: int) -> Lists | None:
    """Returns the slots of the tokens that rows see, a list for each row; None if reading blocks is faster.

    Slot `s` is token `s % block_size` of block `s // block_size`.
    """
    count = part.num_tokens
    if count is None or _reads_blocks(part, block_size):
        return None
    size = (unique.hi - unique.lo).clamp(min=0)
    end = torch.nn.functional.pad(size.cumsum(0), (1, 0))
    entry = torch.repeat_interleave(size, output_size=count)
    token = torch.arange(count, device=end.device) - end[entry]
    slots = unique.blocks[entry] * block_size + unique.lo[entry] + token
    one = torch.ones(count, dtype=torch.int32, device=end.device)
    return Lists(unique.order[entry], slots, one - one, one, unique.owners[entry], end[unique.offsets].int())


def unique_place(lists: Lists, rows: int) -> Tensor:
    """The list of each row, or -1 if it is empty: int32 [rows]; list i belongs to row i.

    A bucket counts every row that may be a single row; prompt rows among these have no unique blocks.
    """
    place = torch.full((rows,), -1, dtype=torch.int32, device=lists.offsets.device)
    known = min(rows, lists.num_lists)
    index = torch.arange(known, dtype=torch.int32, device=place.device)
    place[:known] = torch.where(lists.offsets[1 : known + 1] > lists.offsets[:known], index, -1)
    return place


def selected_place(part: SelectedPart, rows: int) -> Tensor:
    """The place of each row, span * max_rows + lane, or -1: int32 [rows]. A row belongs to one span at most."""
    spans, device = part.first_rows.shape[0], part.first_rows.device
    lane = torch.arange(part.max_rows, device=device)
    # rows without a span go to one extra entry, which is cut off
    row = torch.where(lane < part.num_rows[:, None], part.first_rows[:, None] + lane, rows).clamp(max=rows)
    place = torch.full((rows + 1,), -1, dtype=torch.int32, device=device)
    places = torch.arange(spans * part.max_rows, dtype=torch.int32, device=device)
    return place.scatter_(0, row.flatten(), places)[:rows]


def row_order(part: SharedPart, block_size: int, rows: int, rows_per_tile: int) -> tuple[Tensor, Tensor]:
    """Sorts rows by their first shared block, so that the rows of a tile mostly use the same; see SharedTiles."""
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


def _starts(part: CausalPart) -> Tensor:
    groups = part.groups
    row = torch.arange(groups.shape[0], device=groups.device)
    before = torch.cat((groups[:1] - 1, groups[:-1]))
    first = torch.where(groups != before, row, 0).cummax(0).values
    if part.first_rows is not None:
        first = torch.maximum(first, part.first_rows)
    return torch.where(groups >= 0, first, row + 1).int()


def _unique_lists(part: UniquePart, block_size: int) -> Lists:
    seen = part.hi.clamp(max=block_size) > part.lo.clamp(min=0)
    order, owners, offsets = sort_by_owner(part.rows, seen, part.num_rows)
    blocks = order if part.blocks is None else part.blocks[order]
    return Lists(order, blocks, part.lo[order].int(), part.hi[order].int(), owners, offsets)


def _selected_lists(part: SelectedPart) -> Lists:
    seen = (part.hi > 0) & (part.num_rows > 0)[part.spans]
    order, owners, offsets = sort_by_owner(part.spans, seen, part.first_rows.shape[0])
    hi = part.hi[order].int()
    return Lists(order, part.blocks[order], torch.zeros_like(hi), hi, owners, offsets)


def sort_by_owner(owners: Tensor, seen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts entries by owner: int64 [entries], invisible ones last; the owner of each, int32; offsets, see Lists."""
    key = torch.where(seen, owners, count).int()
    by_owner, order = torch.sort(key, stable=True)
    bounds = torch.arange(count + 1, dtype=key.dtype, device=key.device)
    return order, by_owner, torch.searchsorted(by_owner, bounds).int()


def _has_room(part: SelectedPart) -> bool:
    return part.blocks.shape[0] > 0 and part.first_rows.shape[0] > 0


# Programs per multiprocessor of a kernel over the cache; one, if it has to leave room for another part.
PROGRAMS, PROGRAMS_BESIDE, PROGRAMS_FLAT = 2, 1, 4
# Bytes of keys and values of one step of a loop: kernels limited by memory request more at once.
STAGE, LARGE_STAGE = 32 * 1024, 64 * 1024
SPANS_STAGES, FEW_STAGES = 2, 3  # for the loop over the blocks of a span, or over half blocks
# Tiles of fp32 are smaller throughout: their products are unrolled into single multiplications, which costs compile
# time and registers.


class Tile(NamedTuple):
    """block_m: rows, or rows times query heads of one KV head; block_n: keys per step of the loop."""

    block_m: int
    block_n: int
    stages: int
    warps: int

    def sizes(self) -> dict[str, int]:
        """Returns the sizes as arguments of a launch."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "STAGES": self.stages,
            "num_warps": self.warps,
        }


def causal_tile(layer: Layer) -> Tile:
    """Returns the tile of the causal part. block_m: rows."""
    if layer.huge:
        return Tile(16, layer.tokens_per_tile(STAGE), 2, 4)
    if layer.wide:
        return Tile(32, min(32, layer.tokens_per_tile(STAGE)), 2, 4)
    return Tile(64, min(64, layer.tokens_per_tile(STAGE)), 3, 4)


def spans_tile(layer: Layer, rows: int) -> Tile:
    """Returns the tile for spans of up to `rows` rows."""
    most = 64 if layer.wide else 128
    block_m = power_of_two(rows * layer.group)
    return Tile(block_m, min(most, layer.tokens_per_tile(LARGE_STAGE)), SPANS_STAGES, 8 if block_m >= 128 else 4)


# Up to this many blocks of a program, it takes half blocks: for an average of 3.2, some program would get 4 whole
# blocks.
FEW_BLOCKS = 12


def of_few_blocks(tile: Tile, layer: Layer, entries: int, block_size: int) -> Tile:
    """Returns the tile, or half of it if programs have few blocks, which they then share evenly. entries: blocks of all
    programs.
    """
    if tile.block_n != block_size or tile.block_n <= 64 or entries > FEW_BLOCKS * programs_of(layer, entries):
        return tile
    return tile._replace(block_n=tile.block_n // 2, stages=FEW_STAGES)


def flat_spans_tile(layer: Layer, block_size: int, beside: bool) -> Tile | None:
    """Returns the tile for single rows in one loop over all entries, whose stages also hold queries; None if it does
    not fit.

    beside: as in `programs_of`; with fewer programs each requests more at once.
    """
    block_m = power_of_two(layer.group)
    most, stage = (128, LARGE_STAGE) if beside else (64, STAGE)
    tile = Tile(block_m, min(most, layer.tokens_per_tile(stage)), 3, 4)
    fits = not layer.wide and block_m <= (16 if beside else 32) and block_size % tile.block_n == 0
    return tile if fits else None


def shared_tile(layer: Layer, several: bool = False) -> Tile:
    """Returns the tile of the shared part: block_m has two sizes, for few and for many rows, because each compiles
        another kernel.

    Two stages leave enough shared memory for a concurrent unique part. several: requests have several rows, and there
        is no unique part. Products then take the time, and two programs should fit on a multiprocessor (H200, two
        chunks of 512 after 4096 shared tokens 0.358 -> 0.272 ms).
    """
    if layer.huge:
        return Tile(power_of_two(layer.group), layer.tokens_per_tile(STAGE), 2, 4)
    few = layer.rows * layer.group <= 16
    block_m = max(power_of_two(layer.group), 16 if few else 32 if layer.wide else 64)
    if several and not few and not layer.wide:
        return Tile(block_m, min(64, layer.tokens_per_tile(STAGE)), 3, 4)
    return Tile(block_m, min(32 if layer.wide else 128, layer.tokens_per_tile(LARGE_STAGE)), 2, 4)


def programs_of(layer: Layer, entries: int, beside: bool = False, flat: bool = False) -> int:
    """Returns the programs per KV head, never more than entries. beside: it runs together with a part that is limited
        by memory.

    The number is a multiple of eight if it is large enough: shares then more often end where a list ends.
    """
    per_multiprocessor = PROGRAMS_BESIDE if beside else PROGRAMS_FLAT if flat else PROGRAMS
    most = per_multiprocessor * multiprocessors(layer.query.device) // layer.kv_heads
    return max(1, min(entries, most // 8 * 8 or most))


def merges_early(layer: Layer, programs: int) -> bool:
    """True if the merge starts before this many programs per KV head have ended: only for one row, and if both fit on
    the GPU.

    H200: 512 tokens 8.3 -> 8.0 us, 2560 tokens 9.5 -> 9.2. On a full GPU the merge displaces the programs that it waits
    for (8704 tokens 0.016 -> 0.019 ms, two requests of 4096 tokens 13.4 -> 15.6 us).
    """
    most = PROGRAMS * multiprocessors(layer.query.device)
    fits = programs * layer.kv_heads + layer.heads <= most
    return layer.rows == 1 and fits and starts_early(layer.query.device)
