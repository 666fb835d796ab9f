"""vLLM's own tests with this plugin: `make conformance`, or `python -m tests.conformance --group sampler`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from pathlib import Path
from platform import python_version
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scripts.vllm_sources import SourcesError, fetch
from tests.conformance.expectations import FILE, Expectations, Group, load, select
from tests.conformance.group_run import GroupRun
from tests.conformance.hub import make_hub
from tests.conformance.outcome import Outcome, problems, unmatched
from tests.conformance.report import ROOT, save, terminal_table
from tests.conformance.tree import environment, files_of, make_tree

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs groups. Returns 0 if all ended as expected, 1 if not, 2 for wrong arguments, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    installed = version_of("vllm").partition("+")[0]
    try:
        expectations = load(installed)
        if options.listed:
            expectations = replace(expectations, not_run=())
        if options.without_plugin:
            # of this plugin alone
            expectations = replace(expectations, expected_to_fail=(), refused=())
        groups = _groups(expectations, options)
        sources = options.sources or fetch(installed)
    except (ValueError, SourcesError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    work = options.work.resolve()
    # a table in a log has names of files whole
    width = None if sys.stdout.isatty() else 160
    console = Console(width=width, soft_wrap=True, highlight=False, markup=False)
    tree = make_tree(sources, work / installed)
    hub = make_hub(work / "hub", ROOT)
    variables = environment(hub, plugin=not options.without_plugin)
    extra = ("-k", options.k) if options.k else ()
    runs = [GroupRun(group, expectations, tree, variables, work / "logs", extra) for group in groups]
    outcomes: list[Outcome] = []
    try:
        _run(groups, runs, console, outcomes)
    except KeyboardInterrupt:
        return INTERRUPTED
    whole = not (options.quick or _divides_files(options))
    about = {
        "vllm": installed,
        "date": datetime.now(UTC).date().isoformat(),
        "with": f"torch {version_of('torch').partition('+')[0]}, Python {python_version()}",
    }
    wrong = problems(outcomes, _stale(expectations, groups, outcomes) if whole else [])
    console.print(terminal_table(outcomes, files=not options.quick))
    for line in wrong:
        console.print(line)
    if options.json is not None:
        content = {**about, "problems": wrong, "outcomes": [asdict(one) for one in outcomes]}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.save:
        files = {group.name: files_of(tree, group.tests) for group in expectations.groups}
        save(expectations, outcomes, about, files, joined=bool(options.tests))
    return int(bool(wrong))


def _groups(expectations: Expectations, options: argparse.Namespace) -> list[Group]:
    if options.save and (options.quick or _divides_files(options) or options.without_plugin):
        unfit = "--quick, -k, ids of tests, --listed, --without-plugin"
        raise ValueError(f"--save keeps whole groups or files with the plugin; leave out {unfit}")
    groups = select(expectations.groups, options.group, options.quick)
    if not options.tests:
        return groups
    chosen = [
        replace(group, tests=tuple(test for test in options.tests if test.startswith(group.tests)))
        for group in expectations.groups
    ]
    if lost := [test for test in options.tests if not any(test in group.tests for group in chosen)]:
        raise ValueError(f"{lost[0]}: no group has this file; see {FILE.name}")
    return [group for group in chosen if group.tests]


def _divides_files(options: argparse.Namespace) -> bool:
    """Returns whether these options run some tests of a file and not others."""
    return bool(options.k or options.listed or any("::" in test for test in options.tests))


def _run(groups: Sequence[Group], runs: Sequence[GroupRun], console: Console, outcomes: list[Outcome]) -> None:
    """Appends the outcomes of each group when it has ended, and prints a line for it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    current = TextColumn("{task.fields[current]}")
    with Progress(*columns, current, console=console, transient=True, disable=not console.is_terminal) as progress:
        for group, run in zip(groups, runs, strict=True):
            begin = time.monotonic()
            task = progress.add_task(group.name, total=None, current="")

            def shown(ended: int, collected: int, test: str, task: Any = task) -> None:
                progress.update(task, completed=ended, total=collected or None, current=test[-60:])

            found = run.outcomes(shown)
            progress.remove_task(task)
            outcomes += found
            passed = sum(one.kind == "passed" for one in found)
            console.print(f"{group.name}: {passed} of {len(found)} passed in {time.monotonic() - begin:.0f} s")


def _stale(expectations: Expectations, groups: Sequence[Group], outcomes: Sequence[Outcome]) -> list[str]:
    """Patterns of these groups that name no test."""
    prefixes = tuple(test for group in groups for test in group.tests)
    rules = [
        replace(rule, tests=tuple(pattern for pattern in rule.tests if pattern.startswith(prefixes)))
        for rule in (*expectations.not_run, *expectations.expected_to_fail)
    ]
    return unmatched(rules, [one.test for one in outcomes])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    add = parser.add_argument
    add("tests", nargs="*", metavar="TESTS", help="files or ids of tests, in place of whole groups")
    add("--group", action="append", default=[], metavar="NAME", help="run this group; may be repeated (default: all)")
    add("--quick", action="store_true", help="run a smaller set: the parts of groups that start few engines")
    add("-k", metavar="EXPRESSION", help="run tests whose names match, as pytest's option")
    add("--listed", action="store_true", help=f"run the tests that {FILE.name} leaves out, too")
    add("--without-plugin", action="store_true", help="run on vLLM's own CPU platform, to compare")
    add("--json", type=Path, metavar="FILE", help="write every outcome to this file, too")
    add("--save", action="store_true", help="write the results of whole groups or files, and the page about them")
    add("--sources", type=Path, metavar="FOLDER", help="vLLM's unpacked sources (default: fetched with pip)")
    add(
        "--work",
        type=Path,
        metavar="FOLDER",
        default=ROOT / ".cache/conformance",
        help="folder for the tests, models and logs (default: .cache/conformance)",
    )
    return parser


if __name__ == "__main__":
    # as Ctrl-C: the tests' processes are ended, too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
