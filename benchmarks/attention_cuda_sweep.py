"""Compares decodes over a grid of requests and shared prefixes with vLLM's Triton kernels, and a mixed batch with its
halves: `python -m benchmarks.attention --device cuda --sweep`.

Like `attention_cuda`: one layer, bf16, CUDA graphs, interleaved, every result compared with float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.attention_cuda_case import Case, Request
from benchmarks.attention_cuda_result import OURS, Result

REQUESTS = (1, 4, 16, 64, 256)
PREFIXES = (0, 512, 2048, 8192, 32768)
OWN = 512
PROMPT, DECODES, CONTEXT = 2048, 32, 4096
MIXED_GOAL = 1.15  # times the longer of its halves

Measure = Callable[[Case], Result]


def cases() -> Iterator[Case]:
    """A prefix of one request alone is no shared one: its blocks have one user."""
    for count in REQUESTS:
        for prefix in PREFIXES:
            request = Request(prefix + OWN - 1, 1, prefix if count > 1 else 0)
            yield Case(f"{count} decodes, prefix {prefix}", (request,) * count, 0.0)


def mixed_cases() -> tuple[Case, Case, Case]:
    """The batch, its prompt alone, its decodes alone."""
    decodes, prompt = (Request(CONTEXT - 1, 1),) * DECODES, (Request(0, PROMPT),)
    return Case("mixed", (*decodes, *prompt), 0.0), Case("prompt", prompt, 0.0), Case("decodes", decodes, 0.0)


def sweep(measure: Measure, console: Console) -> list[Result]:
    """Measures and prints."""
    grid = [measure(case) for case in cases()]
    console.print(_table(grid))
    print(_verdict(grid))
    print(f"largest relative error: {max(one.errors[OURS] for one in grid):.1e}")
    halves = [measure(case) for case in mixed_cases()]
    mixed, prompt, decodes = (one.milliseconds[OURS] for one in halves)
    print(
        f"mixed ({PROMPT} + {DECODES} x {CONTEXT}) {mixed:.3f} ms, prompt alone {prompt:.3f}, decodes alone "
        f"{decodes:.3f}: {mixed / max(prompt, decodes):.2f}x the longer one, goal {MIXED_GOAL}x"
    )
    return [*grid, *halves]


def _verdict(grid: Sequence[Result]) -> str:
    if all(set(one.milliseconds) == {OURS} for one in grid):
        return "not compared: vLLM's Triton kernels cannot be imported here"
    lost = [f"{one.name} ({_ratio(one):.2f}x)" for one in grid if not _ratio(one) >= 1]
    return "slower than vLLM's Triton kernels: " + (", ".join(lost) or "in no cell")


def _ratio(result: Result) -> float:
    """The better of the peer's kernels over ours; NaN if vLLM is not installed."""
    peers = [ms for name, ms in result.milliseconds.items() if name != OURS]
    return min(peers, default=float("nan")) / result.milliseconds[OURS]


def _table(grid: Sequence[Result]) -> Table:
    table = Table(title="ms of ours (times as fast as the better of vLLM's)", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("requests", justify="right")
    for prefix in PREFIXES:
        table.add_column(f"{prefix} + {OWN}", justify="right", no_wrap=True)
    for index, count in enumerate(REQUESTS):
        row = grid[index * len(PREFIXES) : (index + 1) * len(PREFIXES)]
        table.add_row(str(count), *(f"{one.milliseconds[OURS]:.3f} ({_ratio(one):.2f}x)" for one in row))
    return table
