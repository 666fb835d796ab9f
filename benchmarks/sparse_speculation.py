"""Whole steps that verify drafts under a lock (KVStar), against sparse decodes without drafts (GSA) and dense ones.

Every engine has the same random weights, in which a token is followed by the next number; so the proposer knows the
right tokens, and spoils each draft with a given probability: on the host, which reads the tokens first, on the device,
without a wait, or after the passes of a draft model of one layer, during which the next step is planned
(`--drafts-by`). Contexts and summaries are random (benchmarks.sparse_engine).
Steps of the engines take turns, in one run (`--one-at-a-time`: engines take turns). A goal is printed with its
measurement: a verification of 1 + 4 rows takes at most 1.2 times a sparse decode of the same method, and yields at
least 1.5 times the tokens per second of GSA.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_side import EngineSide, SideFailed
from benchmarks.known_drafts import LOAD_FORMAT, SOURCES
from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from benchmarks.sparse_engine import SHAPES, SUMMARY_DTYPES, medians, random_model, side, size
from vllm_gaudi_ucm_tools.output import task_progress

DENSE, GSA, KVSTAR, VERIFY, UNLOCKED = "dense", "GSA", "KVStar", "KVStar, drafts", "GSA, drafts"
STEP_GOAL, TOKENS_GOAL = 1.2, 1.5


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns 2 if an engine ends, 1 if a token is wrong."""
    options = parse(argv)
    with tempfile.TemporaryDirectory() as name:
        sides = engines(random_model(Path(name), options), options)
        try:
            rows = one_at_a_time(sides, options) if options.one_at_a_time else in_turn(sides, options)
        except SideFailed as error:
            print(f"benchmarks.sparse_speculation: {error}", file=sys.stderr)
            return 2
        finally:
            for one in sides.values():
                one.stop()
    if options.json:
        options.json.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=2) + "\n")
    return int(any(found["wrong"] for row in rows for found in row["engines"].values()))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=SHAPES, help="without it 8b on a GPU, small on a CPU")
    parser.add_argument("--layers", type=positive, help="without it those of the shape")
    parser.add_argument("--sizes", nargs="+", type=size, default=[size("8x32768")], metavar="REQUESTSxCONTEXT")
    parser.add_argument("--ratio", type=float, default=0.1, help="sparse_ratio")
    parser.add_argument("--summary-dtype", choices=SUMMARY_DTYPES, default="auto")
    parser.add_argument("--drafts", type=positive, default=4)
    parser.add_argument("--acceptance", type=float, default=0.6, help="of a draft that follows accepted ones")
    parser.add_argument(
        "--drafts-by",
        choices=SOURCES,
        default="host",
        help="numbers made by the host, by the device without a read, or by passes of a draft model of one layer",
    )
    parser.add_argument("--ahead", action="store_true", help="steps ahead (on a GPU they are, without it)")
    parser.add_argument("--always", action="store_true", help="sparse_steps: always, where a choice does not pay, too")
    parser.add_argument(
        "--one-at-a-time", action="store_true", help="where engines do not fit the device together; no turns"
    )
    parser.add_argument("--unlocked", action="store_true", help="verify drafts with GSA, too")
    parser.add_argument("--steps", type=positive, default=32)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--max-graphs", type=positive, default=32)
    parser.add_argument("--kernels", type=int, default=12, help="of a GPU, to name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(argv)
    options.model = None
    options.shape = options.shape or ("8b" if options.device == "cuda" else "small")
    return options


def engines(model: Path, options: argparse.Namespace) -> dict[str, EngineSide]:
    """Makes the engines by name, without starting them."""
    always = {"sparse_steps": "always"} if options.always else {}
    section = {"sparse_ratio": options.ratio, "summary_dtype": options.summary_dtype, **always}

    def sparse(method: str) -> dict[str, Any]:
        return {"ucm_sparse_method": method, "ucm_sparse_config": {method: section}}

    asked = {
        DENSE: ({}, 0),
        GSA: (sparse("GSA"), 0),
        KVSTAR: (sparse("KVStar"), 0),
        VERIFY: (sparse("KVStar"), options.drafts),
    }
    if options.unlocked:
        asked[UNLOCKED] = (sparse("GSA"), options.drafts)
    ahead = {"scheduler": {"async_scheduling": True}} if options.ahead else {}
    return {name: side(name, ucm | ahead, model, options, drafts, LOAD_FORMAT) for name, (ucm, drafts) in asked.items()}


def in_turn(sides: dict[str, EngineSide], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A table of each size. All engines are there, and their orders take turns."""
    say(start(sides), options)
    rows = []
    for size_ in options.sizes:
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        turns = [name for _ in range(options.repeats) for name in sides]
        with task_progress("{} x {}".format(*size_)) as progress:
            for index, name in enumerate(turns):
                answers[name].append(sides[name].ask(order(name, size_, options)))
                progress((index + 1) / len(turns))
        rows.append(table(size_, answers, options))
    return rows


def one_at_a_time(sides: dict[str, EngineSide], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same of engines that do not fit a device together: one starts when the one before has ended."""
    answers: dict[tuple[int, int], dict[str, list[dict[str, Any]]]] = {size_: {} for size_ in options.sizes}
    device = ""
    with task_progress("measuring engines") as progress:
        for index, (name, one) in enumerate(sides.items()):
            device = one.start()[1]["device"]
            for size_ in options.sizes:
                answers[size_][name] = [one.ask(order(name, size_, options)) for _ in range(options.repeats)]
            one.stop()
            progress((index + 1) / len(sides))
    say(device, options)
    return [table(size_, found, options) for size_, found in answers.items()]


def say(device: str, options: argparse.Namespace) -> None:
    print(f"{device}, {describe_machine()}; {options.shape}, {options.layers or 'all'} layers", flush=True)


def start(sides: dict[str, EngineSide]) -> str:
    """Starts the engines one after the other; the device on which they run."""
    device = ""
    with task_progress("starting engines") as progress:
        for index, one in enumerate(sides.values()):
            device = one.start()[1]["device"]
            progress((index + 1) / len(sides))
    return device


def order(name: str, size_: tuple[int, int], options: argparse.Namespace) -> dict[str, Any]:
    drafts = (
        {"drafts": options.drafts, "acceptance": options.acceptance, "source": options.drafts_by}
        if "drafts" in name
        else {}
    )
    requests, context = size_
    return {"requests": requests, "context": context, "steps": options.steps, "kernels": options.kernels, **drafts}


def table(
    size_: tuple[int, int], answers: dict[str, list[dict[str, Any]]], options: argparse.Namespace
) -> dict[str, Any]:
    """Medians of the repeats, printed."""
    requests, context = size_
    found = {name: medians(given) for name, given in answers.items()}
    row = {"requests": requests, "context": context, "engines": found, "answers": answers}
    show(row, options)
    return row


def show(row: dict[str, Any], options: argparse.Namespace) -> None:
    found = row["engines"]
    print(
        f"\n{row['requests']} x {row['context']}, {options.ratio:.0%}, {options.drafts} drafts, "
        f"made by the {options.drafts_by}, each accepted with {options.acceptance:.0%} where those before it are"
    )
    print(f"{'':<16}{'step, ms':>9}{'mean':>8}{'CPU ms':>8}{'device':>8}{'tokens':>8}{'tokens/s':>10}  dense  wrong")
    for name, one in found.items():
        device = f"{one['device_ms']:>8.3f}" if "device_ms" in one else f"{'-':>8}"
        print(
            f"{name:<16}{one['wall_ms']:>9.3f}{one['mean_ms']:>8.3f}{one['cpu_ms']:>8.2f}{device}{one['tokens']:>8.2f}"
            f"{rate(one):>10.1f}{one['dense_steps']:>4.0f}/{one['steps']:.0f}{one['wrong']:>6.0f}"
        )
    verify = found[VERIFY]
    for against in (GSA, KVSTAR):
        step = verify["wall_ms"] / found[against]["wall_ms"]
        mean = verify["mean_ms"] / found[against]["mean_ms"]
        print(f"verification over a decode of {against}: {step:.2f}x, mean {mean:.2f}x (goal {STEP_GOAL}x at most)")
    gain = rate(verify) / rate(found[GSA])
    print(f"tokens per second with drafts over GSA without: {gain:.2f}x (goal {TOKENS_GOAL}x)", flush=True)
    for name, one in found.items():
        for kernel, count, spent in one.get("kernels", []):
            print(f"  {name:<16}{spent:>8.3f} ms {count:>6.0f} x  {kernel}")


def rate(found: dict[str, Any]) -> float:
    """Tokens per second, of the mean step: some choose, most do not."""
    return float(found["tokens"] / found["mean_ms"] * 1e3)


if __name__ == "__main__":
    sys.exit(main())
