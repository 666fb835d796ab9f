"""`gaudi-ucm store what-if LOG`: hit rate and bytes of a store for logged traffic, before anything is stored."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from vllm_gaudi_ucm.options.values import parse_bytes, show_bytes
from vllm_gaudi_ucm_tools.buckets.cost_options import read_model
from vllm_gaudi_ucm_tools.output import check_output, report_console, task_progress, written_whole
from vllm_gaudi_ucm_tools.store.hit_simulation import BlockChains, HitFigures, simulate
from vllm_gaudi_ucm_tools.store.traffic_log import Encode, TrafficLog, read_traffic

DEFAULT_BLOCK_SIZE = 128
_SHARES = (64, 16, 4, 2)
"""Without --capacity: these parts of what a store without bound would hold."""
_PICTURES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which can be distinguished with any colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclass(frozen=True)
class WhatIfRow:
    """Figures of a store. block_size: tokens. capacity: bytes, None without a bound."""

    block_size: int
    capacity: int | None
    block_bytes: int
    figures: HitFigures

    @property
    def hit_rate(self) -> float:
        return self.figures.stored_tokens / self.figures.prompt_tokens

    def values(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        f = self.figures
        return {
            "block_size": self.block_size,
            "block_bytes": self.block_bytes,
            "capacity": self.capacity,
            "hit_rate": self.hit_rate,
            "device_rate": f.device_tokens / f.prompt_tokens,
            "partial_rate": None if f.partial_tokens is None else f.partial_tokens / f.prompt_tokens,
            "loaded_bytes": f.loaded_blocks * self.block_bytes,
            "saved_bytes": f.saved_blocks * self.block_bytes,
            "evicted_bytes": f.evicted_blocks * self.block_bytes,
            "peak_bytes": f.peak_blocks * self.block_bytes,
            **asdict(f),
        }


def add_what_if_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the action."""
    parser.add_argument(
        "log",
        type=Path,
        metavar="LOG",
        help="JSON lines: a trace of block ids (Mooncake, Qwen Bailian), of prompt_token_ids, or of prompt (text)",
    )
    parser.add_argument(
        "--capacity", nargs="+", metavar="SIZE", help="such as 50GiB 200GiB (default: parts of what all blocks need)"
    )
    parser.add_argument(
        "--block-size",
        nargs="+",
        type=int,
        default=[DEFAULT_BLOCK_SIZE],
        metavar="N",
        help="tokens of a block (default: %(default)s)",
    )
    parser.add_argument(
        "--device-cache", default="0", metavar="SIZE", help="the device's KV cache, which is asked first (default: 0)"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--model",
        type=Path,
        metavar="CONFIG",
        help="config.json of the model, or its folder: bytes of a token (default: Llama 3.1 8B)",
    )
    size.add_argument("--token-bytes", type=int, metavar="N", help="bytes of a token's keys and values in all layers")
    parser.add_argument(
        "--trace-block-tokens",
        type=int,
        metavar="N",
        help="tokens of a block of the trace (default: 512 in Mooncake's format, 16 in Bailian's)",
    )
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="for a log of texts: of the model's tokenizer")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw hit rates (PNG, SVG or PDF)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def what_if(args: argparse.Namespace) -> int:
    """Reads the log, simulates each store and prints the table. Raises a ValueError that names the option."""
    check_output("--plot", args.plot, _PICTURES)
    token_bytes = _token_bytes(args)
    capacities = None if args.capacity is None else [_size("--capacity", text) for text in args.capacity]
    device = _size("--device-cache", args.device_cache)
    if any(size < 1 for size in args.block_size):
        raise ValueError(f"--block-size is {min(args.block_size)}, expected at least 1")
    if args.trace_block_tokens is not None and args.trace_block_tokens < 1:
        raise ValueError(f"--trace-block-tokens is {args.trace_block_tokens}, expected at least 1")
    encode = None if args.tokenizer is None else _encoder(args.tokenizer)
    with _bar(args, "reading") as report:
        log = read_traffic(args.log, args.trace_block_tokens, encode, report)
    with _bar(args, "simulating") as report:
        rows = simulate_stores(log, sorted(set(args.block_size)), capacities, token_bytes, device, report)
    if args.plot is not None:
        with written_whole(args.plot) as path:
            plot_hits([(row.block_size, row.capacity, row.hit_rate) for row in rows], _peak(rows), path, args.log.name)
    if args.json:
        found = {"log": str(args.log), "format": log.kind, "requests": len(log.requests), "token_bytes": token_bytes}
        print(json.dumps({**found, "stores": [row.values() for row in rows]}, indent=2))
    else:
        _print(log, rows, args.log, token_bytes)
    return 0


def _bar(args: argparse.Namespace, what: str) -> AbstractContextManager[Callable[[float], None]]:
    return nullcontext(lambda done: None) if args.json else task_progress(what)


def simulate_stores(
    log: TrafficLog,
    block_sizes: Sequence[int],
    capacities: Sequence[int] | None,
    token_bytes: int,
    device_bytes: int = 0,
    report: Callable[[float], None] = lambda done: None,
) -> list[WhatIfRow]:
    """Returns a row for each block size and capacity, and one without a bound. capacities: None chooses some."""
    rows: list[WhatIfRow] = []
    done, parts = 0, len(block_sizes) * (1 + len(_SHARES if capacities is None else set(capacities)))
    for size in block_sizes:
        chains, block_bytes = BlockChains(log, size), size * token_bytes
        of_size = []
        chosen: list[int | None] = [None]
        while chosen:
            capacity = chosen.pop(0)
            blocks = None if capacity is None else capacity // block_bytes
            figures = simulate(
                chains,
                blocks,
                device_bytes // block_bytes,
                lambda part: report((done + part) / parts),  # noqa: B023
            )
            of_size.append(WhatIfRow(size, capacity, block_bytes, figures))
            done += 1
            if capacity is None:
                all_bytes = figures.peak_blocks * block_bytes
                wanted = (
                    [max(block_bytes, all_bytes // share) for share in _SHARES] if capacities is None else capacities
                )
                chosen = [*sorted(set(wanted))]
        rows += [*of_size[1:], of_size[0]]
    return rows


def plot_hits(points: Sequence[tuple[int, int | None, float]], peak: int, path: Path, title: str) -> None:
    """Draws (block size, capacity in bytes or None, hit rate) to `path`. peak: bytes that stand for no bound."""
    from matplotlib.figure import Figure  # late: a picture is asked for rarely

    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    axes = figure.subplots()
    for number, size in enumerate(sorted({size for size, _, _ in points})):
        line = sorted(
            (peak if capacity is None else capacity, rate) for found, capacity, rate in points if found == size
        )
        colour = _COLOURS[number % len(_COLOURS)]
        gibibytes = [capacity / 2**30 for capacity, _ in line]
        axes.plot(gibibytes, [rate for _, rate in line], marker="o", color=colour, label=f"blocks of {size} tokens")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylim(0, 1)
    axes.set(xlabel="capacity, GiB (rightmost: everything)", ylabel="prompt tokens from the store")
    axes.set_title(f"{title}: modelled hit rate of a store", loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def _peak(rows: Sequence[WhatIfRow]) -> int:
    """Returns the bytes that a store without a bound would hold."""
    return max(row.figures.peak_blocks * row.block_bytes for row in rows)


def _token_bytes(args: argparse.Namespace) -> int:
    if args.token_bytes is None:
        return int(read_model(args.model)[1].kv_bytes_per_token)
    if args.token_bytes < 1:
        raise ValueError(f"--token-bytes is {args.token_bytes}, expected at least 1")
    return int(args.token_bytes)


def _size(option: str, text: str) -> int:
    try:
        return int(parse_bytes(text))
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def _encoder(folder: Path) -> Encode:
    if not folder.is_dir():
        raise ValueError(f"--tokenizer {folder}: no such folder")
    from transformers import AutoTokenizer  # late: logs of ids need none

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"--tokenizer {folder}: no tokenizer can be read there: {error}") from error
    return lambda text: list(tokenizer.encode(text))


def _print(log: TrafficLog, rows: Sequence[WhatIfRow], path: Path, token_bytes: int) -> None:
    tokens = rows[0].figures.prompt_tokens
    console = report_console()
    table = Table(title=f"{path.name}: {len(log.requests):,} requests, {tokens:,} prompt tokens, modelled")
    headings = ["block", "capacity", "from the store", "on the device", "partial hits", "requests that load"]
    for heading in (*headings, "loaded", "written", "evicted"):
        table.add_column(heading, justify="right")
    before = None
    for row in rows:
        if before not in (None, row.block_size):
            table.add_section()
        before, values = row.block_size, row.values()
        partial = values["partial_rate"]
        table.add_row(
            str(row.block_size),
            f"none: {show_bytes(values['peak_bytes'])}" if row.capacity is None else show_bytes(row.capacity),
            f"{row.hit_rate:.1%}",
            f"{values['device_rate']:.1%}",
            "unknown" if partial is None else f"{partial:.1%}",
            f"{row.figures.hits:,}",
            *(show_bytes(values[f"{name}_bytes"]) for name in ("loaded", "saved", "evicted")),
        )
    console.print(table)
    console.print(f"Rates are shares of prompt tokens, at {show_bytes(token_bytes)} a token.", markup=False)
    if any(request.answer is None and request.answer_tokens for request in log.requests):
        text = "The log does not show its answers: they take room in the store, and a later prompt never hits them."
        console.print(text, markup=False)
