"""`gaudi-ucm config`: the configuration table, or the check of a configuration file."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from vllm_gaudi_ucm.config.ucm_config import UcmConfig, describe, markdown_table, resolve_value
from vllm_gaudi_ucm.options.errors import UcmConfigError

if TYPE_CHECKING:
    from vllm_gaudi_ucm.cli.doctor.check import Check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `gaudi-ucm config`."""
    parser.add_argument(
        "--check", metavar="FILE", help="check a YAML or JSON file and print it with defaults filled in"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="the table as Markdown, as it stands in the reference")
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
    """What the doctor finds wrong with the files, folders and stores that the options name, here and now."""
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
    """The device, where options are right or wrong by it: vLLM takes seconds to say it. None where it is not known."""
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


def _print_table() -> None:
    table = Table(title="--additional-config '{\"ucm\": {...}}'")
    table.add_column("key", no_wrap=True)
    for heading in ("type", "default", "what it does"):
        table.add_column(heading, overflow="fold")
    for row in describe():
        table.add_row(row.key, row.type, row.default, row.description)
    Console(markup=False).print(table)
