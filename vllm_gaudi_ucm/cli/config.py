"""`gaudi-ucm config`: the configuration table, or the check of a configuration file."""

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table

from vllm_gaudi_ucm.config.ucm_config import describe, markdown_table, resolve_value
from vllm_gaudi_ucm.options.errors import UcmConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `gaudi-ucm config`."""
    parser.add_argument(
        "--check", metavar="FILE", help="check a YAML or JSON file and print it with defaults filled in"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="the table as Markdown, as it stands in the README")
    form.add_argument("--json", action="store_true", help="the table, or the outcome of --check, as JSON")


def run(args: argparse.Namespace) -> int:
    """0; with --check 1 where the file has problems."""
    if args.check is not None:
        return _check(args.check, args.json)
    if args.markdown:
        print(markdown_table())
    elif args.json:
        print(json.dumps([row._asdict() for row in describe()], indent=2))
    else:
        _print_table()
    return 0


def _check(file: str, as_json: bool) -> int:
    try:
        config = resolve_value(file)
    except UcmConfigError as error:
        problems = [str(problem) for problem in error.problems]
        if as_json:
            print(json.dumps({"ok": False, "problems": problems, "config": None}, indent=2))
        else:
            print("\n".join(problems), file=sys.stderr)
        return 1
    resolved = config.to_dict()
    print(json.dumps({"ok": True, "problems": [], "config": resolved} if as_json else resolved, indent=2))
    return 0


def _print_table() -> None:
    table = Table(title="--additional-config '{\"ucm\": {...}}'")
    table.add_column("key", no_wrap=True)
    for heading in ("type", "default", "what it does"):
        table.add_column(heading, overflow="fold")
    for row in describe():
        table.add_row(row.key, row.type, row.default, row.description)
    Console(markup=False).print(table)
