"""The findings of `gaudi-ucm sparse-report`, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from vllm_gaudi_ucm.options.errors import counted
from vllm_gaudi_ucm_tools.output import report_console
from vllm_gaudi_ucm_tools.sparse_report.cases import Case
from vllm_gaudi_ucm_tools.sparse_report.measurement import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

WIDTH = 120
# layers of a table side by side
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
        console = report_console(file, least_width=WIDTH)
        console.print(self.title, markup=False, width=WIDTH)
        console.print(_main_table(self.rows))
        console.print(NOTES, style="dim", markup=False, width=WIDTH)
        sparse = self.sparse
        for first in range(0, len(sparse), LAYER_COLUMNS):
            console.print(_layer_table(sparse[first : first + LAYER_COLUMNS]))


def case_name(case: Case, summaries: bool) -> str:
    """Returns the method, and the summary if several are compared."""
    return f"{case.method} {case.summary}" if summaries and case.summary else case.method


def several_summaries(rows: Sequence[Measurement]) -> bool:
    """True if one method was measured with more than one."""
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


# Okabe and Ito's colours, which can be distinguished with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
# overlapping lines stay visible
STYLES = ("-", "--", ":", "-.")


def figure_class() -> Any:
    """matplotlib's Figure, used without pyplot; raises ValueError if it is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "-o: the picture needs matplotlib: pip install 'vllm-gaudi-ucm[tools]', or leave -o out (--json FILE keeps "
            "every figure)"
        ) from error
    return Figure


def draw(report: SparseReport, path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF by the suffix of `path`)."""
    rows = report.sparse
    ratios = sorted({row.case.ratio for row in rows})
    figure = figure_class()(figsize=(max(10.0, 3.6 * len(ratios)), 7.4), dpi=120, layout="constrained")
    figure.suptitle(report.title, fontsize=10, fontweight="bold", x=0.01, ha="left")
    top, bottom = figure.subfigures(2, 1)
    lines = _lines(rows)
    for axes, ratio in zip(top.subplots(1, len(ratios), sharey=True, squeeze=False)[0], ratios, strict=True):
        _draw_layers(axes, lines, ratio)
    left, middle, right = bottom.subplots(1, 3)
    _draw_by_ratio(left, lines, lambda row: row.mean_recall, "attention-mass recall, mean of layers")
    _draw_by_ratio(middle, lines, lambda row: row.agreement.followed, "equal next tokens, given the dense answer")
    _draw_by_ratio(right, lines, lambda row: row.speedup, "decode speed, dense = 1", percent=False)
    left.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def _lines(rows: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    several = several_summaries(rows)
    lines: dict[str, list[Measurement]] = {}
    for row in rows:
        lines.setdefault(case_name(row.case, several), []).append(row)
    return lines


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index % len(STYLES)], "linewidth": 1.6}


def _draw_layers(axes: Axes, lines: dict[str, list[Measurement]], ratio: float) -> None:
    best = None
    for index, (name, rows) in enumerate(lines.items()):
        for row in (row for row in rows if row.case.ratio == ratio):
            axes.plot([100 * share for share in row.recall], label=name, **_style(index))
            best = best or row
    if best is not None:
        axes.plot([100 * share for share in best.best], color="#999999", linewidth=0.9, label="best choice")
        axes.set_title(f"ratio {ratio:g}: {best.attended:.1%} of the tokens attended", loc="left", fontsize=9)
    axes.set_xlabel("layer", fontsize=8)
    if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]  # an axes of `subplots` has one
        axes.set_ylabel("attention-mass recall, %", fontsize=8)
    axes.set_ylim(top=100.5)
    axes.legend(frameon=False, fontsize=7)
    _clean(axes)


def _draw_by_ratio(
    axes: Axes,
    lines: dict[str, list[Measurement]],
    figure: Callable[[Measurement], float],
    title: str,
    percent: bool = True,
) -> None:
    for index, (name, rows) in enumerate(lines.items()):
        scale = 100 if percent else 1
        points = [(100 * row.attended, scale * figure(row)) for row in rows]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, label=name, **_style(index))
    axes.axhline(100 if percent else 1, color="#999999", linewidth=0.8)
    axes.set_xlim(left=0)
    axes.set_title(f"{title}, %" if percent else title, loc="left", fontsize=9)
    axes.set_xlabel("tokens attended, % of the context", fontsize=8)
    _clean(axes)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
