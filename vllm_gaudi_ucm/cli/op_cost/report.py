"""What `gaudi-ucm op-cost` says, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_gaudi_ucm.cli.op_cost.row import Row
from vllm_gaudi_ucm.graphs.cost.device_figures import device_figures
from vllm_gaudi_ucm.graphs.operator_cost.stream_cost import CHIPS

ASSUMPTIONS = (
    "Counted from the stream of operators of one attention layer, and modelled on the vendor's peaks: operators run "
    "one after the other, results stay in the card's SRAM while there is room (what was used longest ago goes first), "
    "the card's fused kernels keep their scores there, and the time is that of the slowest engine at its peak. Nothing "
    "was measured."
)

WIDTH = 120


@dataclass(frozen=True)
class OpCostReport:
    """rows: of a model named `model`. device: whose bytes the table shows. source: of the buckets and steps."""

    rows: list[Row]
    model: str
    device: str
    block_size: int
    source: str

    @property
    def title(self) -> str:
        return f"{self.model}, blocks of {self.block_size}, {self.source}; every figure is modelled"

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "modelled": True,
            "assumptions": ASSUMPTIONS,
            "model": self.model,
            "block_size": self.block_size,
            "source": self.source,
            "device": self.device,
            "figures": {
                name: {
                    "flops": device_figures(name).flops,
                    "bandwidth": device_figures(name).bandwidth,
                    "on_chip_bytes": chip.on_chip,
                    "vector_operations": chip.vector,
                }
                for name, chip in CHIPS.items()
            },
            "rows": [row.to_json() for row in self.rows],
        }


def show(report: OpCostReport) -> None:
    """Print the table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        # a file or a pipe has no width that the table would have to fit
        console.width = max(console.width, WIDTH)
    console.print(report.title, style="bold", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("attention of one layer")
    table.add_column("form")
    table.add_column("implementation")
    for heading in ("steps",) if report.rows and report.rows[0].steps is not None else ():
        table.add_column(heading, justify="right")
    for heading in ("FLOPs / least", "bytes / least", "operators"):
        table.add_column(heading, justify="right")
    for device in CHIPS:
        table.add_column(f"{device}, ms (least)", justify="right")
    for row in report.rows:
        table.add_row(*_cells(row, report.device))
    console.print(table)
    console.print(f"Bytes are those of {report.device}. {ASSUMPTIONS}", markup=False)


def _cells(row: Row, device: str) -> list[str]:
    stream = row.cost.by_device[device]
    steps = [] if row.steps is None else [f"{row.steps:,}"]
    times = (f"{1e3 * row.cost.seconds(name):.3f} ({1e3 * row.least_seconds(name):.3f})" for name in CHIPS)
    ratios = f"{row.flops_ratio:.2f}x", f"{row.bytes_ratio(device):.2f}x"
    return [row.name, row.form, row.implementation, *steps, *ratios, f"{stream.operators:,}", *times]
