"""Totals of steps by phase, which the phase log prints at exit, `gaudi-ucm phases` shows, and metrics can export."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from vllm_gaudi_ucm.observability.step_record import StepRecord

# Step times are counted in logarithmic classes, sixteen per doubling: a median within 2.2 % from bounded memory.
CLASSES_PER_DOUBLING = 16
SMALLEST_MS = 1e-3
PAIRS = ("causal_pairs", "shared_pairs", "unique_pairs", "selected_pairs")
SUMS = ("steps", "requests", "prompts", "tokens", *PAIRS, "sparse", "host_reads", "plan_ms", "forward_ms", "sample_ms")
MEMORY = {
    "copied_blocks": "copied",
    "moved_blocks": "moved",
    "swapped_out_blocks": "swapped out",
    "swapped_in_blocks": "swapped in",
}
"""Fields of a step, in the words that people read."""


@dataclass(slots=True)
class PhaseTotals:
    """Sums over the steps of one phase (or of all phases)."""

    steps: int = 0
    requests: int = 0
    prompts: int = 0
    tokens: int = 0
    causal_pairs: int = 0
    shared_pairs: int = 0
    unique_pairs: int = 0
    selected_pairs: int = 0
    sparse: int = 0
    plan_ms: float = 0.0
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    host_reads: int = 0
    host_stages: Counter[str] = field(default_factory=Counter)
    """Steps in which each ran."""
    memory: Counter[str] = field(default_factory=Counter)
    """Blocks that were copied before steps, by purpose: `MEMORY`."""
    time_classes: dict[int, int] = field(default_factory=dict)

    @property
    def ms(self) -> float:
        return self.plan_ms + self.forward_ms + self.sample_ms

    @property
    def mean_ms(self) -> float:
        return self.ms / self.steps if self.steps else 0.0

    @property
    def p50_ms(self) -> float:
        """Median step time, exact to the width of a time class."""
        seen = 0
        for index in sorted(self.time_classes):
            seen += self.time_classes[index]
            if 2 * seen >= self.steps:
                return 2.0 ** ((index + 0.5) / CLASSES_PER_DOUBLING)
        return 0.0

    @property
    def pairs(self) -> int:
        """Attention work of one head: (row, token) products of all parts."""
        return self.causal_pairs + self.shared_pairs + self.unique_pairs + self.selected_pairs

    def attention_shares(self) -> dict[str, float]:
        """Returns the fraction of the attention work that each part did; all zero if there was none.

        The selected part is listed if it did any.
        """
        pairs = self.pairs or 1
        shares = {
            "causal": self.causal_pairs / pairs,
            "shared": self.shared_pairs / pairs,
            "unique": self.unique_pairs / pairs,
        }
        if self.selected_pairs:
            shares["selected"] = self.selected_pairs / pairs
        return shares

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.requests += record.requests
        self.prompts += record.prompts
        self.tokens += record.tokens
        self.causal_pairs += record.causal_pairs
        self.shared_pairs += record.shared_pairs
        self.unique_pairs += record.unique_pairs
        self.selected_pairs += record.selected_pairs
        self.sparse += record.sparse
        self.plan_ms += record.plan_ms
        self.forward_ms += record.forward_ms
        self.sample_ms += record.sample_ms
        self.host_reads += record.host_reads
        self.host_stages.update(record.host_stages)
        for name in MEMORY:
            if blocks := getattr(record, name):
                self.memory[name] += blocks
        index = _time_class(record.plan_ms + record.forward_ms + record.sample_ms)
        self.time_classes[index] = self.time_classes.get(index, 0) + 1

    def merge(self, other: PhaseTotals) -> None:
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.host_stages.update(other.host_stages)
        self.memory.update(other.memory)
        for index, count in other.time_classes.items():
            self.time_classes[index] = self.time_classes.get(index, 0) + count


class PhaseSummary:
    """Totals for each of the (at most eight) phases seen."""

    def __init__(self, records: Iterable[StepRecord] = ()) -> None:
        self.by_phase: dict[str, PhaseTotals] = {}
        for record in records:
            self.add(record)

    def add(self, record: StepRecord) -> None:
        """Count one step under its true phase."""
        totals = self.by_phase.get(record.bucket.phase)
        if totals is None:
            totals = self.by_phase[record.bucket.phase] = PhaseTotals()
        totals.add(record)

    @property
    def steps(self) -> int:
        return sum(totals.steps for totals in self.by_phase.values())

    def total(self) -> PhaseTotals:
        total = PhaseTotals()
        for totals in self.by_phase.values():
            total.merge(totals)
        return total

    def ranked(self) -> list[tuple[str, PhaseTotals]]:
        """Phases with their totals, most steps first."""
        return sorted(self.by_phase.items(), key=lambda item: (-item[1].steps, item[0]))

    def planning_share(self) -> float:
        """Fraction of the step time that went into planning."""
        total = self.total()
        return total.plan_ms / total.ms if total.ms else 0.0


def _time_class(ms: float) -> int:
    return math.floor(math.log2(max(ms, SMALLEST_MS)) * CLASSES_PER_DOUBLING)


PART_COLOURS = {"causal": "dark_orange", "shared": "green3", "unique": "dodger_blue2", "selected": "medium_purple"}


def summary_table(summary: PhaseSummary) -> Table:
    """One line per phase, most steps first, and the totals below."""
    total = summary.total()
    table = Table(box=box.SIMPLE_HEAD, show_footer=len(summary.by_phase) > 1, pad_edge=False, padding=0)
    headings = ("steps", "share", "tokens", "mean ms", "p50 ms", "time", *total.attention_shares())
    table.add_column("phase", footer="all", no_wrap=True)
    for heading, footer in zip(headings, _cells(total, total), strict=True):
        table.add_column(heading, footer=footer, justify="right", no_wrap=True)
    for phase, totals in summary.ranked():
        table.add_row(phase_text(phase), *_cells(totals, total))
    return table


def attention_sentence(summary: PhaseSummary) -> Text:
    """Returns the fraction of attention work of each part, and below it the cost of planning and of the host."""
    total = summary.total()
    text = Text("attention work: ")
    for index, (part, share) in enumerate(total.attention_shares().items()):
        text.append(", " if index else "")
        text.append(f"{part} {share:.1%}", style=PART_COLOURS[part])
    text.append(f"\nplanning took {summary.planning_share():.2%} of the step time")
    if total.host_reads:
        text.append(f"\nthe host read the device {total.host_reads / total.steps:.2f} times a step")
    if total.host_stages:
        counts = (f"{name} {steps:,}" for name, steps in total.host_stages.most_common())
        text.append(f"\nran on the host, in steps: {', '.join(counts)}")
    if total.memory:
        counts = (f"{words} {total.memory[name]:,}" for name, words in MEMORY.items() if total.memory[name])
        text.append(f"\nblocks before steps: {', '.join(counts)}")
    return text


def phase_text(phase: str) -> Text:
    """The phase string with each part in its colour."""
    text = Text()
    for letter, colour in zip(phase, PART_COLOURS.values(), strict=False):
        text.append(letter, style=f"bold {colour}" if letter != "-" else "dim")
    return text


def summary_text(summary: PhaseSummary) -> str:
    """Table and sentence as plain text, for a log."""
    console = Console(file=io.StringIO(), width=110, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(summary_table(summary))
        console.print(attention_sentence(summary))
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())


def _cells(totals: PhaseTotals, total: PhaseTotals) -> list[str]:
    shares = totals.attention_shares()
    return [
        f"{totals.steps:,}",
        f"{totals.steps / (total.steps or 1):.1%}",
        f"{totals.tokens:,}",
        f"{totals.mean_ms:.2f}",
        f"{totals.p50_ms:.2f}",
        f"{totals.ms / (total.ms or 1.0):.1%}",
        *(f"{shares[part]:.1%}" if shares.get(part) else "-" for part in total.attention_shares()),
    ]
