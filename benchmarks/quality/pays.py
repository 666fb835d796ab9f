"""Prints for which steps a choice of blocks is expected to pay on a Gaudi 2, from a model: bytes and fixed costs.

Llama 3.1 8B in bfloat16, blocks of 128, decodes at their true sizes, prompts in chunks. Nothing is measured.
"""

from __future__ import annotations

from typing import NamedTuple

from vllm_gaudi_ucm.graphs.cost.specs import DEVICES
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm.sparse.selection.selection_limits import SCORED_ROWS

LAYERS, BLOCK, HEADS, DIM = 32, 128, 32, 128
WEIGHTS, BLOCK_BYTES, SUMMARY_BYTES = 16.06e9, 16 << 20, 1 << 20
EXPANDED = 8 * 8 * LAYERS * SummaryKind.CODES.products(BLOCK, DIM)
"""Bytes of a block whose sign codes, of 8 KV heads, are written out as float32 and read again."""
LIVE, LEAST, STEP_SECONDS = 3, 4, 2e-4
STEPS = ((1, 32768), (1, 131072), (8, 8192), (8, 32768), (32, 4096), (32, 32768))
PROMPTS, CHUNK, TILE = (16384, 32768, 131072), 8192, BlockOptions().prompt_tile
PRODUCTS = 0.7
"""The share of the peak that products with weights reach in prompts; assumed, as are the shares of attention below."""


class Case(NamedTuple):
    """gather: the share of the bandwidth at which single blocks are read. layer_seconds: fixed cost of a choice.
    attention: the share of the peak that the attention of prompts reaches.
    """

    gather: float
    layer_seconds: float
    attention: float


CASES = {"low": Case(0.5, 120e-6, 0.7), "expected": Case(1.0, 60e-6, 0.5), "high": Case(1.0, 30e-6, 0.35)}


def gain(requests: int, context: int, ratio: float, case: Case, scored_bytes: float = SUMMARY_BYTES) -> float:
    """Returns the time of a dense step over a step of GSA. ratio: the share of blocks that is attended. scored_bytes:
    what the score of a block moves.
    """
    bandwidth, blocks = DEVICES["gaudi2"].bandwidth, context // BLOCK
    chosen = requests * max(LEAST, int(blocks * ratio)) * BLOCK_BYTES
    scored = requests * max(0, blocks - LIVE) * scored_bytes
    fixed = LAYERS * case.layer_seconds + STEP_SECONDS
    dense = (WEIGHTS + requests * blocks * BLOCK_BYTES) / bandwidth
    return dense / (WEIGHTS / bandwidth + (chosen + scored) / (bandwidth * case.gather) + fixed)


def prompt_gain(tokens: int, ratio: float, case: Case) -> float:
    """Returns the time of a dense prompt over a prompt with `prompt_ratio`, whose first chunk is dense, too.

    The blocks of each tile are copied next to each other and read again. Scores are products of `box_mean`.
    """
    device = DEVICES["gaudi2"]
    of_pair = LAYERS * 4 * HEADS * DIM
    score = LAYERS * 2 * HEADS * SummaryKind.BOX_MEAN.products(BLOCK, DIM)
    dense = sparse = 0.0
    for begin in range(0, tokens, CHUNK):
        both = WEIGHTS * CHUNK / (PRODUCTS * device.flops)
        attention, before = of_pair * CHUNK * CHUNK / 2, of_pair * CHUNK * begin
        dense += both + (attention + before) / (case.attention * device.flops)
        sparse += both
        if begin:
            blocks, tiles = begin // BLOCK, CHUNK // TILE
            chosen = max(LEAST, int(blocks * ratio))
            attention += before * chosen / blocks + score * SCORED_ROWS * tiles * blocks
            copied = 3 * tiles * chosen * BLOCK_BYTES
            sparse += copied / (case.gather * device.bandwidth) + LAYERS * case.layer_seconds + 2 * STEP_SECONDS
        sparse += attention / (case.attention * device.flops)
    return dense / sparse


def main() -> None:
    print("| requests x context | 10 %: low, expected, high | 30 %: low, expected, high |\n|---|---|---|")
    for requests, context in STEPS:
        ranges = [_range([gain(requests, context, r, case) for case in CASES.values()]) for r in (0.1, 0.3)]
        print(f"| {requests} x {context // 1024}K | {ranges[0]} | {ranges[1]} |")
    print("\n| prompt | 20 %: low, expected, high | 30 %: low, expected, high |\n|---|---|---|")
    for tokens in PROMPTS:
        ranges = [_range([prompt_gain(tokens, r, case) for case in CASES.values()]) for r in (0.2, 0.3)]
        print(f"| {tokens // 1024}K | {ranges[0]} | {ranges[1]} |")
    best = max(gain(requests, context, 0.1, CASES["high"], EXPANDED) for requests, context in STEPS)
    print(f"\nSummaries `codes`, whose signs become floats: at most {best:.2f} at 10 %.")


def _range(gains: list[float]) -> str:
    return ", ".join(f"{one:.2f}" for one in gains)


if __name__ == "__main__":
    main()
