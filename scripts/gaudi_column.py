"""Fills the unknown cells of the column *Gaudi* in docs/models.toml, by engines on the simulated card.

It walks families and features, runs `scripts/check_device_families.py` for the unknown cells, and keeps every outcome
in a results file, from which the next run resumes. `--fill` then writes the cells that were right. In each of these
engines but the ones at true shapes, the card compiles nothing after the warm-up.

usage: python -m scripts.gaudi_column [--families NAME ...] [--features NAME ...] [--minutes N] [--again] [--fill]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scripts.support_matrix import cells, load

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "models.toml"
SCRIPT = "scripts/check_device_families.py"
# names of the script that differ from the table's
NAMES = {
    "windows": "mistral, window",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4, own keys",
    "gemma4_e": "gemma4_text",
    "llama4": "llama4_text",
}
# cells that the script decides -> what it calls the case, and its arguments; cases without arguments run one after the
# other in a process
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "stores": ("stores", ()),
    "drafts": ("drafts and swaps", ()),
    "swap": ("drafts and swaps", ()),
    "sparse": ("all blocks chosen", ()),
    "fp8 cache": ("8-bit cache", ()),
    "buckets": ("dense", ()),
    "prefix cache": ("dense", ()),
    "preemption": ("dense", ()),
    "true shapes": ("true shapes", ()),
    "token slots": ("slots for tokens", ()),
    "several devices": ("2 ranks, 1 stages", ("--tensor-parallel", "2")),
    "stages": ("1 ranks, 2 stages", ("--stages", "2")),
    "quantised weights": ("dense, fp8 per channel", ("--features", "dense", "--quantised", "fp8 per channel")),
    "engines": ("2 engines", ("--engines", "2")),
}
# what the page of validated configurations shows
OF_VALIDATED = ("buckets", "several devices", "quantised weights")
# cases of a process at most: an unfinished one has to run again
TOGETHER = 3


class Run(NamedTuple):
    """A process of the script: a family of the table, the cases that decide its cells, and arguments."""

    family: str
    cases: tuple[str, ...]
    arguments: tuple[str, ...]

    def key(self, case: str) -> str:
        return f"{self.family}: {case}"


def runs_to_do(
    table: dict[str, Any], families: list[str], features: list[str], done: Callable[[str], bool]
) -> Iterator[Run]:
    """Yields runs that decide unknown cells. done: whether a case of a family needs no run, by its key."""
    for arguments in dict.fromkeys(RUNS[feature][1] for feature in features):
        for family in families:
            known = cells(table, family, "gaudi")
            if table["families"][family].get("for_validated"):
                known |= dict.fromkeys(set(features) - set(OF_VALIDATED), "")
            wanted = [RUNS[one][0] for one in features if RUNS[one][1] == arguments and one not in known]
            cases = [case for case in dict.fromkeys(wanted) if not done(f"{family}: {case}")]
            yield from (
                Run(family, tuple(cases[begin : begin + TOGETHER]), arguments)
                for begin in range(0, len(cases), TOGETHER)
            )


def run(asked: Run, seconds: float) -> dict[str, dict[str, Any]]:
    """Runs the script; returns for each case whether it was right, and what the script said of it."""
    # none of these imports torch, so this process needs no card
    from tests.fork_server import ProcessOnCard
    from tests.sim_path import SIM_PATH
    from tests.warm_process import WarmProcess

    path = os.pathsep.join(filter(None, (SIM_PATH, str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "VLLM_GAUDI_UCM_DEVICE": "hpu", "HF_HUB_OFFLINE": "1"}
    # an engine in the process of the script, unless a case asks for several
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    name = NAMES.get(asked.family, asked.family)
    arguments = asked.arguments or ("--features", *asked.cases)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = ["--families", name, *arguments]
        process = WarmProcess(serve, (command,), log=log, env=env, cwd=ROOT, kind=ProcessOnCard)
        try:
            crashed = process.finish(seconds) != 0
            output = log.read_text(errors="replace")
            end = output[-1500:] if crashed else "the script has no such case"
        except subprocess.TimeoutExpired:
            output, end = log.read_text(errors="replace"), f"still running after {seconds:.0f} s"
    found = {}
    for case in asked.cases:
        begin = f"{name}, {case}: "
        said = next((line.removeprefix(begin) for line in output.splitlines() if line.startswith(begin)), None)
        found[asked.key(case)] = {"right": said is not None and "WRONG" not in said, "said": said or end}
    return found


def serve(arguments: list[str]) -> None:
    """Runs the script in a process that forked from one with vLLM imported, and so do its workers: no imports again."""
    from scripts.check_device_families import main as check
    from tests.engine.hpu_process import fork_workers
    from tests.import_heap import freeze_imports, leave_out_collections

    freeze_imports()
    leave_out_collections()
    fork_workers()
    sys.exit(check(arguments))


def walk(args: argparse.Namespace, table: dict[str, Any]) -> None:
    """Runs what is unknown and has no result yet, until the time is up."""
    results, begin = read_results(args.results), time.perf_counter()
    known = script_families(args.results.with_suffix(".families"))
    families = [name for name in args.families or table["families"] if NAMES.get(name, name) in known]

    def done(key: str) -> bool:
        return is_right(results, key) if args.again else key in results

    todo = list(runs_to_do(table, families, args.features, done))
    print(f"{len(todo)} runs to do, {len(results)} cases done before", flush=True)
    for number, asked in enumerate(todo):
        if args.minutes is not None and time.perf_counter() - begin > 60 * args.minutes:
            print(f"{len(todo) - number} runs are left; run the command again")
            return
        found = run(asked, args.timeout * len(asked.cases))
        results |= found
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(results, indent=1) + "\n")
        for key, one in found.items():
            print(f"{key}: {'right' if one['right'] else 'WRONG'}, {one['said']}", flush=True)


def is_right(results: dict[str, Any], key: str) -> bool:
    return bool(results.get(key, {}).get("right"))


def script_families(file: Path) -> set[str]:
    """Returns the families that the script serves, kept in a file until the script changes."""
    if file.exists() and file.stat().st_mtime > (ROOT / SCRIPT).stat().st_mtime:
        return set(file.read_text().splitlines())
    code = "import scripts.check_device_families as s; print('\\n'.join(name for name, _ in s.families()))"
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
            # the end of the family's own lines, which may be the file's end
            place = f"{text}\n".index("\n\n", text.index(f"[families.{family}]\n"))
            text = f"{text[:place]}\n\n{header}{lines.rstrip()}{text[place:]}"
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
    parser.add_argument("--timeout", type=float, default=900, help="seconds of a case (default: %(default)s)")
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
