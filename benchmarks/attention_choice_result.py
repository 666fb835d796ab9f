"""What the benchmark of attention's choice found: regret against the best way, and what splitting is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.attention_case import Case
from vllm_gaudi_ucm.ops.unified_attention.cost.way import Way


@dataclass
class CaseResult:
    """seconds: samples by way. chosen: what the model chose."""

    case: Case
    chosen: Way
    seconds: dict[Way, list[float]] = field(default_factory=dict)

    def least(self, way: Way) -> float:
        return min(self.seconds[way])

    def regret(self) -> float:
        """How much longer the chosen way took than the best one, as a share."""
        return self.least(self.chosen) / min(self.least(way) for way in self.seconds) - 1

    def against(self, *, split: bool) -> float | None:
        """How many times as long as the choice it took to split all, or none, of the shared groups."""
        ways = [way for way in self.seconds if way.implementation == self.chosen.implementation]
        if not any(way.unsplit for way in ways):
            return None
        return min(self.least(way) for way in ways if bool(way.unsplit) != split) / self.least(self.chosen)


def report(results: Sequence[CaseResult], console: Console) -> None:
    """A line per step, and the means."""
    table = Table(title="choice by the fitted cost model", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("step", "prefix", "chosen", "ms", "regret", "all split", "none split"):
        table.add_column(heading, justify="left" if heading in ("step", "chosen") else "right", no_wrap=True)
    for row in results:
        ratios = [row.against(split=True), row.against(split=False)]
        chosen = row.chosen.implementation + (", not split" if row.chosen.unsplit else "")
        cells = ["-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
        milliseconds = f"{row.least(row.chosen) * 1e3:.2f}"
        table.add_row(row.case.name, str(row.case.shared), chosen, milliseconds, f"{row.regret():.1%}", *cells)
    console.print(table)
    for key, value in summary(results).items():
        console.print(f"{key}: {value:.3f}")


def summary(results: Sequence[CaseResult]) -> dict[str, float]:
    """Regret over the grid, and the geometric means of the time of always and of never splitting over the choice's."""
    split = [ratio for row in results if (ratio := row.against(split=True)) is not None]
    none = [ratio for row in results if (ratio := row.against(split=False)) is not None]
    total = sum(row.least(row.chosen) for row in results)
    best = sum(min(row.least(way) for way in row.seconds) for row in results)
    return {
        "mean regret": float(np.mean([row.regret() for row in results])),
        "largest regret": max(row.regret() for row in results),
        "regret of the sum": total / best - 1,
        "always splitting, geometric mean": math.exp(float(np.mean(np.log(split)))),
        "never splitting, geometric mean": math.exp(float(np.mean(np.log(none)))),
        "never splitting, least": min(none),
    }


def to_json(results: Sequence[CaseResult]) -> dict[str, object]:
    """Every sample, and the summary."""

    def named(way: Way) -> str:
        return way.implementation + ("/unsplit" if way.unsplit else "")

    rows = [
        {
            "step": row.case.name,
            "requests": row.case.requests,
            "prefix": row.case.shared,
            "chosen": named(row.chosen),
            "regret": row.regret(),
            "seconds": {named(way): seconds for way, seconds in row.seconds.items()},
        }
        for row in results
    ]
    return {"threads": torch.get_num_threads(), "summary": summary(results), "rows": rows}
