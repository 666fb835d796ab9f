"""A phase summary for people: the table, the bars by phase, and the sentence about attention work, drawn with rich."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_gaudi_ucm.observability.phase_summary import PhaseSummary, PhaseTotals

PART_COLOURS = {"causal": "dark_orange", "shared": "green3", "unique": "dodger_blue2", "selected": "medium_purple"}
BAR_WIDTH = 32
EIGHTHS = " ▏▎▍▌▋▊▉"
MEANING = {
    "c--": "fresh prompts",
    "-s-": "decodes, all context shared",
    "--u": "decodes",
    "cs-": "prompts with cached context",
    "c-u": "fresh prompts beside decodes",
    "-su": "decodes, some context shared",
    "csu": "prompts with context, decodes",
    "---": "nothing to attend",
}


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
    """What fraction of the attention work each part did, and below it what planning cost."""
    text = Text("attention work: ")
    for index, (part, share) in enumerate(summary.total().attention_shares().items()):
        text.append(", " if index else "")
        text.append(f"{part} {share:.1%}", style=PART_COLOURS[part])
    text.append(f"\nplanning took {summary.planning_share():.2%} of the step time")
    return text


def phase_bars(summary: PhaseSummary) -> Table:
    """The phase histogram: one bar of steps per phase, with its meaning."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, width=BAR_WIDTH)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    most = max((totals.steps for totals in summary.by_phase.values()), default=1)
    for phase, totals in summary.ranked():
        bar = Text(_bar(totals.steps / most), style="cyan")
        table.add_row(phase_text(phase), bar, f"{totals.steps:,}", MEANING.get(phase, ""))
    return table


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


def _bar(fraction: float) -> str:
    """A bar of `fraction` of BAR_WIDTH in eighths of a character; never empty."""
    eighths = max(1, round(fraction * BAR_WIDTH * 8))
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
