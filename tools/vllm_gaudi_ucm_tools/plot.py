"""`gaudi-ucm plot`: the steps of a phase log and the buckets over them, as a picture or a self-contained page."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.steps import Steps, check_steps
from vllm_gaudi_ucm.graphs.strategies import build_buckets
from vllm_gaudi_ucm.graphs.strategies.base import BucketRequest
from vllm_gaudi_ucm.observability.phase_log import bucket_shapes
from vllm_gaudi_ucm.observability.phase_summary import PhaseSummary
from vllm_gaudi_ucm.observability.step_metrics import BucketColumns
from vllm_gaudi_ucm.observability.step_record import StepRecord
from vllm_gaudi_ucm.options.errors import counted
from vllm_gaudi_ucm_tools.buckets.cost_options import (
    add_cost_arguments,
    add_limit_arguments,
    check_block_size,
    cost_model,
    given_limits,
    limits_of,
)
from vllm_gaudi_ucm_tools.buckets.padding import Padding, measure_padding
from vllm_gaudi_ucm_tools.output import check_output
from vllm_gaudi_ucm_tools.phases.joined_logs import JoinedLogs
from vllm_gaudi_ucm_tools.phases.phase_plot import PHASE_COLOURS
from vllm_gaudi_ucm_tools.phases.phases import open_logs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES = (".png", ".svg", ".pdf")
PAGES = (".html", ".htm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "log", type=Path, nargs="+", help="a phase log, of a server or of gaudi-ucm trace; several of the same limits"
    )
    parser.add_argument("--buckets", type=Path, metavar="FILE", help="draw the buckets of this file over the steps")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="picture (.png, .svg, .pdf) or page (.html)"
    )
    add_cost_arguments(parser)
    add_limit_arguments(parser, "the first line of the log; they are needed with --buckets only")


def run(args: argparse.Namespace) -> int:
    """Write the picture or the page; unusable input raises a ValueError."""
    check_output("--output", args.output, (*PICTURES, *PAGES))
    suffix = args.output.suffix.lower()
    with open_logs(args.log, given_limits(args)) as logs:
        header, records = logs.header, list(logs.steps())
    if not records:
        raise ValueError(f"{logs.name}: holds no steps to draw")
    name = header.get("mix") or Path(str(header.get("model", ""))).name or args.log[0].name
    title = f"{name}: {counted(len(records), 'step')}"
    padding = None if args.buckets is None else bucket_padding(args, logs, records)
    if suffix in PAGES:
        args.output.write_text(page(records, padding, title), encoding="utf-8")
    else:
        draw(records, padding, title, args.output)
    print(f"written to {args.output}")
    return 0


def bucket_padding(args: argparse.Namespace, logs: JoinedLogs, records: list[StepRecord]) -> Padding:
    """The padding of the logs' steps in the buckets of --buckets."""
    check_block_size(args, logs.header, logs.header_place)
    limits = limits_of(args, logs.header, logs.header_place)
    cost = cost_model(args, limits.block_size)
    buckets = build_buckets("file", BucketRequest(limits, cost, path=args.buckets))
    steps = Steps.from_buckets(bucket_shapes(records))
    check_steps(steps, limits)
    return measure_padding(buckets, steps)


MOST_BARS = 24
# A ratio above which bars of the others would vanish on a linear axis.
MOST_LINEAR = 4.0


def draw(records: Sequence[StepRecord], padding: Padding | None, title: str, path: Path) -> None:
    """Writes the picture; raises a ValueError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        advice = "a picture needs matplotlib: pip install 'vllm-gaudi-ucm[tools]', or write a page (.html)"
        raise ValueError(f"--output {path}: {advice}") from error
    figure = Figure(figsize=(12, 8), dpi=130, layout="constrained")
    if padding is not None:
        title += f", {counted(padding.buckets.num_graphs, 'graph')}, padded / true cost {padding.ratio:.3f} (modelled)"
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    (unique, shared), (bars, times) = figure.subplots(2, 2, height_ratios=(1.3, 1))
    _draw_sizes(unique, records, padding, "unique_blocks")
    _draw_sizes(shared, records, padding, "shared_blocks")
    _draw_padding(bars, padding)
    _draw_times(times, PhaseSummary(records))
    figure.savefig(path)


def _draw_sizes(axes: Axes, records: Sequence[StepRecord], padding: Padding | None, blocks: str) -> None:
    """Draws steps as dots coloured by phase, buckets as squares, lighter if no step ran in them."""
    widest, highest = 1, 1
    for phase, totals in PhaseSummary(records).ranked():
        mine = [record.bucket for record in records if record.bucket.phase == phase]
        sizes = np.array([(bucket.query_len, getattr(bucket, blocks)) for bucket in mine])
        widest, highest = max(widest, sizes[:, 0].max()), max(highest, sizes[:, 1].max())
        label = f"{phase}  {counted(totals.steps, 'step')}"
        axes.scatter(sizes[:, 0], sizes[:, 1], s=7, alpha=0.35, linewidths=0, color=PHASE_COLOURS[phase], label=label)
    if padding is not None:
        used = [shape for shape, _, _ in padding.by_bucket()]
        for shapes, label, colour in ((padding.unused(), "buckets not used", "#aaaaaa"), (used, "buckets", "black")):
            if shapes:
                places = np.array([(shape.query_len, getattr(shape, blocks)) for shape in shapes])
                axes.scatter(
                    places[:, 0], places[:, 1], s=34, marker="s", facecolors="none", edgecolors=colour, label=label
                )
                widest, highest = max(widest, places[:, 0].max()), max(highest, places[:, 1].max())
    # room for a mark; matplotlib's own limits on such axes cut them
    axes.set_xlim(0.8, widest * 1.25)
    axes.set_ylim(-0.5, highest * 1.5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", base=2, linthresh=1)
    axes.set(xlabel="query_len", ylabel=blocks)
    axes.set_title(f"steps by query_len and {blocks}", loc="left", fontsize=10)
    axes.legend(frameon=False, prop={"family": "monospace", "size": 8})
    axes.spines[["top", "right"]].set_visible(False)


def _draw_padding(axes: Axes, padding: Padding | None) -> None:
    axes.set_title("padded / true cost by bucket, the most time first", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if padding is None:
        axes.text(0.5, 0.5, "no buckets given", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    rows = padding.by_bucket()[:MOST_BARS]
    places = np.arange(len(rows))
    axes.bar(places, [ratio for _, _, ratio in rows], color=[PHASE_COLOURS[shape.phase] for shape, _, _ in rows])
    axes.axhline(1.0, color="black", linewidth=0.8)
    labels = [f"{shape.phase} {'/'.join(map(str, shape.to_list()[1:]))}" for shape, _, _ in rows]
    axes.set_xticks(places, labels, rotation=90, family="monospace", fontsize=7)
    axes.set_ylim(0.9, max(ratio for _, _, ratio in rows) * 1.05)
    if axes.get_ylim()[1] > MOST_LINEAR:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")


def _draw_times(axes: Axes, summary: PhaseSummary) -> None:
    total = summary.total().ms or 1.0
    ranked = sorted(summary.ranked(), key=lambda item: item[1].ms)
    names = [phase for phase, _ in ranked]
    bars = axes.barh(names, [t.ms / total for _, t in ranked], color=[PHASE_COLOURS[name] for name in names])
    axes.bar_label(bars, [f" {t.ms / total:.1%}, {t.mean_ms:.2f} ms per step" for _, t in ranked], fontsize=8)
    axes.set_yticks(range(len(names)), names, family="monospace")
    axes.set_xlim(0, 1.5 * max(t.ms / total for _, t in ranked) + 0.01)
    axes.set_title("share of the step time by phase", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


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
    """Returns (bucket, colour, description), buckets in use last: they are drawn over the others."""
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
    columns = BucketColumns.from_shapes(
        (shape for shape, _, _ in buckets), padding.buckets.limits.max_selected_blocks > 0
    )
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
