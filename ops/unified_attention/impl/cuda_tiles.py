"""Tile sizes of the CUDA kernels: rows times heads, keys of a step, pipeline stages, warps. Measured on an H200."""

from __future__ import annotations

from typing import NamedTuple

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_layer import Layer, multiprocessors, power_of_two, starts_early

# Programs of a kernel over the cache, per multiprocessor; one, where it is to leave room for another part.
PROGRAMS, PROGRAMS_BESIDE, PROGRAMS_FLAT = 2, 1, 4
# Bytes of keys and values of one step of a loop: what is bound by memory asks for more at once.
STAGE, LARGE_STAGE = 32 * 1024, 64 * 1024
# Tiles of fp32 are smaller throughout: their products are unrolled into single multiplications, which the compiler and
# the registers feel.


class Tile(NamedTuple):
    """block_m: rows, or rows times query heads of one kv head; block_n: keys of a step of the loop."""

    block_m: int
    block_n: int
    stages: int
    warps: int

    def sizes(self) -> dict[str, int]:
        """As arguments of a launch."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "STAGES": self.stages,
            "num_warps": self.warps,
        }


def causal_tile(layer: Layer) -> Tile:
    """block_m: rows."""
    if layer.wide:
        return Tile(32, min(32, layer.tokens_per_tile(STAGE)), 2, 4)
    return Tile(64, min(64, layer.tokens_per_tile(STAGE)), 3, 4)


def spans_tile(layer: Layer, rows: int) -> Tile:
    """rows: of a span."""
    most = 64 if layer.wide else 128
    block_m = power_of_two(rows * layer.group)
    return Tile(block_m, min(most, layer.tokens_per_tile(LARGE_STAGE)), 2, 8 if block_m >= 128 else 4)


def flat_spans_tile(layer: Layer, block_size: int, beside: bool) -> Tile | None:
    """For single rows in one loop over all entries, which also keeps queries in its stages; None where it does not fit.

    beside: as of `programs_of`; fewer programs ask for more at once.
    """
    block_m = power_of_two(layer.group)
    most, stage = (128, LARGE_STAGE) if beside else (64, STAGE)
    tile = Tile(block_m, min(most, layer.tokens_per_tile(stage)), 3, 4)
    fits = not layer.wide and block_m <= (16 if beside else 32) and block_size % tile.block_n == 0
    return tile if fits else None


def shared_tile(layer: Layer) -> Tile:
    """Two sizes of block_m, for each is a kernel of its own to compile: one for few rows, one for many.

    Two stages leave the shared memory that the unique part needs beside it.
    """
    few = layer.rows * layer.group <= 16
    block_m = max(power_of_two(layer.group), 16 if few else 32 if layer.wide else 64)
    return Tile(block_m, min(32 if layer.wide else 128, layer.tokens_per_tile(LARGE_STAGE)), 2, 4)


def programs_of(layer: Layer, entries: int, beside: bool = False, flat: bool = False) -> int:
    """Programs per kv head, never more than there are entries. beside: it runs beside a part that is bound by memory.

    A multiple of eight, where there are so many: shares then end more often where a list does.
    """
    per_multiprocessor = PROGRAMS_BESIDE if beside else PROGRAMS_FLAT if flat else PROGRAMS
    most = per_multiprocessor * multiprocessors(layer.query.device) // layer.kv_heads
    return max(1, min(entries, most // 8 * 8 or most))


def merges_early(layer: Layer, programs: int) -> bool:
    """Whether the merge starts before so many programs per kv head have ended: of one row, where both have room.

    H200: 512 tokens 8.3 -> 8.0 us, 2560 tokens 9.5 -> 9.2; where the GPU is full, the merge takes the place of what it
    waits for (8704 tokens 0.016 -> 0.019 ms, two requests of 4096 13.4 -> 15.6 us).
    """
    most = PROGRAMS * multiprocessors(layer.query.device)
    fits = programs * layer.kv_heads + layer.heads <= most
    return layer.rows == 1 and fits and starts_early(layer.query.device)
