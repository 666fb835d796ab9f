"""The histogram of phases."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from vllm_gaudi_ucm.observability.phase_summary import PhaseSummary, phase_text

BAR_WIDTH = 32
EIGHTHS = " ▏▎▍▌▋▊▉"
MEANING = {
    "c--": "fresh prompts",
    "-s-": "decodes, all context shared",
    "--u": "decodes",
    "cs-": "prompts with cached context",
    "c-u": "fresh prompts with decodes",
    "-su": "decodes, some context shared",
    "csu": "prompts with context, decodes",
    "---": "nothing to attend",
}


def phase_bars(summary: PhaseSummary) -> Table:
    """Returns one bar of steps per phase, with its meaning."""
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


def _bar(fraction: float) -> str:
    """A bar of `fraction` of BAR_WIDTH in eighths of a character; never empty."""
    eighths = max(1, round(fraction * BAR_WIDTH * 8))
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
