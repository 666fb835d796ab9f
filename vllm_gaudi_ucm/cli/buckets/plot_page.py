"""The page of `gaudi-ucm plot`: one HTML file without scripts or links, sizes as tooltips."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.padding import Padding
from vllm_gaudi_ucm.observability.phase_log import StepRecord
from vllm_gaudi_ucm.observability.phase_plot import PHASE_COLOURS
from vllm_gaudi_ucm.observability.phase_summary import PhaseSummary
from vllm_gaudi_ucm.observability.step_metrics import BucketColumns
from vllm_gaudi_ucm.options.errors import counted

WIDTH, HEIGHT, EDGE = 560, 400, 44
# More dots than this make a page slow; the commonest shapes are drawn.
MOST_DOTS = 4000

STYLE = """
body { font: 14px system-ui, sans-serif; margin: 2em; color: #222; background: #fff; max-width: 1760px }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30em), 1fr)); gap: 1em }
svg { width: 100%; height: auto }
h1 { font-size: 1.3em } h2 { font-size: 1.05em; margin-top: 1.6em }
figure { margin: 0 } figcaption { color: #555 }
table { border-collapse: collapse }
td, th { padding: .15em .8em; text-align: right } th { border-bottom: 1px solid #999 }
td:first-child, th:first-child, .phase { text-align: left; font-family: monospace }
.bar { display: inline-block; height: .8em; vertical-align: middle } svg text { font-size: 11px; fill: #555 }
"""


def page(records: Sequence[StepRecord], padding: Padding | None, title: str) -> str:
    """The HTML text."""
    body = [f"<h1>{escape(title)}</h1>"]
    if padding is not None:
        axes = ", ".join(f"{axis} {ratio:.2f}x" for axis, ratio in padding.axes.items())
        ratio = f"padded / true cost <b>{padding.ratio:.3f}</b>, modelled ({axes})"
        body.append(f"<p>{counted(padding.buckets.num_graphs, 'graph')}; {ratio}.</p>")
    body.append(_legend(records))
    charts = (_scatter(records, padding, axis, name) for axis, name in ((3, "unique_blocks"), (2, "shared_blocks")))
    body.append(f'<div class="charts">{"".join(charts)}</div>')
    body += ["<h2>Time by phase</h2>", _phase_table(PhaseSummary(records))]
    if padding is not None:
        body += ["<h2>Padding by bucket, the most time first</h2>", _padding_table(padding)]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _legend(records: Sequence[StepRecord]) -> str:
    keys = [
        f'<span class="phase" style="color:{PHASE_COLOURS[phase]}">&#9679; {phase}</span> {totals.steps:,}'
        for phase, totals in PhaseSummary(records).ranked()
    ]
    return f"<p>steps: {' &nbsp; '.join(keys)} &nbsp; &#9633; bucket, grey where no step ran in it</p>"


def _scatter(records: Sequence[StepRecord], padding: Padding | None, axis: int, name: str) -> str:
    """query_len against one kind of blocks, both on logarithmic axes that begin at 0."""
    counts = Counter(record.bucket.forward for record in records)
    shapes = [shape for shape, _ in counts.most_common(MOST_DOTS)]
    buckets = [] if padding is None else _buckets(padding)
    everything = [*shapes, *(shape for shape, _, _ in buckets)]
    widest, highest = (max(1, *(int(shape[a]) for shape in everything)) for a in (1, axis))

    def place(shape: Sequence[object]) -> tuple[float, float]:
        x, y = _log(shape[1], widest), _log(shape[axis], highest)
        return EDGE + x * (WIDTH - 2 * EDGE), HEIGHT - EDGE - y * (HEIGHT - 2 * EDGE)

    marks = []
    for shape in shapes:
        x, y = place(shape)
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{PHASE_COLOURS[shape[0]]}" fill-opacity=".45">'
            f"<title>{_name(shape)}: {counted(counts[shape], 'step')}</title></circle>"
        )
    for bucket, colour, text in buckets:
        x, y = place(bucket)
        marks.append(
            f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="none" stroke="{colour}">'
            f"<title>bucket {_name(bucket)}: {text}</title></rect>"
        )
    ticks = "".join(_ticks(widest, highest))
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{ticks}{"".join(marks)}</svg>'
        f"<figcaption>query_len (across) and {name} (up)</figcaption></figure>"
    )


def _buckets(padding: Padding) -> list[tuple[ForwardShape, str, str]]:
    """(bucket, colour, what it did), those in use last: they are drawn over the others."""
    unused = [(shape, "#aaa", "no steps") for shape in padding.unused()]
    return unused + [
        (shape, "#000", f"{counted(steps, 'step')}, padded / true {ratio:.2f}")
        for shape, steps, ratio in padding.by_bucket()
    ]


def _ticks(widest: int, highest: int) -> Iterable[str]:
    for value in _tick_values(widest):
        x = EDGE + _log(value, widest) * (WIDTH - 2 * EDGE)
        yield f'<text x="{x:.0f}" y="{HEIGHT - EDGE + 20}" text-anchor="middle">{value:,}</text>'
    for value in _tick_values(highest):
        y = HEIGHT - EDGE - _log(value, highest) * (HEIGHT - 2 * EDGE)
        yield f'<text x="{EDGE - 10}" y="{y + 4:.0f}" text-anchor="end">{value:,}</text>'
    yield (
        f'<path d="M{EDGE - 5} {EDGE}V{HEIGHT - EDGE + 5}H{WIDTH - EDGE}" fill="none" stroke="#999" stroke-width="1"/>'
    )


def _tick_values(most: int) -> list[int]:
    return [0] + [4**power for power in range(int(math.log(most, 4)) + 1)]


def _log(value: object, most: int) -> float:
    return math.log1p(int(str(value))) / math.log1p(most)


def _name(shape: ForwardShape) -> str:
    phase, *sizes = shape.to_list()
    return escape(f"{phase} {' / '.join(map(str, sizes))}")


def _phase_table(summary: PhaseSummary) -> str:
    total = summary.total()
    rows = []
    for phase, totals in summary.ranked():
        share = totals.ms / (total.ms or 1.0)
        bar = f'<span class="bar" style="width:{200 * share:.0f}px;background:{PHASE_COLOURS[phase]}"></span>'
        cells = (f"{totals.steps:,}", f"{totals.tokens:,}", f"{totals.mean_ms:.2f}", f"{share:.1%}")
        rows.append(f"<tr><td>{phase}</td>{''.join(f'<td>{c}</td>' for c in cells)}<td class=phase>{bar}</td></tr>")
    head = "".join(f"<th>{name}</th>" for name in ("phase", "steps", "tokens", "mean ms", "time", ""))
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _padding_table(padding: Padding) -> str:
    rows = []
    buckets = padding.by_bucket()
    columns = BucketColumns.of((shape for shape, _, _ in buckets), padding.buckets.limits.max_selected_blocks > 0)
    for shape, steps, ratio in buckets:
        width = min(300.0, 200 * (ratio - 1.0))
        bar = f'<span class="bar" style="width:{width:.0f}px;background:{PHASE_COLOURS[shape.phase]}"></span>'
        cells = (*columns.cells(shape), f"{steps:,}", f"{ratio:.3f}")
        rows.append(
            f"<tr><td>{shape.phase}</td>{''.join(f'<td>{c}</td>' for c in cells)}<td class=phase>{bar}</td></tr>"
        )
    names = ("phase", *columns.names, "steps", "padded / true", "")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"
