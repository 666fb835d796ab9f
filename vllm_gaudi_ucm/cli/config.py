"""`gaudi-ucm config`: lists all options in short or a section's in full, or checks a configuration file."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vllm_gaudi_ucm.cli.output import prose_console
from vllm_gaudi_ucm.config.ucm_config import (
    ROOT,
    OptionRow,
    UcmConfig,
    describe,
    markdown_table,
    resolve_value,
    section_description,
    sections,
)
from vllm_gaudi_ucm.options.errors import UcmConfigError, unknown_key

if TYPE_CHECKING:
    from vllm_gaudi_ucm.cli.doctor.check import Check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "section",
        metavar="SECTION",
        nargs="?",
        help="options to describe in full: a section, such as graphs or GSA, or one option; all for every option "
        "(default: all of them, in short)",
    )
    parser.add_argument(
        "--check", metavar="FILE", help="check a YAML or JSON file and print it with defaults filled in"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="the table as Markdown, as it stands in the reference")
    form.add_argument("--json", action="store_true", help="the table, or the outcome of --check, as JSON")


def run(args: argparse.Namespace) -> int:
    """Returns 0; with --check, 1 if the file has problems."""
    if args.check is not None:
        if args.section is not None or args.markdown:
            raise ValueError(f"--check {args.check} checks a whole file: expected neither SECTION nor --markdown")
        return _check(args.check, args.json)
    rows = _rows_of(args.section)
    if args.markdown:
        print(markdown_table(rows))
    elif args.json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
    elif args.section is None:
        _print_overview(rows)
    else:
        _print_options(rows)
    return 0


ALL = "all"


def _rows_of(asked: str | None) -> list[OptionRow]:
    """Returns the options of a section, or one option, by its key with or without prefix.

    Raises ValueError for an unknown key.
    """
    rows = describe()
    if asked in (None, ALL):
        return rows
    wanted = asked.strip(".").lower()
    found = [row for row in rows if f".{wanted}." in f".{row.key.lower()}."]
    if not found:
        names = {part for row in rows for part in row.key.split(".")[1:]}
        raise ValueError(f"SECTION {unknown_key(asked, '', sorted(names))}; `gaudi-ucm config` lists them all")
    return found


def _check(file: str, as_json: bool) -> int:
    config: dict[str, Any] | None = None
    try:
        resolved = resolve_value(file)
        config, problems = resolved.to_dict(), _problems_of_files(resolved)
    except UcmConfigError as error:
        problems = [str(problem) for problem in error.problems]
    if as_json:
        print(json.dumps({"ok": not problems, "problems": problems, "config": config}, indent=2))
    elif problems:
        print("\n".join(problems), file=sys.stderr)
    else:
        print(json.dumps(config, indent=2))
    return 1 if problems else 0


def _problems_of_files(config: UcmConfig) -> list[str]:
    """Returns the doctor's problems with the files, folders and stores that the options name, on this machine now."""
    from vllm_gaudi_ucm.cli.doctor.check import guarded
    from vllm_gaudi_ucm.cli.doctor.configuration import place_checks, sparse_checks, static_shape_checks

    found: list[Check] = []
    # vLLM's logger and plugins write to stdout, which belongs to the report.
    with contextlib.redirect_stdout(sys.stderr):
        device = _device(config)
        found += guarded("static shapes", lambda: static_shape_checks(config, device))
        found += guarded("files", lambda: place_checks(config, device))
        found += guarded("sparse", lambda: sparse_checks(config))
    return [_sentence(check) for check in found if check.status == "fail"]


def _device(config: UcmConfig) -> str | None:
    """The device if the validity of options depends on it, because vLLM takes seconds to tell. None if unknown."""
    graphs = config.graphs
    if graphs.mode in ("auto", "off") and graphs.recipe_cache is None:
        return None
    from vllm_gaudi_ucm.device.detect import detect_device

    try:
        return detect_device()
    except (ValueError, RuntimeError) as error:
        print(f"the device is not known, and what depends on it not checked: {error}", file=sys.stderr)
        return None


def _sentence(check: Check) -> str:
    text = check.found if check.found.startswith(check.name) else f"{check.name}: {check.found}"
    text += f"; expected {check.expected}" if check.expected else ""
    return text + (f"; to do: {check.advice}" if check.advice else "")


def _print_overview(rows: list[OptionRow]) -> None:
    """A line for each option: its default, and the first sentence of its description."""
    console = prose_console()
    console.print(f"Options under {ROOT!r} in --additional-config, with their defaults.")
    console.print("`gaudi-ucm config SECTION` describes the options of a section in full, such as graphs or GSA.")
    for key, options in sections(rows).items():
        console.print(_heading(key))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, min_width=NAME_WIDTH)
        table.add_column(overflow="fold", min_width=DEFAULT_WIDTH, max_width=DEFAULT_WIDTH)
        table.add_column()
        for row in options:
            about = row.description.partition(". ")[0].rstrip(".")
            table.add_row(Text(row.key.rpartition(".")[2], style="bold"), row.default, about)
        console.print(Padding(table, (0, 0, 0, 2)))


def _print_options(rows: list[OptionRow]) -> None:
    console = prose_console()
    for key, options in sections(rows).items():
        console.print(_heading(key))
        for row in options:
            console.print()
            console.print(Text.assemble((row.key, "bold"), f" = {row.default}"))
            console.print(Padding(Text(row.type, style="cyan"), (0, 0, 0, 4)))
            console.print(Padding(Text(row.description), (0, 0, 0, 4)))


# of the shortest of the overview's first two columns; keys are up to 22 characters long
NAME_WIDTH, DEFAULT_WIDTH = 22, 10


def _heading(key: str) -> Text:
    about = section_description(key)
    return Text.assemble("\n", (key, "bold cyan"), f": {about}" if about else "")
