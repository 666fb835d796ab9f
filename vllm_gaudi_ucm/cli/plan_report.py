"""What `gaudi-ucm plan` says: buckets, padding, memory and warm-up, all modelled."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from vllm_gaudi_ucm.cli.plan_memory import SKELETON_GRAPHS, PlanMemory
from vllm_gaudi_ucm.graphs.cost import CostModel
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.padding import Padding, measure_padding
from vllm_gaudi_ucm.graphs.steps import Steps

MOST_ROWS = 12


@dataclass(frozen=True)
class PlanReport:
    """A plan; `traffic` names the steps that it was measured on, if any."""

    model: str
    strategy: str
    traffic: str | None
    cost: CostModel
    buckets: BucketSet
    steps: Steps | None
    memory: PlanMemory

    @cached_property
    def padding(self) -> Padding | None:
        return None if self.steps is None else measure_padding(self.buckets, self.steps)

    @property
    def warmup_seconds(self) -> float:
        """Compilation of every graph, and one execution of it."""
        runs = sum(self.cost.forward(shape) for shape in self.buckets.forward)
        runs += float(self.cost.logits_seconds(self.buckets.logits).sum())
        return self.buckets.num_graphs * self.cost.device.compile_seconds + runs

    @property
    def skeleton_seconds(self) -> float:
        """The same for the graphs with which serving starts: the dearest ones."""
        count = min(SKELETON_GRAPHS, self.buckets.num_graphs)
        runs = sum(self.cost.forward(shape) for shape in self.buckets.forward[-(count - 1) :])
        runs += float(self.cost.logits_seconds(self.buckets.logits[-1]))
        return count * self.cost.device.compile_seconds + runs

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        padding = self.padding
        return {
            "modelled": True,
            "model": self.model,
            "device": self.cost.device.name,
            "device_figures": self.cost.device.source,
            "strategy": self.strategy,
            "traffic": self.traffic,
            "limits": asdict(self.buckets.limits),
            "graphs": self.buckets.num_graphs,
            "forward": [list(shape) for shape in self.buckets.forward],
            "logits": list(self.buckets.logits),
            "padding": padding and padding.to_json(),
            "memory_bytes": {**asdict(self.memory), "total": self.memory.total, "fits": self.memory.fits},
            "warmup_seconds": round(self.warmup_seconds, 3),
            "skeleton_seconds": round(self.skeleton_seconds, 3),
        }


def show(report: PlanReport) -> None:
    """Print the plan for people."""
    from rich.console import Console

    console = Console(highlight=False)
    limits, buckets, memory = report.buckets.limits, report.buckets, report.memory
    console.print(f"{report.model} on {report.cost.device.name}; every figure is modelled", style="bold", markup=False)
    console.print(
        f"limits    {limits.max_num_batched_tokens} tokens and {limits.max_num_seqs} requests per step,"
        f"\n          {limits.max_model_len} tokens per request, {limits.num_blocks:,} blocks of {limits.block_size}"
    )
    counts = f"{len(buckets.forward)} forward, {len(buckets.logits)} logits"
    console.print(f"graphs    {buckets.num_graphs}: {counts} ({report.strategy})")
    console.print(
        f"warm-up   {report.warmup_seconds:,.0f} s for all, {report.skeleton_seconds:,.1f} s for the "
        f"{min(SKELETON_GRAPHS, buckets.num_graphs)} largest"
    )
    console.print(
        f"memory    weights {_gb(memory.weights)}, KV cache {_gb(memory.kv_cache)}, graphs {_gb(memory.graphs)},\n"
        f"          activations {_gb(memory.activations)}: {_gb(memory.total)} of {_gb(memory.usable)}"
    )
    if not memory.fits:
        console.print("          does not fit: fewer graphs, fewer blocks, or fewer tokens per step", style="bold red")
    if report.padding is not None:
        _show_padding(console, report.padding, str(report.traffic))


def _show_padding(console: Any, padding: Padding, traffic: str) -> None:
    from rich import box
    from rich.table import Table

    axes = ", ".join(f"{axis} {ratio:.2f}x" for axis, ratio in padding.axes.items())
    console.print(
        f"padding   {padding.ratio:.3f}x the true cost over {traffic},\n          sizes: {axes}", markup=False
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="where the time goes", title_justify="left")
    table.add_column("phase")
    for heading in ("query", "shared", "unique", "steps", "padded / true"):
        table.add_column(heading, justify="right")
    rows = padding.by_bucket()
    for (phase, q, s, u), steps, ratio in rows[:MOST_ROWS]:
        table.add_row(phase, f"{q:,}", f"{s:,}", f"{u:,}", f"{steps:,}", f"{ratio:.2f}x")
    console.print(table)
    if len(rows) > MOST_ROWS:
        console.print(f"and {len(rows) - MOST_ROWS} more buckets in use")


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
