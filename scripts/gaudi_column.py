"""Fills the unknown cells of the column *Gaudi* in docs/models.toml, by engines on the simulated card.

It walks families and features, runs `scripts/check_device_families.py` for each unknown cell, and keeps every outcome
in a results file, from which the next run resumes. `--fill` then writes the cells that were right.

usage: python -m scripts.gaudi_column [--families NAME ...] [--features NAME ...] [--minutes N] [--again] [--fill]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scripts.support_matrix import cells, load

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "models.toml"
SCRIPT = "scripts/check_device_families.py"
# names of the script that differ from the table's
NAMES = {"windows": "mistral, window", "gemma3": "gemma3_text", "llama4": "llama4_text"}
# cells that the script decides -> what it calls the case, and its arguments
RUNS: dict[str, tuple[str, list[str]]] = {
    "buckets": ("dense", ["--features", "dense"]),
    "prefix cache": ("dense", ["--features", "dense"]),
    "preemption": ("dense", ["--features", "dense"]),
    "true shapes": ("true shapes", ["--features", "true shapes"]),
    "drafts": ("drafts and swaps", ["--features", "drafts and swaps"]),
    "swap": ("drafts and swaps", ["--features", "drafts and swaps"]),
    "sparse": ("all blocks chosen", ["--features", "all blocks chosen"]),
    "stores": ("stores", ["--features", "stores"]),
    "token slots": ("slots for tokens", ["--features", "slots for tokens"]),
    "fp8 cache": ("8-bit cache", ["--features", "8-bit cache"]),
    "several devices": ("2 ranks, 1 stages", ["--tensor-parallel", "2"]),
    "stages": ("1 ranks, 2 stages", ["--stages", "2"]),
    "quantised weights": (
        "dense, fp8 per channel",
        ["--features", "dense", "--quantised", "fp8 per channel"],
    ),
    "engines": ("2 engines", ["--engines", "2"]),
}
LINE = re.compile(r"^(?P<name>.+?), (?P<said>.*) \(\d+\.\d s\)$")


class Cell(NamedTuple):
    """A run of the script: a family of the table, and the case that decides some of its cells."""

    family: str
    case: str
    arguments: list[str]

    @property
    def key(self) -> str:
        return f"{self.family}: {self.case}"


def unknown_cells(table: dict[str, Any], families: list[str], features: list[str]) -> Iterator[Cell]:
    """Yields runs that decide unknown cells, one feature after the other, without those that the script lacks."""
    for feature in features:
        case, arguments = RUNS[feature]
        for family in families:
            if feature not in cells(table, family, "gaudi"):
                yield Cell(family, case, arguments)


def run(cell: Cell, seconds: float) -> dict[str, Any]:
    """Runs the script for a cell; returns whether it was right, what it said, and seconds."""
    # tests/sim_path.py imports nothing of torch, so this process needs no card
    from tests.sim_path import SIM_PATH

    path = os.pathsep.join(filter(None, (SIM_PATH, str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "VLLM_GAUDI_UCM_DEVICE": "hpu", "HF_HUB_OFFLINE": "1"}
    name = NAMES.get(cell.family, cell.family)
    command = [sys.executable, SCRIPT, "--families", name, *cell.arguments]
    begin = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds)
        output, status = done.stdout, done.returncode
        end = done.stderr[-1500:]
    except subprocess.TimeoutExpired:
        output, status, end = "", -1, f"still running after {seconds:.0f} s"
    said = [line for line in output.splitlines() if line.startswith(f"{name}, {cell.case}: ")]
    is_right = status == 0 and len(said) == 1 and "WRONG" not in said[0]
    text = said[0].partition(": ")[2] if said else "no such case" if status == 0 else end
    return {"right": is_right, "said": text, "seconds": round(time.perf_counter() - begin, 1)}


def walk(args: argparse.Namespace, table: dict[str, Any]) -> None:
    """Runs what is unknown and has no result yet, until the time is up."""
    results, begin = read_results(args.results), time.perf_counter()
    known = script_families(args.results.with_suffix(".families"))
    families = [name for name in args.families or table["families"] if NAMES.get(name, name) in known]
    todo = {cell.key: cell for cell in unknown_cells(table, families, args.features)}
    todo = {key: cell for key, cell in todo.items() if args.again and not is_right(results, key) or key not in results}
    print(f"{len(todo)} runs to do, {len(results)} done before", flush=True)
    for number, (key, cell) in enumerate(todo.items(), 1):
        if args.minutes is not None and time.perf_counter() - begin > 60 * args.minutes:
            print(f"{len(todo) - number + 1} runs are left; run the command again")
            return
        results[key] = found = run(cell, args.timeout)
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(results, indent=1) + "\n")
        print(f"[{number}/{len(todo)}] {key}: {'right' if found['right'] else 'WRONG'}, {found['said']}", flush=True)


def is_right(results: dict[str, Any], key: str) -> bool:
    return bool(results.get(key, {}).get("right"))


def script_families(file: Path) -> set[str]:
    """Returns the families that the script serves, kept in a file until the script changes."""
    if file.exists() and file.stat().st_mtime > (ROOT / SCRIPT).stat().st_mtime:
        return set(file.read_text().splitlines())
    code = "import scripts.check_device_families as s; print('\\n'.join(name for name, _ in s.configs()))"
    env = {**os.environ, "VLLM_GAUDI_UCM_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(done.stdout)
    return set(done.stdout.splitlines())


def read_results(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def fill(results: dict[str, Any]) -> int:
    """Writes every unknown cell whose run was right into the table; returns how many."""
    table, text, count = load(), TABLE.read_text(encoding="utf-8"), 0
    for family in table["families"]:
        known = cells(table, family, "gaudi")
        new = [feature for feature, (case, _) in RUNS.items() if is_right(results, f"{family}: {case}")]
        lines = "".join(f'{quoted(feature)} = "{SCRIPT}"\n' for feature in new if feature not in known)
        if not lines:
            continue
        count += lines.count("\n")
        header = f"[families.{family}.gaudi]\n"
        if header in text:
            text = text.replace(header, header + lines)
        else:
            place = text.index(f"[families.{family}.cpu]\n")
            text = f"{text[:place]}{header}{lines}\n{text[place:]}"
    TABLE.write_text(text, encoding="utf-8")
    return count


def quoted(feature: str) -> str:
    """Returns a key of TOML."""
    return f'"{feature}"' if " " in feature else feature


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", metavar="NAME", help="names of docs/models.toml; all by default")
    parser.add_argument("--features", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME", help="columns")
    parser.add_argument("--results", type=Path, default=ROOT / ".cache" / "gaudi-column.json", metavar="FILE")
    parser.add_argument("--minutes", type=float, help="begin no run after so long; the next command goes on")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of a run (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="repeat runs that were not right")
    parser.add_argument("--fill", action="store_true", help="write what was right into docs/models.toml; runs nothing")
    args = parser.parse_args(argv)
    if args.fill:
        print(f"{fill(read_results(args.results))} cells filled; now run python scripts/support_matrix.py")
        return 0
    walk(args, load())
    return 0


if __name__ == "__main__":
    sys.exit(main())
