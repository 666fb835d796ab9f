"""What `gaudi-ucm tune` found out: padding, the bound, and the other strategies at the same count of graphs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.padding import Padding, measure_padding
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm.graphs.strategies import BLIND_STRATEGIES, build_buckets
from vllm_gaudi_ucm.graphs.strategies.request import BucketRequest
from vllm_gaudi_ucm.graphs.tuning.certify import Certified
from vllm_gaudi_ucm.graphs.tuning.tune import check_steps
from vllm_gaudi_ucm.options.counted import counted


@dataclass(frozen=True)
class TuneReport:
    """Buckets tuned to `steps` and a share `margin` of larger ones; `later` are steps of the log that were held out."""

    certified: Certified
    steps: Steps
    max_graphs: int
    margin: float
    later: Steps | None

    @property
    def buckets(self) -> BucketSet:
        return self.certified.buckets

    @cached_property
    def padding(self) -> Padding:
        return measure_padding(self.buckets, self.steps)

    @cached_property
    def later_padding(self) -> Padding | None:
        if self.later is None:
            return None
        check_steps(self.later, self.buckets.limits)
        return measure_padding(self.buckets, self.later)

    @property
    def fitted_ratio(self) -> float:
        """Padded over true cost of what was tuned to: with a margin, larger steps are part of it."""
        return self.certified.seconds / self.certified.true_seconds

    @property
    def bound_ratio(self) -> float:
        """Cost ratio that no set of as many graphs undercuts on what was tuned to."""
        return self.certified.bound / self.certified.true_seconds

    @cached_property
    def others(self) -> dict[str, Padding]:
        """The other strategies, with as many graphs as the tuned buckets may have."""
        limits, cost = self.buckets.limits, self.buckets.cost
        request = BucketRequest(limits, cost, self.max_graphs)
        return {name: measure_padding(build_buckets(name, request), self.steps) for name in BLIND_STRATEGIES}

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        later = self.later_padding
        return {
            "steps": self.steps.count,
            "distinct_shapes": len(self.steps.forward),
            "graphs": self.buckets.num_graphs,
            "forward_graphs": len(self.buckets.forward),
            "logits_graphs": len(self.buckets.logits),
            "padding": self.padding.to_json(),
            "margin": self.margin,
            "fitted_ratio": round(self.fitted_ratio, 5),
            "bound_ratio": round(self.bound_ratio, 5),
            "gap_at_most": round(self.certified.gap, 5),
            "held_out": later and {"steps": later.used.sum().item(), **later.to_json()},
            "other_strategies": {
                name: {"graphs": padding.buckets.num_graphs, **padding.to_json()}
                for name, padding in self.others.items()
            },
            "forward": [shape.to_list() for shape in self.buckets.forward],
            "logits": list(self.buckets.logits),
        }


def show(report: TuneReport, output: Path | None) -> None:
    """Print the comparison, the gap, and where the buckets went."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    shapes = len(report.steps.forward)
    console.print(
        f"{counted(report.steps.count, 'step')} of {counted(shapes, 'shape')}; "
        "padded over true cost (modelled) and sizes"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy")
    for heading in ("graphs", "cost", *report.padding.axes):
        table.add_column(heading, justify="right")
    table.add_row(*_cells("tuned", report.padding), style="bold")
    if report.later_padding is not None:
        table.add_row(*_cells("tuned, held-out steps", report.later_padding))
    for name, padding in report.others.items():
        table.add_row(*_cells(name, padding))
    console.print(table)
    fitted = f"these steps, {report.margin:.0%} of their weight on larger ones" if report.margin else "these steps"
    console.print(
        f"What was tuned to ({fitted}) costs {report.fitted_ratio:.3f}x in these graphs; "
        f"no {report.max_graphs} graphs can cost it less than {report.bound_ratio:.3f}x: "
        f"the tuned ones are at most {report.certified.gap:.1%} above the optimum."
    )
    if output is not None:
        console.print(f"buckets written to {output}", markup=False)


def _cells(name: str, padding: Padding) -> list[str]:
    ratios = [f"{value:.2f}x" for value in padding.axes.values()]
    return [name, str(padding.buckets.num_graphs), f"{padding.ratio:.3f}x", *ratios]
