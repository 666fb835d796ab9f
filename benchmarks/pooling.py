"""Embeddings per second of a real encoder, interleaved with vLLM's own CPU backend if it is installed.

A single call takes 10 ms or less, and a disturbance on the machine as long. So a sample is many calls, about a second,
in turn on each side; its figure is the median of its calls. The ratio is the median over pairs of consecutive samples,
with its quartiles. The ratio of the fastest calls shows what remains if others use the machine.

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
from statistics import median, quantiles
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
TOKENS_OF_SAMPLE = 4096
MOST_CALLS = 48
"""A sample has as many calls as make this many tokens, at most this many calls, and one that does not count: the side
was stopped, and its caches are cold.
"""
LEAST_CALLS = 3
WARM_UP = -1


@dataclass
class Row:
    """A length and a number of prompts at once: seconds of the calls of each sample, by side, and last embeddings."""

    length: int
    count: int
    samples: dict[str, list[list[float]]] = field(default_factory=dict)
    outputs: dict[str, list[list[float]]] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """Returns how many calls a sample has."""
        return max(LEAST_CALLS, min(MOST_CALLS, TOKENS_OF_SAMPLE // (self.length * self.count)))

    def rate(self, side: str) -> float | None:
        """Returns embeddings per second, the median of the samples; None if the side was not measured."""
        found = self.samples.get(side)
        return self.count / median(map(median, found)) if found else None

    def ratio(self) -> float | None:
        """Returns how many times faster our side is: the median over pairs of samples."""
        found = self._ratios()
        return median(found) if found else None

    def spread(self) -> tuple[float, float] | None:
        """Returns the first and third quartile of the ratios of pairs."""
        found = self._ratios()
        if len(found) < 2:
            return None
        low, _, high = quantiles(found, n=4, method="inclusive")
        return low, high

    def ratio_of_fastest(self) -> float | None:
        """Returns how many times faster our fastest call is."""
        if OURS not in self.samples or PEER not in self.samples:
            return None
        ours, peer = (min(map(min, self.samples[side])) for side in (OURS, PEER))
        return peer / ours

    def _ratios(self) -> list[float]:
        pairs = zip(self.samples.get(OURS, ()), self.samples.get(PEER, ()), strict=False)
        return [median(peer) / median(ours) for ours, peer in pairs]

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
    sides = make_sides(args.model, args.peer_python, args.dtype, args.threads)
    # workers are in process groups of their own, and some are stopped: a signal that ends us has to end them first
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            rows, facts = measure(sides, args.repeats, progress, args.lengths)
    except SideFailed as error:
        print(f"benchmarks.pooling: {error}", file=sys.stderr)
        return 2
    finally:
        for side in sides:
            side.stop()
    report(rows, facts, args)
    return 0


def make_sides(model: Path, peer_python: Path | None, dtype: str, threads: int | None = None) -> list[EngineSide]:
    """Makes our side, and the peer's if its interpreter exists; both with the same settings and cores."""
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
    cores = sorted(os.sched_getaffinity(0))[:threads]
    # its authors advise 256 tokens, and it has positions for 512
    shared = {**ENVIRONMENT, "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    own = {**shared, "OMP_NUM_THREADS": str(len(cores))}
    sides = [EngineSide(OURS, Path(sys.executable), engine_args, own)]
    if peer_python is not None:
        environment = {**shared, **peer_threads(peer_python, cores)}
        sides.append(EngineSide(PEER, peer_python.absolute(), engine_args, environment))
    return sides


def measure(
    sides: Sequence[EngineSide], repeats: int, progress: Progress, lengths: Sequence[int] = LENGTHS
) -> tuple[list[Row], dict[str, Any]]:
    """Measures all rows, one side after the other in each repetition, after one repetition of warm-up."""
    kinds = list(product(lengths, COUNTS))
    task = progress.add_task("embeddings", total=len(sides) * (1 + len(kinds) * (repeats + 1)))
    facts = {}
    for side in sides:
        _, facts[side.name] = side.start()
        progress.advance(task)
    rows = []
    for length, count in kinds:
        row = Row(length, count)
        for repetition in range(WARM_UP, repeats):
            batches = [make_prompts(length, count, f"{repetition} {call}") for call in range(row.calls + 1)]
            # the other side first every second time, so that neither always follows the other
            for side in sides if repetition % 2 == 0 else reversed(sides):
                answer = side.ask({"batches": batches})
                if repetition != WARM_UP:
                    row.samples.setdefault(side.name, []).append(answer["seconds"][1:])
                    row.outputs[side.name] = answer["outputs"]
                progress.advance(task)
        rows.append(row)
    return rows, facts


def make_prompts(length: int, count: int, seed: object) -> list[list[int]]:
    """Returns prompts of words of BERT's vocabulary, between its class token and its separator."""
    rng = random.Random(f"{length} {count} {seed}")
    return [[101, *(rng.randrange(2000, 29000) for _ in range(length - 2)), 102] for _ in range(count)]


def report(rows: Sequence[Row], facts: dict[str, Any], args: argparse.Namespace) -> None:
    """Prints the table, and writes the JSON file if asked for."""
    console = report_console()
    machine = describe_machine()
    console.print(f"{machine}; {args.model.name}, {args.dtype}, median of {args.repeats} samples", style="dim")
    for name, fact in facts.items():
        text = ", ".join(f"{key} {value}" for key, value in fact.items() if key != "ready")
        console.print(f"{name}: {text}", style="dim")
    table = Table(title="embeddings/s", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("tokens", "at once", OURS, PEER, "ratio", "quartiles", "fastest", "floor", "least cosine"):
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


def _compared(row: Row) -> tuple[str, ...]:
    ratio, spread, cosine = row.ratio(), row.spread(), row.least_cosine()
    colour = "bold red" if ratio is not None and ratio < FLOOR else "green"
    shown = "-" if ratio is None else f"[{colour}]{ratio:.2f}x[/]"
    quartiles = "-" if spread is None else f"{spread[0]:.2f} to {spread[1]:.2f}"
    fastest = row.ratio_of_fastest()
    least = "-" if cosine is None else f"{cosine:.6f}"
    return shown, quartiles, "-" if fastest is None else f"{fastest:.2f}x", f"{FLOOR:.1f}x", least


def _to_json(row: Row) -> dict[str, Any]:
    rates = {side: row.rate(side) for side in row.samples}
    return {
        "tokens": row.length,
        "at_once": row.count,
        "embeddings_per_second": rates,
        "seconds": row.samples,
        "ratio": row.ratio(),
        "ratio_of_fastest": row.ratio_of_fastest(),
        "least_cosine": row.least_cosine(),
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pooling", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of the encoder")
    add_peer_option(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=positive, default=11, help="samples of each row and side")
    parser.add_argument("--threads", type=positive, help="threads of each side (default: all cores)")
    parser.add_argument("--lengths", type=positive, nargs="+", default=LENGTHS, help="tokens of a prompt")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
