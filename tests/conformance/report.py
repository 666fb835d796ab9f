"""A run of vLLM's own tests as a table, and as the page of the documentation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.conformance.expectations import Expectations, Rule
from tests.conformance.outcome import KINDS, WRONG, Outcome

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/conformance.json"
PAGE = ROOT / "docs/conformance.md"
INTRO = """# vLLM's own tests

vLLM's source distribution comes with its tests. `make conformance` fetches it, runs the tests of the parts that this
plugin takes part in, with the plugin on the CPU, and prints a table. No hub of models is needed: each model or adapter
that a test names is a small one with random weights, the demo model, or all-MiniLM-L6-v2, under that name. None of this
ran on a Gaudi.

Every test of these groups must pass, unless `tests/conformance/expectations.toml` lists it with a reason. A test that
fails and is not listed makes the run fail; so does one that passes though it is expected to fail. *Refused* tests ask
for a feature that the plugin refuses by name when an engine is configured; the list says which.

<!-- needs: network, minutes -->
```bash
make conformance                                        # all groups
make conformance ARGS="--group sampler --json out.json" # one of them, every outcome as JSON
make conformance ARGS="--quick"                         # a smaller set
make conformance ARGS="--without-plugin"                # on vLLM's own CPU platform, to compare
```

`make conformance ARGS="--save"` writes `docs/conformance.json` and this page. With `--group` it renews that group; with
names of files it renews these files, so that a long group need not run at once.

`--without-plugin` runs the same tests on vLLM's CPU platform, and counts as failed whatever fails there. vLLM as
`make setup` installs it has no operators for that platform, so a test that starts an engine fails at
`torch.ops._C.init_cpu_memory_env`: compare groups that start none, such as `--group "scheduler and KV cache"`.

| column | tests |
|---|---|
"""


def counts(outcomes: Iterable[Outcome]) -> dict[str, dict[str, dict[str, int]]]:
    """Group -> file -> kind -> number of tests, in the order of the outcomes."""
    found: dict[str, dict[str, Counter[str]]] = {}
    for one in outcomes:
        found.setdefault(one.group, {}).setdefault(one.file, Counter())[one.kind] += 1
    return {group: {file: dict(kinds) for file, kinds in sorted(files.items())} for group, files in found.items()}


def terminal_table(outcomes: Sequence[Outcome], files: bool) -> Table:
    """A row for each group, and for each of its files where asked for."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("group or file", overflow="fold")
    for kind in KINDS:
        table.add_column(kind, justify="right", style="red" if kind in WRONG else "")
    for group, rows in counts(outcomes).items():
        table.add_row(group, *_numbers(_total(rows.values())), style="bold")
        if files:
            for file, row in rows.items():
                table.add_row(f"  {file.removeprefix('tests/')}", *_numbers(row))
    table.add_row("all", *_numbers(Counter(one.kind for one in outcomes)), style="bold")
    return table


def page(results: Mapping[str, Any]) -> str:
    """The page of the documentation.

    Args:
        results: the content of docs/conformance.json: version of vLLM -> groups, missing, listed.
    """
    parts = [INTRO + "".join(f"| {kind} | {meaning} |\n" for kind, meaning in KINDS.items())]
    for version in sorted(results, key=lambda text: [int(part) for part in text.split(".")], reverse=True):
        parts.append("\n".join(_section(version, results[version])))
    return "\n".join(parts) + "\n"


def _section(version: str, result: Mapping[str, Any]) -> Iterator[str]:
    groups = result["groups"]
    yield f"## vLLM {version}\n"
    yield "| group | run | " + " | ".join(KINDS) + " |"
    yield "|---|---|" + "---:|" * len(KINDS)
    for group, run in groups.items():
        yield (
            f"| {group} | {run['date']}, {run['with']} | " + " | ".join(_numbers(_total(run["files"].values()))) + " |"
        )
    everything = _total(row for run in groups.values() for row in run["files"].values())
    yield "| **all** | | " + " | ".join(_numbers(everything)) + " |"
    yield ""
    if result["missing"]:
        yield f"Groups and files without a result for this version: {', '.join(result['missing'])}.\n"
    titles = (("refused", "Refused by name"), ("expected_to_fail", "Expected to fail"), ("not_run", "Not run"))
    for kind, title in titles:
        if entries := result["listed"][kind]:
            yield f"{title}:\n"
            yield f"| {'feature' if kind == 'refused' else 'tests'} | reason |"
            yield "|---|---|"
            yield from (f"| {'<br>'.join(f'`{test}`' for test in tests)} | {reason} |" for reason, tests in entries)
            yield ""


def save(
    expectations: Expectations,
    outcomes: Sequence[Outcome],
    about: Mapping[str, str],
    files: Mapping[str, Iterable[str]],
    *,
    joined: bool = False,
    results: Path = RESULTS,
    page_file: Path = PAGE,
) -> None:
    """Puts the groups that have run into the file of results, and writes the page anew; other groups keep theirs.

    Args:
        expectations: what was expected.
        outcomes: of whole groups, or of whole files.
        about: `vllm` (its version), `date`, and `with`: the versions of what else took part.
        files: all files of each group. Of a group with results, the page names the files that have none.
        joined: whether other files of these groups keep their results.
        results, page_file: where they are written.
    """
    kept = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    before = kept.get(about["vllm"], {"groups": {}})["groups"]
    run = {"date": about["date"], "with": about["with"]}
    now = {group: _joined(run, rows, before.get(group) if joined else None) for group, rows in counts(outcomes).items()}
    names = [group.name for group in expectations.groups]
    merged = {**before, **now}
    lacking = [file for name in names if name in merged for file in sorted({*files[name]} - {*merged[name]["files"]})]
    kept[about["vllm"]] = {
        "groups": {name: merged[name] for name in names if name in merged},
        "missing": [name for name in names if name not in merged] + lacking,
        "listed": {
            "refused": [[one.reason, [one.feature]] for one in expectations.refused],
            "expected_to_fail": _listed(expectations.expected_to_fail),
            "not_run": _listed(expectations.not_run),
        },
    }
    results.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    page_file.write_text(page(kept), encoding="utf-8")


def _joined(
    run: Mapping[str, str], rows: Mapping[str, Mapping[str, int]], before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns a group's entry. before: the entry whose other files stay."""
    kept = {file: row for file, row in before["files"].items() if file not in rows} if before else {}
    with_what = f"{run['with']}, joined from several runs" if kept else run["with"]
    return {**run, "with": with_what, "files": dict(sorted({**kept, **rows}.items()))}


def _listed(rules: Iterable[Rule]) -> list[list[Any]]:
    return [[rule.reason, [test.removeprefix("tests/") for test in rule.tests]] for rule in rules]


def _total(rows: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row)
    return total


def _numbers(row: Mapping[str, int]) -> list[str]:
    return [f"{row[kind]:,}" if row.get(kind) else "" for kind in KINDS]
