"""What a fit of attention's cost says: predicted and measured seconds of its steps, what is chosen, and the regret."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_gaudi_ucm.counted import counted
from vllm_gaudi_ucm.ops.unified_attention.cost.cost_model import CostModel
from vllm_gaudi_ucm.ops.unified_attention.cost.fit import Measured
from vllm_gaudi_ucm.ops.unified_attention.cost.grid import Step
from vllm_gaudi_ucm.ops.unified_attention.cost.way import Way, candidates, cheapest_way, seconds_of

WIDTH = 120  # columns that the table needs


@dataclass(frozen=True)
class StepRow:
    """A step of the grid: measured and predicted seconds of a layer, by way; chosen is one of these."""

    step: Step
    heads: str
    measured: dict[Way, float]
    predicted: dict[Way, float]
    chosen: Way

    @property
    def regret(self) -> float:
        """How much longer the chosen way takes than the fastest, as a share of that."""
        return self.measured[self.chosen] / min(self.measured.values()) - 1

    def errors(self) -> list[float]:
        """Of the predictions of ways that are near the fastest, as shares of what was measured."""
        near = 2 * min(self.measured.values())
        return [abs(self.predicted[way] / seconds - 1) for way, seconds in self.measured.items() if seconds <= near]


@dataclass(frozen=True)
class FitReport:
    """rows: the steps that were measured, in their order."""

    rows: list[StepRow]

    @classmethod
    def of(cls, model: CostModel, measured: Sequence[Measured], device_type: str) -> Self:
        return cls([_row(model, one, device_type) for one in measured])

    def summary(self) -> dict[str, float]:
        """Shares, over all steps."""
        return {
            "mean_regret": round(statistics.mean(row.regret for row in self.rows), 4),
            "largest_regret": round(max(row.regret for row in self.rows), 4),
            "median_error": round(statistics.median(error for row in self.rows for error in row.errors()), 4),
        }

    def to_json(self) -> list[dict[str, Any]]:
        """A list entry per step."""
        return [
            {
                "heads": row.heads,
                **row.step._asdict(),
                "chosen": way_name(row.chosen),
                "regret": row.regret,
                "measured": {way_name(way): seconds for way, seconds in row.measured.items()},
                "predicted": {way_name(way): seconds for way, seconds in row.predicted.items()},
            }
            for row in self.rows
        ]


def way_name(way: Way) -> str:
    """`native`, or `native, not split`."""
    return way.implementation + (", not split" if way.unsplit else "")


def show(report: FitReport) -> None:
    """Prints a line per step and the summary."""
    table = Table(title="attention of one layer, milliseconds", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("heads", no_wrap=True)
    table.add_column("step", no_wrap=True)
    for heading in ("chosen", "measured", "predicted", "regret"):
        table.add_column(heading, justify="left" if heading == "chosen" else "right", no_wrap=True)
    for row in report.rows:
        milliseconds = [f"{seconds[row.chosen] * 1e3:.2f}" for seconds in (row.measured, row.predicted)]
        table.add_row(row.heads, _words(row.step), way_name(row.chosen), *milliseconds, f"{row.regret:.1%}")
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    console.print(table)
    summary = report.summary()
    console.print(
        f"regret {summary['mean_regret']:.1%} in the mean, {summary['largest_regret']:.1%} at most; "
        f"predictions are off by {summary['median_error']:.0%} in the median"
    )


def _row(model: CostModel, one: Measured, device_type: str) -> StepRow:
    chosen = cheapest_way(model, one.uses, one.shape, candidates(device_type))
    measured = {way: one.seconds(way) for way in one.layer_seconds}
    if chosen not in measured:  # not measured here because it was hopeless, or too long a step for it
        raise ValueError(
            f"the fit chooses {way_name(chosen)} for {_words(one.step)}, which was not measured: repeat it"
        )
    layers = one.shape.layers
    predicted = {way: seconds_of(model, one.uses, one.shape, way) / layers for way in measured}
    heads = f"{one.shape.heads}/{one.shape.kv_heads} x {one.shape.dim}, {one.shape.element_size * 8} bit"
    return StepRow(one.step, heads, measured, predicted, chosen)


def _words(step: Step) -> str:
    kinds = [counted(step.decodes, "decode")] if step.decodes else []
    kinds += [f"{counted(step.chunks, 'chunk')} of {step.new}"] if step.chunks else []
    kinds += [counted(step.prefix, "shared block")] if step.prefix else []
    kinds += [counted(step.own, "own token")] if step.own else []
    return ", ".join(kinds) + (" (slice)" if step.sliced else "")
