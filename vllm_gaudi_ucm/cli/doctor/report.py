"""The doctor's report as text: the verdict and what to do first, then the findings of each section."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.cli.output import prose_console
from vllm_gaudi_ucm.options.errors import counted

STYLES = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}
NAME_WIDTH = 22


def print_report(device: str | None, checks: Sequence[Check]) -> None:
    """Prints the report to stdout. device: the device that the plugin would serve on, None if it would not."""
    console = prose_console()
    console.print(verdict(device, checks), style="bold")
    todo = [check for status in ("fail", "warn") for check in checks if check.status == status]
    if todo:
        console.print("\nTo do", style="bold")
        for check in todo:
            console.print(_to_do(check))
    for section in dict.fromkeys(check.section for check in checks):
        console.print(f"\n{section.capitalize()}", style="bold")
        console.print(_table([check for check in checks if check.section == section]))


def verdict(device: str | None, checks: Sequence[Check]) -> str:
    """A sentence: whether this machine can serve, and how many checks failed or warn."""
    failed, warned = (sum(check.status == status for check in checks) for status in ("fail", "warn"))
    warnings = f", with {counted(warned, 'warning')}" if warned else ""
    if failed:
        return f"This machine cannot serve so: {failed} of {counted(len(checks), 'check')} failed{warnings}."
    if device is None:
        return f"vLLM serves without the plugin here: no check failed{warnings}."
    return f"This machine can serve, on {device}: {'no check failed' + warnings if warned else 'no problem found'}."


def _to_do(check: Check) -> RenderableType:
    row = _grid()
    row.add_column(overflow="fold")
    lines = [Text(f"{check.section}, {check.name}", style="bold"), *map(Text, _finding(check))]
    row.add_row(_status(check), Text("\n").join(lines))
    return row


def _table(checks: Sequence[Check]) -> RenderableType:
    table = _grid()
    table.add_column(width=NAME_WIDTH, overflow="fold")
    table.add_column(overflow="fold")
    for check in checks:
        found = "see above" if check.status in ("warn", "fail") else "\n".join(_finding(check))
        table.add_row(_status(check), Text(check.name), Text(found))
    return table


def _finding(check: Check) -> Iterator[str]:
    yield check.found
    if check.expected and check.status in ("warn", "fail"):
        yield f"expected: {check.expected}"
    if check.advice:
        yield f"{'to do' if check.status in ('warn', 'fail') else 'hint'}: {check.advice}"


def _grid() -> Table:
    """Columns without lines, of which the first is the status."""
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(width=6, no_wrap=True)
    return grid


def _status(check: Check) -> Text:
    return Text(f"  {check.status}", style=STYLES[check.status])
