"""Runs the small suite on pairs of vLLM and torch, and prints a table. `make test-window` calls it.

usage: python -m scripts.run_window --newest PAIR=VENV --venvs FOLDER [--part PART]... [--json FILE] PAIR...

The environment of a pair is FOLDER/PAIR; the newest pair has VENV. The file of --json (.cache/window.json) is one
object: `schema` (1) and `pairs`, by their names: `vllm`, `torch`, `python`, `date`, `parts` (passed, failed and skipped
tests of each) and `failed` (names). A run replaces the pairs and parts that it ran. Exit code 1 if a test failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.window_suite import ROOT, PairResult, Suite, load, read_report

RESULTS = Path(".cache/window.json")
SCHEMA = 1
VERSIONS = """
import json, platform
from importlib.metadata import version
print(json.dumps([version("vllm"), version("torch"), platform.python_version()]))
"""


def main() -> int:
    args = _arguments()
    suite = load()
    parts = args.part or list(suite.parts)
    for part in parts:
        if part not in suite.parts:
            sys.exit(f"error: --part {part} is not in the suite; expected one of {', '.join(suite.parts)}")
    newest, _, newest_venv = args.newest.partition("=")
    results: dict[str, PairResult] = {}
    for number, pair in enumerate(args.pairs, start=1):
        print(f"\n=== pair {number} of {len(args.pairs)}: vLLM and torch {pair}", flush=True)
        venv = Path(newest_venv) if pair == newest else args.venvs / pair
        results[pair] = run_pair(pair, venv / "bin" / "python", suite, parts, args.processes)
        keep(args.json, pair, results[pair])
    print_table(results, parts)
    print(f"the results of this and earlier runs are in {args.json}")
    return 0 if all(result.ok for result in results.values()) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pairs", nargs="+", metavar="PAIR", help="vLLM's version and torch's, such as 0.32.0-2.11.0")
    parser.add_argument("--newest", required=True, metavar="PAIR=VENV", help="the pair of the first environment")
    parser.add_argument("--venvs", required=True, type=Path, metavar="FOLDER", help="environments of the other pairs")
    parser.add_argument("--part", action="append", metavar="PART", help="only this part of the suite; may be repeated")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="processes of pytest")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help="where results are written")
    return parser.parse_args()


def run_pair(pair: str, python: Path, suite: Suite, parts: list[str], processes: int) -> PairResult:
    """Runs pytest in the environment of the pair."""
    vllm, torch, version = _versions(pair, python)
    result = PairResult(vllm, torch, version, datetime.date.today().isoformat())
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "--numprocesses", str(processes), "--dist", "loadfile"]
        command += ["-o", "junit_family=xunit1", f"--junit-xml={report}", *suite.arguments(parts)]
        status = subprocess.run(command, cwd=ROOT).returncode
        if report.is_file():
            read_report(report, suite, result)
    if status != 0 and not result.failed:
        result.failed.append(f"pytest ended with status {status}")
    return result


def _versions(pair: str, python: Path) -> list[str]:
    """Versions of vLLM, torch and Python in an environment; exits with an error if it has another pair."""
    if not python.is_file():
        sys.exit(f"error: {python} does not exist; `make setup-window PAIR={pair}` makes the environment")
    done = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"error: {python} cannot say its versions:\n{done.stderr}")
    found = [text.partition("+")[0] for text in json.loads(done.stdout)]
    if "-".join(found[:2]) != pair:
        sys.exit(f"error: {python} has vLLM {found[0]} and torch {found[1]}, expected {pair}; remove that environment")
    return found


def keep(path: Path, pair: str, result: PairResult) -> None:
    """Writes a pair's result; parts that this run left out stay as an earlier run of the pair found them."""
    kept: dict[str, Any] = (
        json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"schema": SCHEMA, "pairs": {}}
    )
    earlier = kept["pairs"].get(pair, {})
    found = result.to_dict()
    others = {part: counts for part, counts in earlier.get("parts", {}).items() if part not in result.parts}
    suite = load()
    found["failed"] += [name for name in earlier.get("failed", ()) if "::" in name and suite.part_of(name) in others]
    found["parts"] = {part: (found["parts"] | others)[part] for part in suite.parts if part in found["parts"] | others}
    kept["pairs"][pair] = found
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def print_table(results: dict[str, PairResult], parts: list[str]) -> None:
    table = Table(title="Tests that passed")
    for title in ("vLLM", "torch"):
        table.add_column(title, no_wrap=True, min_width=len("0.33.0"))
    for title in parts:
        table.add_column(title)
    for result in results.values():
        table.add_row(result.vllm, result.torch, *(_cell(result.parts.get(part)) for part in parts))
    console = Console()
    console.print(table)
    for pair, result in results.items():
        for name in result.failed:
            console.print(f"failed on {pair}: {name}", style="red", markup=False, soft_wrap=True)


def _cell(counts: dict[str, int] | None) -> str:
    if counts is None:
        return "none"
    return f"{counts['passed']}" + (f", {counts['failed']} failed" if counts["failed"] else "")


if __name__ == "__main__":
    sys.exit(main())
