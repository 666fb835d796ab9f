"""A warm-up for people: the last table of what became of every graph, and one line that sums it up."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.tail_shapes import TailShape
from vllm_gaudi_ucm.graphs.warm_up.graph_key import GraphKey
from vllm_gaudi_ucm.graphs.warm_up.summary import GraphRecord, GraphState, WarmUpSummary
from vllm_gaudi_ucm.observability.bucket_columns import BucketColumns
from vllm_gaudi_ucm.observability.phase_table import phase_text

GIB = 2**30
MIB = 2**20
STATE_STYLES = {
    GraphState.WARM: "green",
    GraphState.COLD: "dim",
    GraphState.DROPPED: "yellow",
    GraphState.FAILED: "bold red",
}


def summary_line(summary: WarmUpSummary) -> str:
    """How many graphs are warm, what they took, and what became of the others."""
    count = summary.count
    parts = [
        f"{count(GraphState.WARM)} of {len(summary.records)} graphs are warm after {summary.seconds:.1f} s, the first "
        f"{summary.skeleton_graphs} after {summary.skeleton_seconds:.1f} s; they take {summary.size / GIB:.2f} GiB"
    ]
    others = (GraphState.COLD, GraphState.DROPPED, GraphState.FAILED)
    parts += [f"{count(state)} {state}" for state in others if count(state)]
    return ", ".join(parts)


def warm_up_table(summary: WarmUpSummary) -> Table:
    """One line per graph: forward shapes, those for tails, and logits rows, each in ascending order of cost."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("graph", no_wrap=True)
    columns = BucketColumns.of(_shapes(summary))
    for heading in (*columns.headings, "logits"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for heading in ("seconds", "MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for record in summary.records:
        table.add_row(*_sizes(record.key, columns), Text(record.state, STATE_STYLES[record.state]), *_figures(record))
    return table


def warm_up_text(summary: WarmUpSummary) -> str:
    """Table and line as plain text, for a log."""
    console = Console(file=io.StringIO(), width=140, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(warm_up_table(summary))
    lines = [line.rstrip() for line in capture.get().splitlines() if line.strip()]
    return "\n".join([*lines, summary_line(summary)])


def _shapes(summary: WarmUpSummary) -> Iterator[ForwardShape]:
    for record in summary.records:
        if not isinstance(record.key, int):
            yield record.key.forward if isinstance(record.key, TailShape) else record.key


def _sizes(key: GraphKey, columns: BucketColumns) -> list[Text | str]:
    if isinstance(key, TailShape):
        return [phase_text(key.forward.phase).append(" tail"), *columns.cells(key.forward), ""]
    if isinstance(key, ForwardShape):
        return [phase_text(key.phase), *columns.cells(key), ""]
    return ["logits", *[""] * len(columns.names), f"{key:,}"]


def _figures(record: GraphRecord) -> list[Text | str]:
    measured = record.state is GraphState.WARM
    seconds = f"{record.seconds:.2f}" if record.seconds else ""
    return [seconds, f"{record.size / MIB:,.0f}" if measured else "", Text(record.reason)]
