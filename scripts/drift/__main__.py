"""usage: python -m scripts.drift compare VLLM [--against VLLM] [--json] | refresh VLLM [VLLM ...]

VLLM: a version, which pip fetches, a folder with sources, or the file of a source distribution.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from scripts.drift.contracts import CONDITIONS, TABLE, load
from scripts.drift.findings import Comparison, Finding, Table
from scripts.drift.report import as_json, print_report
from scripts.drift.source_distribution import SourcesError, installed_sources, sources_of
from scripts.drift.source_tree import SourceTree
from scripts.drift.table import Rows, Version, write
from scripts.drift.uses import Uses, find_uses, our_sources

console = Console()
progress = Console(stderr=True)


def compared(tree: SourceTree, baseline: SourceTree, table: Table | None = None) -> tuple[list[Finding], int]:
    """Findings in a version's sources, and the number of rows.

    baseline: the version whose types are used to read the code. table: None takes the uses of the baseline.
    """
    uses = find_uses(our_sources(), baseline)
    rows = Rows([(baseline, uses)]).contracts() if table is None else table
    return Comparison(rows, Version(tree, rows.values()), uses).findings(), len(rows)


def compare(options: argparse.Namespace) -> int:
    """Prints the differences; returns 1 if some use no longer works."""
    with progress.status("Reading vLLM and the code that uses it"):
        tree = sources_of(options.vllm)
        baseline = sources_of(options.against) if options.against else installed_sources() or tree
        findings, rows = compared(tree, baseline, None if options.against else load())
    if options.json:
        print(as_json(findings, options.vllm, rows))
    else:
        print_report(findings, options.vllm, rows, console)
    return int(any(finding.is_broken for finding in findings))


def refresh(options: argparse.Namespace) -> int:
    """Writes the table of the code's uses of these versions; returns 1 if the code does not work with one."""
    with progress.status("Reading vLLM and the code that uses it") as status:
        trees = [sources_of(named) for named in options.vllm]
        ours = our_sources()
        versions: list[tuple[SourceTree, Uses]] = []
        for named, tree in zip(options.vllm, trees, strict=True):
            status.update(f"Reading the code with the types of vLLM {named}")
            versions.append((tree, find_uses(ours, tree)))
    before, rows = load() if TABLE.exists() else {}, Rows(versions).contracts()
    write(rows.values(), TABLE)
    new, gone = len(rows.keys() - before.keys()), len(before.keys() - rows.keys())
    changed = sum(before[key] != rows[key] for key in rows.keys() & before.keys())
    counts = f"{len(rows)} contracts, {new} new, {changed} changed, {gone} gone"
    console.print(f"{TABLE.name}: {counts}. Review the difference.", soft_wrap=True, highlight=False)
    known = {row.full_name for row in rows.values()}
    for name in sorted(CONDITIONS.keys() - known):
        console.print(f"CONDITIONS has {name}, which the code does not use: remove it from scripts/drift/contracts.py.")
    is_broken = False
    for named, (tree, uses) in zip(options.vllm, versions, strict=True):
        findings = [one for one in Comparison(rows, Version(tree, rows.values()), uses).findings() if one.is_broken]
        if findings:
            is_broken = True
            print_report(findings, named, len(rows), console)
    if is_broken:
        console.print(
            "The code must work with each of these versions: mend it, or have it ask whether a name is there "
            "(try, hasattr, getattr with a default). If it does without the name anyway, say why in CONDITIONS "
            "of scripts/drift/contracts.py."
        )
    return int(is_broken)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.drift", description="What this package relies on in vLLM.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    sources = "a version, which pip fetches, a folder with sources, or the file of a source distribution"
    one = commands.add_parser("compare", help="print what differs in a version; exit status 1 if something breaks")
    one.add_argument("vllm", metavar="VLLM", help=sources)
    one.add_argument("--against", metavar="VLLM", help="compare with this version instead of the table")
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one.set_defaults(run=compare)
    two = commands.add_parser("refresh", help="write the table of what the code uses of the supported versions")
    two.add_argument("vllm", nargs="+", metavar="VLLM", help=f"oldest first; each {sources}")
    two.set_defaults(run=refresh)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except SourcesError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
