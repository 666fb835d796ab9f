"""`gaudi-ucm store`: shows the content of a store, checks that it is intact, and empties it, while engines run. Models
what a store would do for logged traffic.

Exit code of `verify`: 1 if corrupt blocks were found (they are removed), otherwise 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from vllm_gaudi_ucm.options.values import parse_bytes, show_bytes
from vllm_gaudi_ucm.store.base import StoreOptions
from vllm_gaudi_ucm.store.factory import open_medium, resolve_store_options, resolve_store_text
from vllm_gaudi_ucm.store.medium import Medium, Progress, StoredBlock, clear_blocks, verify_blocks
from vllm_gaudi_ucm_tools.output import report_console, task_progress
from vllm_gaudi_ucm_tools.store.agent_trace import add_agent_trace_arguments, agent_trace
from vllm_gaudi_ucm_tools.store.what_if import add_what_if_arguments, what_if


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the three options, of which exactly one has to be given."""
    store = parser.add_mutually_exclusive_group(required=True)
    store.add_argument("--store", metavar="FILE|JSON", help="options of the store, as in kv_connector_extra_config")
    store.add_argument(
        "--path", type=Path, metavar="FOLDER", help="a file store; short for its other options' defaults"
    )
    store.add_argument("--url", metavar="URL", help="a Redis store, such as redis://127.0.0.1:6379/0")


def store_options(args: argparse.Namespace) -> StoreOptions:
    """The options given. Raises `UcmConfigError`."""
    if args.path is not None:
        return resolve_store_options({"kind": "file", "path": str(args.path)})
    if args.url is not None:
        return resolve_store_options({"kind": "redis", "url": args.url})
    return resolve_store_text(args.store)


Result = TypeVar("Result")
EXIT_CORRUPT = 1
_WITHOUT_STORE: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]]
_WITHOUT_STORE = {
    "what-if": ("model hit rate and bytes of a store for logged traffic", add_what_if_arguments, what_if),
    "agent-trace": ("write synthetic traffic of agents for what-if", add_agent_trace_arguments, agent_trace),
}
"""Actions that open no store: help, declaration of options, and function."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, help_text in (
        ("stat", "count the blocks by their size"),
        ("verify", "read and check every block, remove corrupt ones, and list entries that are not blocks"),
        ("clear", "remove every block"),
        ("gc", "remove the least recently used blocks of a folder, by bytes or by age"),
    ):
        action = actions.add_parser(name, help=help_text, description=f"{help_text[:1].upper()}{help_text[1:]}.")
        action.set_defaults(action=name)
        add_store_arguments(action)
        action.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        if name == "clear":
            action.add_argument("--yes", action="store_true", help="do not ask")
        if name == "gc":
            action.add_argument("--capacity", metavar="SIZE", help="most bytes that remain, such as 100GiB")
            action.add_argument("--max-age", metavar="TIME", help="longest time since a block's use, such as 12h or 7d")
    for name, (help_text, add, _) in _WITHOUT_STORE.items():
        action = actions.add_parser(name, help=help_text, description=f"{help_text[:1].upper()}{help_text[1:]}.")
        action.set_defaults(action=name)
        add(action)


def run(args: argparse.Namespace) -> int:
    """Does the action; a store that cannot be reached raises ValueError or OSError."""
    if args.action in _WITHOUT_STORE:
        return _WITHOUT_STORE[args.action][2](args)
    medium = open_medium(store_options(args), create=False)
    try:
        with _plain_errors(medium):
            if args.action == "gc":
                return _collect(args, medium)
            blocks = list(medium.blocks())
            action: Callable[..., int] = {"stat": _stat, "verify": _verify, "clear": _clear}[args.action]
            return action(args, medium, blocks)
    finally:
        medium.close()


def _stat(args: argparse.Namespace, medium: Medium, blocks: list[StoredBlock]) -> int:
    # no upkeep here: it would evict down to a capacity that --path and --url do not know
    sizes = Counter(block.block_bytes for block in blocks)
    total = sum(size * count for size, count in sizes.items())
    by_size = [{"block_bytes": size, "blocks": count, "bytes": size * count} for size, count in sorted(sizes.items())]
    if args.json:
        _print_json(medium, blocks=len(blocks), bytes=total, sizes=by_size)
        return 0
    table = Table(title=medium.place())
    for heading in ("bytes of a block", "blocks", "together"):
        table.add_column(heading, justify="right")
    for row in by_size:
        table.add_row(f"{row['block_bytes']:,}", f"{row['blocks']:,}", show_bytes(row["bytes"]))
    table.add_section()
    table.add_row("all", f"{len(blocks):,}", show_bytes(total))
    report_console().print(table)
    return 0


def _verify(args: argparse.Namespace, medium: Medium, blocks: list[StoredBlock]) -> int:
    found = _with_bar(args, "verifying", lambda bar: verify_blocks(medium, blocks, bar))
    if args.json:
        _print_json(medium, intact=found.intact, corrupt=found.corrupt, left_alone=medium.strangers())
    else:
        for stranger in medium.strangers():
            print(f"not touched, because it is not a block although it is in a block's place: {stranger}")
        print(f"{medium.place()}: {found.intact:,} blocks intact, {found.corrupt:,} corrupt ones removed")
    return EXIT_CORRUPT if found.corrupt else 0


def _clear(args: argparse.Namespace, medium: Medium, blocks: list[StoredBlock]) -> int:
    if not args.yes:
        _confirm(
            f"Remove {len(blocks):,} blocks, {show_bytes(sum(b.block_bytes for b in blocks))}, from {medium.place()}?"
        )
    removed = _with_bar(args, "removing", lambda bar: clear_blocks(medium, blocks, bar))
    if args.json:
        _print_json(medium, removed=removed)
    else:
        print(f"{medium.place()}: {removed:,} blocks removed")
    return 0


def _collect(args: argparse.Namespace, medium: Medium) -> int:
    if args.capacity is None and args.max_age is None:
        raise ValueError("gc needs --capacity, --max-age or both: what remains")
    try:
        most = None if args.capacity is None else int(parse_bytes(args.capacity))
    except ValueError as error:
        raise ValueError(f"--capacity: {error}") from error
    removed = medium.collect(most, None if args.max_age is None else _seconds(args.max_age))
    if args.json:
        _print_json(medium, removed=removed.blocks, removed_bytes=removed.bytes)
    else:
        print(f"{medium.place()}: {removed.blocks:,} blocks removed, {show_bytes(removed.bytes)}")
    return 0


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(text: str) -> float:
    try:
        seconds = float(text[:-1]) * _UNITS[text[-1:]]
    except (KeyError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--max-age: found {text!r}, expected a number with s, m, h or d, such as 7d")
    return seconds


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise ValueError("clear needs confirmation and stdin is not a terminal; add --yes to remove every block")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ValueError("clear: not confirmed, nothing was removed")


def _with_bar(args: argparse.Namespace, what: str, work: Callable[[Progress | None], Result]) -> Result:
    if args.json:
        return work(None)
    with task_progress(what) as bar:
        return work(bar)


def _print_json(medium: Medium, **values: Any) -> None:
    print(json.dumps({"store": medium.place(), **values}, indent=2))


@contextmanager
def _plain_errors(medium: Medium) -> Iterator[None]:
    """Translates exceptions of a medium into errors that name the medium."""
    try:
        yield
    except medium.errors as error:
        raise ValueError(f"{medium.place()}: {type(error).__name__}: {error}") from error
