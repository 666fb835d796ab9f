"""Divides a product of rows and a weight among the programs of a Triton kernel."""

from __future__ import annotations

from typing import NamedTuple

# Programs that keep the device busy, by their rows.
PROGRAMS = {16: 896, 32: 200, 64: 200}


class LinearTiles(NamedTuple):
    """Tile sizes of the kernel: rows and outputs of a program, parts that the inputs are split into, and Triton's own
    options.
    """

    rows: int
    outputs: int
    splits: int = 1
    warps: int = 4
    stages: int = 3

    def grid(self, rows: int, outputs: int) -> tuple[int, int, int]:
        return -(-rows // self.rows), -(-outputs // self.outputs), self.splits


def tiles_of(rows: int, outputs: int, groups: int) -> LinearTiles:
    """Returns the tile sizes for products of this many rows; groups: groups of inputs."""
    tile = next(size for size in (16, 32, 64, 128) if size >= min(rows, 128))
    if tile == 128:
        return LinearTiles(128, 128, warps=8)
    columns = 128 if tile == 16 else 64
    programs, most = -(-outputs // columns), 8 if tile == 16 else 4
    splits = 1
    # each program gets at least some groups
    while splits < most and programs * splits < PROGRAMS[tile] and groups >= 8 * splits:
        splits *= 2
    return LinearTiles(tile, columns, splits, stages=3 if splits == 1 or tile == 16 else 4)
