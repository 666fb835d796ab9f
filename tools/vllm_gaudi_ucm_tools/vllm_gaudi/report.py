"""The comparison of bucket sets for vllm-gaudi: graphs, warm-up, padding, and compilations while serving."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from vllm_gaudi_ucm.options.errors import counted
from vllm_gaudi_ucm_tools.buckets.plan_memory import GRAPH_BYTES
from vllm_gaudi_ucm_tools.output import report_console
from vllm_gaudi_ucm_tools.vllm_gaudi.replay import Outcome
from vllm_gaudi_ucm_tools.vllm_gaudi.settings import Settings
from vllm_gaudi_ucm_tools.vllm_gaudi.shape_cost import Floats, ShapeCost
from vllm_gaudi_ucm_tools.vllm_gaudi.strategies import Prepared

# Seconds to compile a graph in its warm-up, low and high: 72 buckets of a model of 8B in 49 s (its docs/features/
# warmup.md), 126 decode buckets in 29 minutes (its pull request 1160). Seconds of a request that meets a new shape.
COMPILE_SECONDS = (49 / 72, 29 * 60 / 126)
STALL_SECONDS = (0.2, 0.4)
GRAPH_MEMORY = GRAPH_BYTES["gaudi2"]
SIZES = ("prompt tokens", "prompt context", "decode rows", "decode blocks")


@dataclass(frozen=True)
class SetReport:
    """A bucket set with what a traffic costs in it; without a traffic `outcome` is None.

    name: of the strategy or the file. label: for people.
    """

    name: str
    label: str
    prepared: Prepared
    outcome: Outcome | None
    cost: ShapeCost

    @cached_property
    def sizes(self) -> dict[str, float]:
        """Returns padded over true size by kind; a kind without any true size is left out."""
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for ran, count in (self.outcome.ran if self.outcome else {}).items():
            batch, query, blocks = ran.shape
            prompt = ran.wanted.phase == "prompt"
            # each prompt of a batch is padded to the longest context
            pairs = (batch * query, ran.wanted.rows), (batch * blocks if prompt else blocks, ran.wanted.blocks)
            for name, (padded, true) in zip(SIZES[:2] if prompt else SIZES[2:], pairs, strict=True):
                sums[name][0] += padded * count
                sums[name][1] += true * count
        return {name: sums[name][0] / sums[name][1] for name in SIZES if sums[name][1]}

    @cached_property
    def seconds(self) -> tuple[float, float]:
        """Returns modelled seconds, padded and without padding."""
        padded = true = 0.0
        if self.outcome is None:
            return padded, true
        for phase, seconds in (("prompt", self._prefill_seconds), ("decode", self._decode_seconds)):
            rows = [
                (*ran.shape, *ran.wanted.shape, ran.wanted.rows, ran.wanted.blocks, count)
                for ran, count in self.outcome.ran.items()
                if ran.wanted.phase == phase
            ]
            if rows:
                columns = np.array(rows, np.float64).T
                own, exact = seconds(columns)
                padded += float(own @ columns[-1])
                true += float(np.where(columns[6] > 0, exact, 0.0) @ columns[-1])
        return padded, true

    def _prefill_seconds(self, columns: Floats) -> tuple[Floats, Floats]:
        batch, query, context, count, longest, _, rows, blocks, _ = columns
        return self.cost.prefill(batch, batch * query, query, context), self.cost.prefill(count, rows, longest, blocks)

    def _decode_seconds(self, columns: Floats) -> tuple[Floats, Floats]:
        batch, _, padded, _, _, _, rows, blocks, _ = columns
        return self.cost.decode(batch, padded), self.cost.decode(rows, blocks)

    @property
    def ratio(self) -> float:
        """Returns modelled seconds with padding over those without; 1 without a traffic."""
        padded, true = self.seconds
        return padded / true if true else 1.0

    @property
    def warm_up(self) -> tuple[float, float]:
        """Returns modelled seconds to compile all graphs, low and high."""
        low, high = (self.prepared.num_graphs * each for each in COMPILE_SECONDS)
        return low, high

    @property
    def memory(self) -> float:
        """Returns modelled bytes of all graphs."""
        return self.prepared.num_graphs * GRAPH_MEMORY

    def to_json(self) -> dict[str, Any]:
        """Returns all figures as plain values."""
        found: dict[str, Any] = {
            "graphs": self.prepared.num_graphs,
            "prompt_graphs": len(self.prepared.prompts),
            "decode_graphs": len(self.prepared.decodes),
            "omitted": [list(shape) for shape in self.prepared.omitted],
            "warm_up_seconds": [round(value, 1) for value in self.warm_up],
            "graph_bytes": self.memory,
        }
        if self.outcome is not None:
            found["cost_ratio"] = round(self.ratio, 5)
            found["padded_seconds"], found["true_seconds"] = (round(value, 6) for value in self.seconds)
            found["size_ratios"] = {name: round(value, 4) for name, value in self.sizes.items()}
            found["compiled_while_serving"] = [[phase, *shape] for phase, shape in self.outcome.compiled]
            found["added_buckets"] = self.outcome.added
        return found


@dataclass(frozen=True)
class Comparison:
    """Sets for the same server and traffic. refused: strategies that such a server cannot start with, and why.

    traffic: what it is and how many steps, for people; None without one. notes: what was estimated.
    chosen: name of the set that was made for the traffic.
    """

    settings: Settings
    sets: Sequence[SetReport]
    refused: dict[str, str]
    traffic: str | None
    num_steps: int
    notes: Sequence[str]
    chosen: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns all figures as plain values."""
        server = {name: value for name, value in vars(self.settings).items() if name != "environment"}
        return {
            "for": "vllm-gaudi",
            "traffic": self.traffic,
            "steps": self.num_steps,
            "assumptions": list(self.notes),
            "server": {
                **server,
                "contiguous": self.settings.contiguous,
                "environment": dict(self.settings.environment),
            },
            "sets": {found.name: found.to_json() for found in self.sets},
            "refused": self.refused,
        }


def show(comparison: Comparison) -> None:
    """Prints the table of sets, and what its figures mean."""
    from rich import box
    from rich.table import Table

    console = report_console()
    settings = comparison.settings
    reading = "contiguous" if settings.contiguous else "not contiguous"
    console.print(
        f"vllm-gaudi with {settings.max_num_batched_tokens} tokens and {settings.max_num_seqs} requests per step, "
        f"{settings.max_model_len} tokens per request, {settings.num_blocks:,} blocks of {settings.block_size}, "
        f"{reading}"
    )
    if comparison.traffic is not None:
        console.print(f"traffic: {comparison.traffic}, {counted(comparison.num_steps, 'step')}", markup=False)
    for note in comparison.notes:
        console.print(f"  assumed: {note}", markup=False, style="dim")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("buckets")
    sizes = [name for name in SIZES if any(name in found.sizes for found in comparison.sets)]
    measured = ("cost", *sizes, "compiled while serving") if comparison.traffic is not None else ()
    for heading in ("graphs", "prompt", "decode", "warm-up", "memory", *measured):
        table.add_column(heading, justify="right")
    for found in comparison.sets:
        style = "bold" if found.name == comparison.chosen else None
        table.add_row(found.label, *_cells(found, sizes, bool(measured)), style=style)
    console.print(table)
    for name, why in comparison.refused.items():
        console.print(f"{name}: {why}", markup=False)
    console.print("warm-up and memory are modelled from published figures of other servers", style="dim")
    if comparison.traffic is not None:
        low, high = (1e3 * value for value in STALL_SECONDS)
        console.print(
            "cost: modelled time with padding over the time without; sizes: padded over true; a shape that is compiled "
            f"while serving stalls requests for about {low:.0f} to {high:.0f} ms",
            style="dim",
        )


def _cells(found: SetReport, sizes: Sequence[str], measured: bool) -> list[str]:
    low, high = found.warm_up
    prepared = found.prepared
    cells = [f"{count:,}" for count in (prepared.num_graphs, len(prepared.prompts), len(prepared.decodes))]
    cells += [f"{_time(low)} - {_time(high)}", f"{found.memory / 2**30:.1f} GiB"]
    if measured and found.outcome is not None:
        cells += [f"{found.ratio:.3f}x", *(f"{found.sizes.get(name, 1.0):.2f}x" for name in sizes)]
        cells.append(str(len(found.outcome.compiled)))
    return cells


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
