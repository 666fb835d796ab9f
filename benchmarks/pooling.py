"""Embeddings per second of a real encoder, interleaved with vLLM's own CPU backend if it is installed.

`python -m benchmarks.pooling` (or `make bench-pooling`); the peer comes from `make bench-peers`, and the model from
`python -m scripts.embedding_model`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.engine import ENVIRONMENT, OURS, PEER, ROOT, add_peer_option, peer_threads
from benchmarks.engine_side import EngineSide, SideFailed
from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from vllm_gaudi_ucm_tools.output import report_console

DEFAULT_MODEL = ROOT / ".cache" / "models" / "all-minilm-l6-v2"
LENGTHS = (16, 128, 512)
COUNTS = (1, 64)
FLOOR = 1.0
"""No row may be slower than the peer."""
WARM_UP = -1


@dataclass
class Row:
    """A length and a number of prompts at once: seconds of each repetition, by side, and the last embeddings."""

    length: int
    count: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    outputs: dict[str, list[list[float]]] = field(default_factory=dict)

    def rate(self, side: str) -> float | None:
        """Returns embeddings per second; None if the side was not measured."""
        found = self.seconds.get(side)
        return self.count / median(found) if found else None

    def ratio(self) -> float | None:
        """Returns how many times faster our side is."""
        ours, peer = self.rate(OURS), self.rate(PEER)
        return ours / peer if ours and peer else None

    def least_cosine(self) -> float | None:
        """Returns the least cosine between embeddings of both sides, which are normalised."""
        ours, peer = self.outputs.get(OURS), self.outputs.get(PEER)
        if ours is None or peer is None:
            return None
        return min(sum(a * b for a, b in zip(x, y, strict=True)) for x, y in zip(ours, peer, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; 2 when the model is missing or a worker fails."""
    args = _parse(argv)
    if not (args.model / "config.json").is_file():
        print(
            f"benchmarks.pooling: --model {args.model} holds no config.json; `python -m scripts.embedding_model` puts "
            "one there",
            file=sys.stderr,
        )
        return 2
    sides = make_sides(args.model, args.peer_python, args.dtype)
    # workers are in process groups of their own, and some are stopped: a signal that ends us has to end them first
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            rows, facts = measure(sides, args.repeats, progress)
    except SideFailed as error:
        print(f"benchmarks.pooling: {error}", file=sys.stderr)
        return 2
    finally:
        for side in sides:
            side.stop()
    report(rows, facts, args)
    return 0


def make_sides(model: Path, peer_python: Path | None, dtype: str) -> list[EngineSide]:
    """Makes our side, and the peer's if its interpreter exists; both with the same settings and all cores."""
    engine_args = {
        "model": str(model.resolve()),
        "runner": "pooling",
        "dtype": dtype,
        "max_model_len": max(LENGTHS),
        "max_num_seqs": max(COUNTS),
        "max_num_batched_tokens": 8192,
        # the peer refuses to start if less than this share is free, and an encoder has no KV cache that would fill it
        "gpu_memory_utilization": 0.5,
        "seed": 0,
    }
    cores = sorted(os.sched_getaffinity(0))
    # its authors advise 256 tokens, and it has positions for 512
    shared = {**ENVIRONMENT, "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    own = {**shared, "OMP_NUM_THREADS": str(len(cores))}
    sides = [EngineSide(OURS, Path(sys.executable), engine_args, own)]
    if peer_python is not None:
        environment = {**shared, **peer_threads(peer_python, cores)}
        sides.append(EngineSide(PEER, peer_python.absolute(), engine_args, environment))
    return sides


def measure(sides: Sequence[EngineSide], repeats: int, progress: Progress) -> tuple[list[Row], dict[str, Any]]:
    """Measures all rows, one side after the other in each repetition, after one repetition of warm-up."""
    kinds = list(product(LENGTHS, COUNTS))
    task = progress.add_task("embeddings", total=len(sides) * (1 + len(kinds) * (repeats + 1)))
    facts = {}
    for side in sides:
        _, facts[side.name] = side.start()
        progress.advance(task)
    rows = []
    for length, count in kinds:
        row = Row(length, count)
        for repetition in range(WARM_UP, repeats):
            prompts = make_prompts(length, count, repetition)
            for side in sides:
                answer = side.ask({"prompts": prompts})
                if repetition != WARM_UP:
                    row.seconds.setdefault(side.name, []).append(answer["seconds"])
                    row.outputs[side.name] = answer["outputs"]
                progress.advance(task)
        rows.append(row)
    return rows, facts


def make_prompts(length: int, count: int, seed: int) -> list[list[int]]:
    """Returns prompts of words of BERT's vocabulary, between its class token and its separator."""
    rng = random.Random(f"{length} {count} {seed}")
    return [[101, *(rng.randrange(2000, 29000) for _ in range(length - 2)), 102] for _ in range(count)]


def report(rows: Sequence[Row], facts: dict[str, Any], args: argparse.Namespace) -> None:
    """Prints the table, and writes the JSON file if asked for."""
    console = report_console()
    machine = describe_machine()
    console.print(f"{machine}; {args.model.name}, {args.dtype}, median of {args.repeats}", style="dim")
    for name, fact in facts.items():
        text = ", ".join(f"{key} {value}" for key, value in fact.items() if key != "ready")
        console.print(f"{name}: {text}", style="dim")
    table = Table(title="embeddings/s", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("tokens", "at once", OURS, PEER, "ratio", "floor", "least cosine"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(str(row.length), str(row.count), *map(_figure, (row.rate(OURS), row.rate(PEER))), *_compared(row))
    console.print(table)
    if PEER not in facts:
        console.print(f"{PEER} is not installed, so there are no ratios; `make bench-peers` installs it")
    if args.json is not None:
        value = {"machine": machine, "facts": facts, "rows": [_to_json(row) for row in rows]}
        args.json.write_text(json.dumps(value, indent=2) + "\n")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _compared(row: Row) -> tuple[str, str, str]:
    ratio, cosine = row.ratio(), row.least_cosine()
    colour = "bold red" if ratio is not None and ratio < FLOOR else "green"
    shown = "-" if ratio is None else f"[{colour}]{ratio:.2f}x[/]"
    return shown, f"{FLOOR:.1f}x", "-" if cosine is None else f"{cosine:.6f}"


def _to_json(row: Row) -> dict[str, Any]:
    rates = {side: row.rate(side) for side in row.seconds}
    return {
        "tokens": row.length,
        "at_once": row.count,
        "embeddings_per_second": rates,
        "seconds": row.seconds,
        "ratio": row.ratio(),
        "least_cosine": row.least_cosine(),
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pooling", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of the encoder")
    add_peer_option(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=positive, default=5, help="repetitions of each row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
