"""KV stores and the prefetch engine: bandwidth, the time of a step, and the time to the first token.

Three tables: each store compared with a plain copy, with pread and with the Redis client's raw get; a step whose new
blocks come by prefetch compared with one that has them all; the first token of a partly stored prompt.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from benchmarks.store_bandwidth import measure_bandwidth
from benchmarks.store_step import measure_steps
from vllm_gaudi_ucm_tools.output import report_console, task_progress

PARTS = ("bandwidth", "step", "first-token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--block-bytes", type=positive, default=1 << 20, help="of a block, all layers (1 MiB)")
    parser.add_argument("--blocks", type=positive, default=64, help="read in each round of the bandwidth table")
    parser.add_argument("--repeats", type=positive, default=9)
    parser.add_argument("--steps", type=positive, default=60, help="of each contender of the step table")
    parser.add_argument("--model", type=Path, help="folder of a model, for first-token")
    parser.add_argument("--prompt", type=positive, default=1024, help="tokens of a prompt of first-token")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    if "first-token" in options.parts and options.model is None:
        parser.error("--model: first-token needs the folder of a model")
    found: dict[str, Any] = {"machine": describe_machine()}
    print(found["machine"])
    for part in options.parts:
        found[part] = _measure(part, options)
        _print(part, found[part])
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def _measure(part: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    with task_progress(part) as progress:
        if part == "bandwidth":
            return measure_bandwidth(options.block_bytes, options.blocks, options.repeats, progress)
        if part == "step":
            return measure_steps(options.steps, progress)
        # vLLM is imported for this part alone
        from benchmarks.store_first_token import measure_first_token

        return measure_first_token(options.model, options.prompt, options.repeats, progress)


def _print(part: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=part, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    report_console(least_width=120).print(table)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 100
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


if __name__ == "__main__":
    main()
