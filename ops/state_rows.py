"""Rows of a step for operations that keep a state for each request: whose they are, and where states are read and kept.

The tensors have static shapes in a bucket, and all layers of a step read the same ones. Requests with few rows, such as
decodes and the drafts that a step verifies, are computed together, row after row. Rows of prompts are cut to tiles,
which are computed one after the other, each with products over all of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_gaudi_ucm.ops.narrow_floats import put

TILE_ROWS = 64
NO_ROW = -1
"""The row of a pad in a tile."""
SAME_REQUEST = -1
"""The source of a tile that continues from the state after the tile before it."""
NULL_SLOT = 0
"""The slot to which pads write, if they write at all."""


class StateRows(NamedTuple):
    """Rows of a step, as tensors on the device of the states.

    A slot is an index into the states of a layer. A request that begins reads a slot of zeros, which is never written.
    Pads write to `NULL_SLOT`, which no request reads. No request reads a slot that another one writes in this step.

    offsets: int64 [rows] rows of the same request that are before this one in the step.
    row_sources: int64 [rows] slot of the state from which the row's request continues.
    kept_rows: int64 [kept] rows after which the state is kept. kept_at: int64 [kept] slots to which it is written.
    places: int64 [rows] where results of a row are: p >= 0 is entry p of the flattened `few_rows`, and -1 - p is entry
        p of the flattened `tile_rows`.
    few_rows: int64 [requests, few] rows of each request with few rows; `NO_ROW` behind them, and in other requests.
    few_sources: int64 [requests] slots from which they continue.
    few_targets: int64 [requests, few] slots to which the states after these rows are written.
    tile_rows: int64 [tiles, width] rows of each tile, and then `NO_ROW`. Tiles of a request follow each other.
    tile_sources: int64 [tiles] slot of the state from which a tile continues, or `SAME_REQUEST`.
    tile_targets: int64 [tiles] slots to which the states after these tiles are written.

    The arrays of requests with few rows, or these of tiles, may be empty.
    """

    offsets: Tensor
    row_sources: Tensor
    kept_rows: Tensor
    kept_at: Tensor
    places: Tensor
    few_rows: Tensor
    few_sources: Tensor
    few_targets: Tensor
    tile_rows: Tensor
    tile_sources: Tensor
    tile_targets: Tensor

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> StateRows:
        """Picks the fields by their names."""
        return cls(*(tensors[name] for name in cls._fields))

    @classmethod
    def of_one_prompt(cls, rows: int, device: torch.device, width: int = TILE_ROWS) -> StateRows:
        """Makes a step of one prompt, for measurements: it reads slot 1, keeps its state in slot 2, and writes pads to
        slot 0.
        """
        tiles = -(-rows // width)
        index, places = torch.arange(rows, device=device), torch.arange(tiles * width, device=device)
        tile = torch.arange(tiles, device=device)
        one = torch.ones(1, dtype=torch.int64, device=device)
        none = one[:0]
        return cls(
            offsets=index,
            row_sources=one.expand(rows).contiguous(),
            kept_rows=one * (rows - 1),
            kept_at=one * 2,
            places=-1 - index,
            few_rows=none.unsqueeze(1),
            few_sources=none,
            few_targets=none.unsqueeze(1),
            tile_rows=places.masked_fill(places >= rows, NO_ROW).view(tiles, width),
            # of integers, a Gaudi chooses wrongly
            tile_sources=(tile == 0).to(torch.int64) * (1 - SAME_REQUEST) + SAME_REQUEST,
            tile_targets=(tile == tiles - 1).to(torch.int64) * 2,
        )


def plan_state_rows(
    row_starts: NDArray[np.int64],
    sources: NDArray[np.int64],
    kept_rows: NDArray[np.int64],
    kept_at: NDArray[np.int64],
    *,
    few: int = 1,
    width: int = TILE_ROWS,
) -> dict[str, NDArray[np.int64]]:
    """Plans the arrays of `StateRows`, by name.

    Args:
        row_starts: [requests + 1] first row of each request, and the number of rows.
        sources: [requests] slots from which requests continue; the slot of zeros for a request that begins.
        kept_rows: [kept] rows after which the state is kept, in any order. A row may be kept in several slots.
        kept_at: [kept] slots to which it is written.
        few: requests with at most so many rows are computed row after row. They keep each row in one slot at most.
        width: rows of a tile, a power of two.

    Raises:
        ValueError: a request with few rows keeps the state after one of them in two slots, or `width` is no power of
            two.
    """
    if width < 1 or width & (width - 1):
        raise ValueError(f"states: found tiles of {width} rows, expected a power of two")
    requests, rows = len(sources), int(row_starts[-1])
    counts = np.diff(row_starts)
    owners = np.repeat(np.arange(requests), counts)
    offsets = np.arange(rows) - row_starts[owners]
    is_few = counts <= few
    few_rows = np.full((requests, few), NO_ROW, np.int64)
    few_targets = np.full((requests, few), NULL_SLOT, np.int64)
    alone = np.flatnonzero(is_few[owners])
    few_rows[owners[alone], offsets[alone]] = alone
    kept_few = is_few[owners[kept_rows]]
    if len(np.unique(kept_rows[kept_few])) < kept_few.sum():
        raise ValueError(f"states: found a row of a request with at most {few} rows kept in two slots, expected one")
    few_targets[owners[kept_rows[kept_few]], offsets[kept_rows[kept_few]]] = kept_at[kept_few]
    places = owners * few + offsets
    tiles = _Tiles(width)
    for request in np.flatnonzero(~is_few).tolist():
        begin, end = int(row_starts[request]), int(row_starts[request + 1])
        mine = np.flatnonzero((kept_rows >= begin) & (kept_rows < end))
        mine = mine[np.argsort(kept_rows[mine], kind="stable")]
        kept = list(zip(kept_rows[mine].tolist(), kept_at[mine].tolist(), strict=True))
        tiles.add(begin, end, int(sources[request]), kept)
    tile_rows = np.array(tiles.rows, np.int64).reshape(-1, width)
    flat = tile_rows.reshape(-1)
    used = np.flatnonzero(flat != NO_ROW)
    places[flat[used]] = -1 - used
    return {
        "offsets": offsets,
        "row_sources": sources[owners],
        "kept_rows": np.ascontiguousarray(kept_rows),
        "kept_at": np.ascontiguousarray(kept_at),
        "places": places,
        "few_rows": few_rows,
        "few_sources": np.where(is_few, sources, NULL_SLOT),
        "few_targets": few_targets,
        "tile_rows": tile_rows,
        "tile_sources": np.array(tiles.sources, np.int64),
        "tile_targets": np.array(tiles.targets, np.int64),
    }


class _Tiles:
    """The tiles of a step while they are planned."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.rows: list[list[int]] = []
        self.sources: list[int] = []
        self.targets: list[int] = []

    def add(self, begin: int, end: int, source: int, kept: Sequence[tuple[int, int]]) -> None:
        """Adds rows [begin, end) of a request. kept: (row, slot) in the order of rows; a tile ends behind each.

        A tile without rows writes the state of the tile before it to one more slot.
        """
        for row, slot in (*kept, (end - 1, NULL_SLOT)):
            first = True
            while begin <= row or first:
                behind = min(begin + self._width, row + 1)
                if behind == begin and slot == NULL_SLOT:
                    break
                pads = self._width - (behind - begin)
                self.rows.append([*range(begin, behind), *(NO_ROW for _ in range(pads))])
                self.sources.append(source)
                self.targets.append(slot if behind == row + 1 else NULL_SLOT)
                source, begin, first = SAME_REQUEST, behind, False


def most_tiles(rows: int, requests: int, few: int, kept: int, width: int = TILE_ROWS) -> int:
    """Returns the largest number of tiles of a step with so many rows and requests.

    kept: states that the requests with tiles keep, each of which may cut a tile, at most.
    """
    longs = min(requests, rows // (few + 1))
    return 0 if not longs else rows // width + longs + kept


def collect(step: StateRows, of_few: Tensor | None, of_tiles: Tensor | None) -> Tensor:
    """Returns results in the order of rows, [rows, ...].

    of_few: [requests, few, ...]. of_tiles: [tiles, width, ...]. One of them may be None.
    """
    if of_few is not None:
        in_few = of_few.flatten(0, 1).index_select(0, step.places.clamp(min=0))
    if of_tiles is not None:
        in_tiles = of_tiles.flatten(0, 1).index_select(0, (-1 - step.places).clamp(min=0))
    if of_few is None:
        assert of_tiles is not None, "a step has rows"
        return in_tiles
    if of_tiles is None:
        return in_few
    is_few = (step.places >= 0).view(-1, *(1,) * (in_few.dim() - 1))
    return torch.where(is_few, in_few, in_tiles)


Update = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Computes a row of results, [lanes, ...], from a state, [lanes, ...], and a row of each input, [lanes, ...]. The state
becomes the one after the row, in place.
"""


def recur(step: StateRows, states: Tensor, inputs: Sequence[Tensor], update: Update) -> Tensor:
    """Computes rows by definition, one after the other: few rows of all requests together, and then the rows of tiles.

    states: [slots, ...], written in place. inputs: [rows, ...] each. Static shapes, and nothing is read on the host.
    Returns the results of `update`, [rows, ...].
    """
    of_few = of_tiles = None
    if step.few_rows.numel():
        of_few = recur_few(step, states, inputs, update)
    if step.tile_rows.numel():
        of_tiles = _recur_tiles(step, states, inputs, update)
    return collect(step, of_few, of_tiles)


def recur_few(step: StateRows, states: Tensor, inputs: Sequence[Tensor], update: Update) -> Tensor:
    """Computes requests with few rows, see `recur`; returns [requests, few, ...]."""
    taken = [take_rows(each, step.few_rows) for each in inputs]
    wide = wide_dtype(states, inputs[0])
    state = states.index_select(0, step.few_sources).to(wide)
    after, found = [], []
    few = step.few_rows.shape[1]
    for index in range(few):
        # states after pads are written to the null slot
        found.append(update(state, [each[:, index].to(wide) for each in taken]))
        after.append(state.clone() if index + 1 < few else state)
    put(states, 0, step.few_targets.flatten(), _joined(after).flatten(0, 1).to(states.dtype))
    return _joined(found)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].unsqueeze(1) if len(parts) == 1 else torch.stack(tuple(parts), 1)


def _recur_tiles(step: StateRows, states: Tensor, inputs: Sequence[Tensor], update: Update) -> Tensor:
    taken = [take_rows(each, step.tile_rows) for each in inputs]
    wide = wide_dtype(states, inputs[0])
    loaded = states.index_select(0, step.tile_sources.clamp(min=0)).to(wide)
    state, after, found = loaded[:1], [], []
    for tile in range(len(step.tile_rows)):
        state = torch.where(step.tile_sources[tile] == SAME_REQUEST, state, loaded[tile : tile + 1])
        for index in range(step.tile_rows.shape[1]):
            new = state.clone()
            found.append(update(new, [each[tile, index : index + 1].to(wide) for each in taken]))
            # a choice, not a product: pads may have computed NaN
            state = torch.where(step.tile_rows[tile, index] == NO_ROW, state, new)
        after.append(state)
    put(states, 0, step.tile_targets, torch.cat(after).to(states.dtype))
    return torch.cat(found).unflatten(0, tuple(step.tile_rows.shape))


def take_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """Returns rows [n, ...] in the places of `ids`, [*ids.shape, ...]; a pad has the numbers of row 0."""
    return rows.index_select(0, ids.clamp(min=0).flatten()).unflatten(0, tuple(ids.shape))


def rows_together(rows: Tensor) -> Tensor:
    """Returns rows [n, ...] whose numbers follow each other; between rows there may be gaps."""
    return rows if rows[:1].is_contiguous() else rows.contiguous()


def wide_dtype(states: Tensor, rows: Tensor) -> torch.dtype:
    """Returns the dtype of numbers in between: float32, or float64 if states or rows are."""
    return torch.promote_types(torch.promote_types(states.dtype, torch.float32), rows.dtype)
