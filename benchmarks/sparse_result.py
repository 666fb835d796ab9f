"""The measurements of a method under a budget, their table, and a comparison with the goals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.sparse_methods import ORACLE

DENSE = "dense"
# Of dense accuracy at 30 % of the blocks, and behind the exact top-k (oracle) at 5 %.
SHARE_OF_DENSE, BEHIND_ORACLE = 0.99, 0.02
FIGURES = ("recall", "divergence", "agreement", "right")
HEADINGS = {
    "recall": "attention-mass recall, %",
    "divergence": "KL from dense, millinats",
    "agreement": "same greedy token, %",
    "right": "look-ups right, %",
}
_SCALES = {"recall": 100.0, "divergence": 1000.0, "agreement": 100.0, "right": 100.0}


@dataclass(frozen=True)
class Result:
    """One method at one ratio: recall, agreement and right are shares, divergence is in nats."""

    block_size: int
    method: str
    ratio: float
    recall: float
    recall_of_layers: list[float]
    divergence: float
    agreement: float
    right: float


def table(results: Sequence[Result]) -> str:
    """One line for each method, one column for each figure and ratio; results of one block size."""
    ratios = sorted({result.ratio for result in results if result.method != DENSE})
    head = " " * 13 + "".join(f"  {HEADINGS[figure]:<{7 * len(ratios)}}" for figure in FIGURES)
    lines = [head, f"{'method':<13}" + ("  " + "".join(f"{100 * ratio:6.0f}%" for ratio in ratios)) * len(FIGURES)]
    for method in dict.fromkeys(result.method for result in results):
        by_ratio = {result.ratio: result for result in results if result.method == method}
        line = f"{method:<13}"
        for figure in FIGURES:
            found = (getattr(by_ratio.get(ratio, by_ratio.get(1.0)), figure) for ratio in ratios)
            line += "  " + "".join(f"{_SCALES[figure] * value:7.1f}" for value in found)
        lines.append(line)
    return "\n".join(lines)


def goals(results: Sequence[Result]) -> Iterator[str]:
    """Compares the look-ups of every method with the goals, for results of one block size with a dense one."""
    right = {(result.method, result.ratio): result.right for result in results}
    dense = right[DENSE, 1.0]
    ratios = sorted(ratio for method, ratio in right if method == ORACLE)
    low, high = ratios[0], ratios[-1]
    for method in dict.fromkeys(result.method for result in results if result.method not in (DENSE, ORACLE)):
        share, behind = right[method, high] / dense, right[ORACLE, low] - right[method, low]
        yield (
            f"{method:<13} {100 * share:6.1f} % of dense at {high:.0%} {_verdict(share >= SHARE_OF_DENSE)}   "
            f"{100 * behind:6.1f} points behind the oracle at {low:.0%} {_verdict(behind <= BEHIND_ORACLE)}"
        )


def _verdict(met: bool) -> str:
    return "(met)" if met else "(not met)"
