"""What `gaudi-ucm sparse-report` found, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from vllm_gaudi_ucm.cli.sparse_report.cases import Case
from vllm_gaudi_ucm.cli.sparse_report.measurement import Measurement
from vllm_gaudi_ucm.options.counted import counted

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 120
# layers of a table beside each other
LAYER_COLUMNS = 9
HEADINGS = (
    *("ratio", "tokens\nattended", "recall\nmean", "recall\nlowest", "best\nmean"),
    *("equal\nprefix", "equal\nall", "equal\ngiven"),
    *("prompt\ntokens/s", "decode\ntokens/s", "decode\nvs dense"),
)
NOTES = (
    "recall: share of the true attention that lies on the attended blocks, mean of the layers and lowest layer; best: "
    "that of as many blocks chosen by the attention itself.\n"
    "equal: share of the decoded tokens that dense decodes, too: up to the first difference, at the same place, and "
    "where the dense answer so far is given.\n"
    "vs dense: over the decode of a dense request in the same engine. Prompts are dense in every row."
)


@dataclass(frozen=True)
class SparseReport:
    """All measurements of a text; the first is dense."""

    model: str
    text: str
    device: str
    prompt_tokens: int
    max_tokens: int
    block_size: int
    rows: Sequence[Measurement]

    @property
    def title(self) -> str:
        return (
            f"{self.model} on {self.device}: {counted(self.prompt_tokens, 'token')} of {self.text}, "
            f"{self.max_tokens} decoded, blocks of {self.block_size}"
        )

    @property
    def sparse(self) -> list[Measurement]:
        return [row for row in self.rows if row.case.options is not None]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        head = {name: value for name, value in vars(self).items() if name != "rows"}
        return {**head, "rows": [_row_json(row) for row in self.rows]}

    def write(self, file: TextIO | None = None) -> None:
        """Prints the tables, to stdout or into a file."""
        from rich.console import Console

        console = Console(file=file, highlight=False, width=WIDTH)
        console.print(self.title, markup=False)
        console.print(_main_table(self.rows))
        console.print(NOTES, style="dim", markup=False)
        sparse = self.sparse
        for first in range(0, len(sparse), LAYER_COLUMNS):
            console.print(_layer_table(sparse[first : first + LAYER_COLUMNS]))


def case_name(case: Case, summaries: bool) -> str:
    """Method, and summary where several are compared."""
    return f"{case.method} {case.summary}" if summaries and case.summary else case.method


def several_summaries(rows: Sequence[Measurement]) -> bool:
    """Whether one method was measured with more than one."""
    pairs = {(row.case.method, row.case.summary) for row in rows}
    return len(pairs) > len({method for method, _ in pairs})


def _main_table(rows: Sequence[Measurement]) -> Table:
    table = _table()
    for heading in ("method", "summary"):
        table.add_column(heading)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in rows:
        agreement = row.agreement
        shares = (row.attended, row.mean_recall, min(row.recall), row.mean_best)
        equal = (agreement.prefix, agreement.everywhere, agreement.followed)
        table.add_row(
            row.case.method,
            row.case.summary,
            f"{row.case.ratio:g}",
            *(f"{share:.1%}" for share in shares),
            *(f"{share:.0%}" for share in equal),
            f"{row.prefill_tokens_per_s:,.0f}",
            f"{row.decode_tokens_per_s:,.2f}",
            f"{row.speedup:.2f}x",
            style="bold" if row.case.options is None else "",
        )
    return table


def _layer_table(rows: Sequence[Measurement]) -> Table:
    """Recall by layer, one column for each case."""
    table = _table()
    table.add_column("recall\nlayer", justify="right")
    several = several_summaries(rows)
    for row in rows:
        table.add_column(f"{case_name(row.case, several)}\n{row.case.ratio:g}", justify="right")
    for layer in range(len(rows[0].recall)):
        table.add_row(str(layer), *(f"{row.recall[layer]:.1%}" for row in rows))
    return table


def _table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def _row_json(row: Measurement) -> dict[str, Any]:
    options = row.case.options
    return {
        "method": row.case.method,
        "summary": row.case.summary or None,
        "ratio": row.case.ratio,
        "options": None if options is None else options.model_dump(mode="json"),
        "attended": round(row.attended, 5),
        "recall": [round(share, 5) for share in row.recall],
        "best_recall": [round(share, 5) for share in row.best],
        "equal_tokens": {name: round(share, 4) for name, share in asdict(row.agreement).items()},
        "tokens": row.tokens,
        "prefill_tokens_per_s": round(row.prefill_tokens_per_s, 2),
        "decode_tokens_per_s": round(row.decode_tokens_per_s, 3),
        "dense_decode_tokens_per_s": round(row.dense_tokens_per_s, 3),
        "speedup": round(row.speedup, 3),
    }


def write_text(report: SparseReport, path: Path) -> None:
    """The tables in a file."""
    with path.open("w", encoding="utf-8") as file:
        report.write(file)
