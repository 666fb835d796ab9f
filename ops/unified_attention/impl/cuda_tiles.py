"""Tile sizes of the CUDA kernels: rows times heads, keys of a step, pipeline stages, warps. Measured on an H200."""

from __future__ import annotations

from typing import NamedTuple

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_layer import Layer, multiprocessors, power_of_two

# Programs of the kernels over the cache, per multiprocessor.
PROGRAMS = 2


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
    block_m = min(32 if layer.wide else 128, power_of_two(layer.rows))
    return Tile(block_m, layer.tokens_per_tile(64), 3, 8 if block_m >= 128 else 4)


def spans_tile(layer: Layer, rows: int) -> Tile:
    """rows: of a span."""
    return Tile(power_of_two(rows * layer.group), layer.tokens_per_tile(128), 3, 4)


def shared_tile(layer: Layer) -> Tile:
    most = 32 if layer.wide else 128
    block_m = max(power_of_two(layer.group), min(most, power_of_two(layer.rows * layer.group)))
    return Tile(block_m, layer.tokens_per_tile(64), 3, 8 if block_m >= 128 else 4)


def programs_of(layer: Layer, tile: Tile, entries: int) -> int:
    """Programs per kv head, never more than there are entries."""
    return max(1, min(entries, PROGRAMS * multiprocessors(layer.query.device) // layer.kv_heads))
