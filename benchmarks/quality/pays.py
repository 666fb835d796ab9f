"""Prints for which steps a choice of blocks is expected to pay on a Gaudi 2, from a model: bytes and fixed costs.

Llama 3.1 8B in bfloat16, blocks of 128, summaries `box_mean`, decodes at their true sizes. Nothing is measured.
"""

from __future__ import annotations

from typing import NamedTuple

from vllm_gaudi_ucm.graphs.cost.specs import DEVICES

LAYERS, BLOCK = 32, 128
WEIGHTS, BLOCK_BYTES, SUMMARY_BYTES = 16.06e9, 16 << 20, 1 << 20
LIVE, LEAST, STEP_SECONDS = 3, 4, 2e-4
STEPS = ((1, 32768), (1, 131072), (8, 8192), (8, 32768), (32, 4096), (32, 32768))


class Case(NamedTuple):
    """gather: the share of the bandwidth at which single blocks are read. layer_seconds: fixed cost of a choice."""

    gather: float
    layer_seconds: float


CASES = {"low": Case(0.5, 120e-6), "expected": Case(1.0, 60e-6), "high": Case(1.0, 30e-6)}


def gain(requests: int, context: int, ratio: float, case: Case) -> float:
    """Returns the time of a dense step over a step of GSA. ratio: the share of blocks that is attended."""
    bandwidth, blocks = DEVICES["gaudi2"].bandwidth, context // BLOCK
    chosen = requests * max(LEAST, int(blocks * ratio)) * BLOCK_BYTES
    scored = requests * max(0, blocks - LIVE) * SUMMARY_BYTES
    fixed = LAYERS * case.layer_seconds + STEP_SECONDS
    dense = (WEIGHTS + requests * blocks * BLOCK_BYTES) / bandwidth
    return dense / (WEIGHTS / bandwidth + (chosen + scored) / (bandwidth * case.gather) + fixed)


def main() -> None:
    print("| requests x context | 10 %: low, expected, high | 30 %: low, expected, high |\n|---|---|---|")
    for requests, context in STEPS:
        ranges = [", ".join(f"{gain(requests, context, r, case):.2f}" for case in CASES.values()) for r in (0.1, 0.3)]
        print(f"| {requests} x {context // 1024}K | {ranges[0]} | {ranges[1]} |")


if __name__ == "__main__":
    main()
