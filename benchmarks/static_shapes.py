"""Graphs against no graphs on one device: the same mixed load, greedy tokens compared, tokens/s, memory, warm-up.

Each way of running is an engine in a process of its own, with a small random Llama, so it needs no download. usage:
VLLM_GAUDI_UCM_DEVICE=cuda python -m benchmarks.static_shapes
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine

# name -> (ucm.graphs.mode, what it is)
WAYS = {
    "off": "true shapes, operator by operator",
    "eager": "padded to buckets, operator by operator",
    "capture": "padded to buckets, captured graphs",
    "idle": "captured graphs, warmed in idle gaps",
    "compile": "padded to buckets, torch.compile",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["off", "eager", "capture", "idle"])
    parser.add_argument("--size", choices=("tiny", "small"), default="small", help="of the model and its load")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-graphs", type=int, default=64)
    parser.add_argument("--skeleton", type=int, default=3, help="forward graphs before serving (default: 3)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_child(["make", args.size, folder])
        results = {}
        for way in args.ways:
            print(f"{way}: {WAYS[way]} ...", file=sys.stderr, flush=True)
            options = [way, args.size, folder, args.dtype, str(args.max_graphs), str(args.skeleton), str(args.repeats)]
            results[way] = run_child(["run", *options])
    print(describe_machine())
    for line in table(results):
        print(line)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    same = {way: result["tokens"] == results[args.ways[0]]["tokens"] for way, result in results.items()}
    return 0 if all(same.values()) else 1


def run_child(arguments: list[str]) -> dict[str, Any]:
    """The last line that the process prints, as JSON."""
    command = [sys.executable, "-m", "benchmarks.static_shapes_side", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown; ratios and equality against the first way."""
    first = next(iter(results.values()))
    lines = [
        first["device"],
        "",
        "| way | tokens/s | ratio | tokens equal | padded / true rows "
        "| graphs | graph memory | first answer after | all warm after |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for way, found in results.items():
        equal = sum(a == b for a, b in zip(found["tokens"], first["tokens"], strict=True))
        rate = found["tokens_per_second"]
        graphs = f"{found['graphs']} | {found['graph_bytes'] / 2**20:.0f} MiB" if found["graphs"] else "- | -"
        warm = f"{found['skeleton_seconds']:.1f} s | {found['warm_up_seconds']:.1f} s" if found["graphs"] else "- | -"
        lines.append(
            f"| {way}: {WAYS[way]} | {rate:.0f} | {rate / first['tokens_per_second']:.2f}x "
            f"| {equal} of {len(first['tokens'])} | {found['padding']:.2f} | {graphs} | {warm} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
