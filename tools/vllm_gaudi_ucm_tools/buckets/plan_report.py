"""The report of `gaudi-ucm plan`: buckets, padding, memory and warm-up, all modelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm.graphs.warm_up.order import Skeleton, choose_skeleton
from vllm_gaudi_ucm.graphs.warm_up.records import BucketKey
from vllm_gaudi_ucm.observability.step_metrics import BucketColumns
from vllm_gaudi_ucm.options.errors import counted
from vllm_gaudi_ucm_tools.buckets.compile_cost import (
    COMPILE_COSTS,
    AttentionNodes,
    Spread,
    graph_nodes,
    most_attention_nodes,
)
from vllm_gaudi_ucm_tools.buckets.padding import Padding, measure_padding
from vllm_gaudi_ucm_tools.buckets.plan_memory import PlanMemory, attention_bytes
from vllm_gaudi_ucm_tools.output import report_console

MOST_ROWS = 12


@dataclass(frozen=True)
class PlanReport:
    """A plan.

    traffic: name of the steps on which it was measured, if any. divided: how many of them run in parts; each counts as
        one step with the most shared blocks that fit.
    skeleton_size: forward graphs of the skeleton.
    remainders: shapes of the graphs for prompt remainders. tail_steps: steps of the traffic that ran in these graphs;
        all other figures exclude them.
    attention_nodes: counts the nodes of a layer's attention; None: the highest possible number is used.
    asked_tokens: requested tokens of a step, if the limits may have fewer because of its memory; None: the limits were
    given so.
    picture_graphs: sizes of pictures that are warmed; no figure of time has them.
    pools: the model yields no tokens. Its pooler runs outside the graphs, and no figure has it.
    pipeline: stages of layers. Every figure of memory, shapes and time is for one device, in the largest stage.
    """

    model: str
    strategy: str
    traffic: str | None
    cost: CostModel
    buckets: BucketSet
    steps: Steps | None
    divided: int
    memory: PlanMemory
    skeleton_size: int
    remainders: list[ForwardShape]
    tail_steps: int
    attention_nodes: AttentionNodes | None
    asked_tokens: int | None = None
    pipeline: int = 1
    picture_graphs: int = 0
    pools: bool = False

    @property
    def logits(self) -> list[int]:
        """The rows of the graphs for logits, which a model that pools does not have."""
        return [] if self.pools else list(self.buckets.logits)

    @property
    def num_devices(self) -> int:
        return self.cost.model.tensor * self.pipeline

    def reduction_share(self, shape: ForwardShape) -> float:
        """Returns the share of a forward graph's time in which devices that share layers add up their results."""
        return float(self.cost.reduction_seconds(shape.query_len)) / self.cost.forward(shape)

    @property
    def decode_maximum(self) -> ForwardShape:
        """The largest bucket for decodes without prompts."""
        decodes = [shape for shape in self.buckets.forward if "c" not in shape.phase]
        return max(decodes or self.buckets.forward, key=lambda shape: shape.query_len)

    @cached_property
    def padding(self) -> Padding | None:
        return None if self.steps is None else measure_padding(self.buckets, self.steps)

    @cached_property
    def skeleton(self) -> Skeleton:
        """The graphs that are warm before serving starts, chosen as in the server."""
        return choose_skeleton(self.buckets, self.steps, self.skeleton_size)

    @property
    def keys(self) -> list[BucketKey]:
        """The keys of all graphs."""
        return [*self.buckets.forward, *self.remainders, *self.logits]

    @property
    def warmup_seconds(self) -> Spread:
        """The time to warm all graphs."""
        return self._seconds(self.keys)

    @property
    def skeleton_seconds(self) -> Spread:
        """The time until serving starts: for the skeleton, and the graphs for prompt remainders."""
        keys = self.skeleton.forward if self.pools else self.skeleton.keys
        return self._seconds([*keys, *self.remainders])

    @property
    def num_graphs(self) -> int:
        return len(self.keys) + self.picture_graphs

    def nodes(self, key: BucketKey) -> int:
        """Returns the nodes that are compiled for a graph; without a count, the most there may be."""
        return graph_nodes(key, self.attention_nodes or most_attention_nodes)

    def compile_seconds(self, key: BucketKey) -> Spread:
        """Returns the compile time of the graph of a bucket."""
        return COMPILE_COSTS[self.cost.device.name].seconds(self.nodes(key))

    def _seconds(self, keys: Sequence[BucketKey]) -> Spread:
        """Returns the time to compile each graph and to run it once."""
        total = Spread(0.0, 0.0)
        for key in keys:
            run = self.cost.forward(key) if isinstance(key, ForwardShape) else float(self.cost.logits_seconds(key))
            total += self.compile_seconds(key) + Spread(run, run)
        return total

    def _compilation(self, key: BucketKey) -> dict[str, Any]:
        bucket = key.to_list() if isinstance(key, ForwardShape) else key
        found = {"graph": bucket, "nodes": self.nodes(key), "seconds": _rounded(self.compile_seconds(key))}
        if isinstance(key, ForwardShape):
            found["attention_bytes"] = round(attention_bytes(key, self.cost))
        return found

    def to_json(self) -> dict[str, Any]:
        """Returns all figures as plain values."""
        padding, skeleton_logits = self.padding, [] if self.pools else list(self.skeleton.logits)
        return {
            "modelled": True,
            "model": self.model,
            "device": self.cost.device.name,
            "device_figures": self.cost.device.source,
            "strategy": self.strategy,
            "traffic": self.traffic,
            "devices": {
                "tensor_parallel_size": self.cost.model.tensor,
                "pipeline_parallel_size": self.pipeline,
                "heads": self.cost.model.heads,
                "kv_heads": self.cost.model.kv_heads,
                "layers": self.cost.model.layers,
                "reduction_share": {
                    "decode": round(self.reduction_share(self.decode_maximum), 4),
                    "largest": round(self.reduction_share(self.buckets.limits.maximum.forward), 4),
                },
            },
            "limits": asdict(self.buckets.limits),
            "asked_tokens": self.asked_tokens,
            "graphs": self.num_graphs,
            "forward": [shape.to_list() for shape in self.buckets.forward],
            "logits": self.logits,
            "picture_graphs": self.picture_graphs,
            "tails": [shape.to_list() for shape in self.remainders],
            "skeleton": {"forward": [s.to_list() for s in self.skeleton.forward], "logits": skeleton_logits},
            "padding": padding and padding.to_json(),
            "divided_steps": self.divided,
            "tail_steps": self.tail_steps,
            "memory_bytes": {**asdict(self.memory), "total": self.memory.total, "fits": self.memory.fits},
            "nodes_counted": self.attention_nodes is not None,
            "compilation": [self._compilation(key) for key in self.keys],
            "warmup_seconds": _rounded(self.warmup_seconds),
            "skeleton_seconds": _rounded(self.skeleton_seconds),
            "skeleton_share": round(self.skeleton_seconds.high / self.warmup_seconds.high, 4),
        }


def _rounded(seconds: Spread) -> dict[str, float]:
    return {"low": round(seconds.low, 3), "high": round(seconds.high, 3)}


def show(report: PlanReport) -> None:
    """Prints the plan for people."""

    console = report_console()
    limits, buckets, memory = report.buckets.limits, report.buckets, report.memory
    console.print(f"{report.model} on {report.cost.device.name}; every figure is modelled", style="bold", markup=False)
    if report.num_devices > 1:
        _show_devices(console, report)
    selected = f", {limits.max_selected_blocks:,} selected" if limits.max_selected_blocks else ""
    console.print(
        f"limits    {limits.max_num_batched_tokens} tokens and {counted(limits.max_num_seqs, 'request')} per step,"
        f"\n          {limits.max_model_len} tokens per request, "
        f"{counted(limits.num_blocks, 'block')} of {limits.block_size},"
        f"\n          {counted(limits.most_shared_blocks, 'shared block')} per step{selected}"
    )
    if report.asked_tokens not in (None, limits.max_num_batched_tokens):
        console.print(f"          a server lowers {report.asked_tokens} tokens to that: see --step-memory")
    counts = f"{len(buckets.forward)} forward, {len(report.logits)} logits"
    remainders = f", {len(report.remainders)} for remainders" if report.remainders else ""
    pictures = f", {report.picture_graphs} for pictures" if report.picture_graphs else ""
    console.print(f"graphs    {report.num_graphs}: {counts} ({report.strategy}){remainders}{pictures}")
    if limits.max_selected_blocks and not report.remainders:
        console.print("          without those for prompt remainders:")
        console.print("          give --sparse and --partial-loads for these")
    skeleton = report.skeleton
    logits = 0 if report.pools else len(skeleton.logits)
    console.print(
        f"warm-up   {_range(report.warmup_seconds)} s for all, {_range(report.skeleton_seconds)} s\n"
        f"          until serving starts ({len(skeleton.forward)} forward, {logits} logits{remainders})"
    )
    others = f"slots for adapters {_gb(memory.adapters)}, " if memory.adapters else ""
    others += f"states of requests {_gb(memory.states)}, " if memory.states else ""
    others += f"encoder of pictures {_gb(memory.encoder)}, " if memory.encoder else ""
    console.print(
        f"memory    weights {_gb(memory.weights)}, KV cache {_gb(memory.kv_cache)}, graphs {_gb(memory.graphs)},\n"
        f"          {others}activations {_gb(memory.activations)}: {_gb(memory.total)} of {_gb(memory.usable)}"
    )
    if not memory.fits:
        console.print("          does not fit: fewer graphs, fewer blocks, or fewer tokens per step", style="bold red")
    per_node = COMPILE_COSTS[report.cost.device.name].per_node
    if per_node.high:
        _show_compilation(console, report)
    if report.padding is not None:
        _show_padding(console, report.padding, str(report.traffic))
    if report.divided:
        most = f"{limits.most_shared_blocks:,}"
        console.print(f"steps with more than {most} shared blocks, which run in parts: {report.divided:,}")
    if report.tail_steps:
        console.print(f"steps in graphs for prompt remainders, which are in no other figure: {report.tail_steps:,}")


def _show_devices(console: Any, report: PlanReport) -> None:
    """Shows the part of the model on one device of several, and the cost of sharing layers."""
    part = report.cost.model
    heads = f"{counted(part.heads, 'head')}, {counted(part.kv_heads, 'KV head')}"
    console.print(
        f"devices   {report.num_devices}: {part.tensor} share each layer, {counted(report.pipeline, 'stage')}; "
        f"below is one of them,\n          with {heads}, {counted(part.layers, 'layer')}"
    )
    if part.tensor > 1:
        decodes, largest = report.decode_maximum, report.buckets.limits.maximum.forward
        console.print(
            f"          adding up results takes {report.reduction_share(decodes):.0%} of a step of "
            f"{counted(decodes.query_len, 'decode')},\n          {report.reduction_share(largest):.0%} of the largest"
        )


def _show_compilation(console: Any, report: PlanReport) -> None:
    """Shows a row for each phase and number of nodes; `--json` has every graph."""
    from rich import box
    from rich.table import Table

    said = "counted" if report.attention_nodes else "at most"
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title="compilation, modelled from nodes: low - high", title_justify="left"
    )
    table.add_column("phase")
    for heading in ("graphs", f"nodes, {said}", "s each", "s together", "attention, at most"):
        table.add_column(heading, justify="right")
    groups: dict[tuple[str, int], list[float]] = {}
    for key in report.keys:
        phase, size = ("logits", 0.0) if isinstance(key, int) else (key.phase, attention_bytes(key, report.cost))
        groups.setdefault((phase, report.nodes(key)), []).append(size)
    for (phase, nodes), sizes in groups.items():
        each = COMPILE_COSTS[report.cost.device.name].seconds(nodes)
        count, largest = len(sizes), _gb(max(sizes)) if max(sizes) else ""
        table.add_row(phase, f"{count:,}", f"{nodes:,}", _range(each), _range(each.times(count)), largest)
    console.print(table)


def _range(seconds: Spread) -> str:
    """Returns a single figure if both bounds are equal, otherwise a range."""
    shown = [f"{value:,.0f}" if value >= 10 else f"{value:,.1f}" for value in (seconds.low, seconds.high)]
    return shown[0] if seconds.low == seconds.high else " - ".join(shown)


def _show_padding(console: Any, padding: Padding, traffic: str) -> None:
    from rich import box
    from rich.table import Table

    axes = ", ".join(f"{axis} {ratio:.2f}x" for axis, ratio in padding.axes.items())
    console.print(
        f"padding   {padding.ratio:.3f}x the true cost over {traffic},\n          sizes: {axes}", markup=False
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="where the time goes", title_justify="left")
    table.add_column("phase")
    rows = padding.by_bucket()
    columns = BucketColumns.from_shapes((shape for shape, _, _ in rows), padding.buckets.limits.max_selected_blocks > 0)
    for heading in (*columns.headings, "steps", "padded / true"):
        table.add_column(heading, justify="right")
    for shape, steps, ratio in rows[:MOST_ROWS]:
        table.add_row(shape.phase, *columns.cells(shape), f"{steps:,}", f"{ratio:.2f}x")
    console.print(table)
    if len(rows) > MOST_ROWS:
        console.print(f"and {counted(len(rows) - MOST_ROWS, 'more bucket')} in use")


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
