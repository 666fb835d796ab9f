"""`gaudi-ucm doctor`: checks whether this machine can serve through the plugin, and if not, why. Never crashes.

`--json` prints one object: `schema` (1), `ok` (no check failed), `device` (chosen device or null), `checks` (a list of
objects with the strings `section`, `name`, `status` (ok, info, warn or fail), `found`, `expected`, `advice`), `config`
(the configuration as resolved, null where it has problems), and `verdict` (the first line of the text). Fields may be
added; none changes its meaning without a new `schema`.
"""

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from vllm_gaudi_ucm.cli.doctor.check import Check, guarded
from vllm_gaudi_ucm.cli.doctor.collectives import collective_checks
from vllm_gaudi_ucm.cli.doctor.configuration import (
    configuration_checks,
    place_checks,
    resolve_text,
    sparse_checks,
    static_shape_checks,
)
from vllm_gaudi_ucm.cli.doctor.extensions import extension_checks
from vllm_gaudi_ucm.cli.doctor.machine import (
    device_checks,
    implementation_checks,
    kernel_checks,
    matrix_unit_checks,
    operator_checks,
    product_checks,
    thread_checks,
    version_checks,
)
from vllm_gaudi_ucm.cli.doctor.plugin import PluginChecks
from vllm_gaudi_ucm.cli.doctor.preemption import preemption_checks
from vllm_gaudi_ucm.cli.doctor.store import store_checks
from vllm_gaudi_ucm.cli.output import prose_console
from vllm_gaudi_ucm.config.ucm_config import UcmConfig
from vllm_gaudi_ucm.device.detect import detect_device
from vllm_gaudi_ucm.options.errors import UcmConfigError, counted

logger = logging.getLogger(__name__)

SCHEMA = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--config", metavar="FILE|JSON", help="configuration to check: what you pass as ucm in --additional-config"
    )
    parser.add_argument(
        "--store", metavar="FILE|JSON", help="store of KV blocks to check: as `store` in kv_connector_extra_config"
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="workers that are to share a model: start as many, and have them add up tensors",
    )


class Examination(NamedTuple):
    """The doctor's findings: the chosen device (None: none), and a row for each check."""

    device: str | None
    checks: list[Check]


def run(args: argparse.Namespace) -> int:
    # vLLM's logger and plugins write to stdout, which belongs to the report.
    with contextlib.redirect_stdout(sys.stderr):
        examination = examine(args.config, args.store, args.tensor_parallel_size)
    report = _report(examination, args.config)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(examination.device, examination.checks)
    return 0 if report["ok"] else 1


def examine(config: str | None, store: str | None = None, workers: int = 1) -> Examination:
    """Runs all sections, each guarded: an exception becomes a row of its section."""
    plugins: list[PluginChecks] = []

    def start() -> tuple[()]:
        plugins.append(PluginChecks())
        return ()

    first = guarded("platform plugin", start)  # its child processes take seconds: started first, read last
    checks = guarded("versions", version_checks)
    checks += guarded("configuration", lambda: configuration_checks(config))
    device = _device()
    if device is not None:
        checks += guarded("device", lambda: device_checks(device))
        checks += guarded("device", lambda: _of_config(config, lambda ucm: implementation_checks(ucm, device)))
        checks += guarded("device", lambda: kernel_checks(device))
    checks += guarded("device", thread_checks)
    checks += guarded("device", lambda: _of_config(config, lambda ucm: matrix_unit_checks(ucm, device)))
    checks += guarded("device", lambda: _of_config(config, lambda ucm: product_checks(ucm, device)))
    checks += guarded("several devices", lambda: collective_checks(device, workers))
    checks += guarded("operators", lambda: operator_checks(device))
    checks += guarded("static shapes", lambda: _of_config(config, lambda ucm: static_shape_checks(ucm, device)))
    checks += guarded("files", lambda: _of_config(config, lambda ucm: place_checks(ucm, device)))
    checks += guarded("sparse", lambda: _of_config(config, sparse_checks))
    checks += guarded("preemption", lambda: _of_config(config, lambda ucm: preemption_checks(ucm, device)))
    checks += guarded("store", lambda: store_checks(store))
    checks += guarded("extensions", extension_checks)
    for section in plugins:
        first += guarded("platform plugin", section.rows)
    return Examination(device, first + checks)


def _of_config(text: str | None, section: Callable[[UcmConfig], Iterable[Check]]) -> Iterable[Check]:
    """The rows of a section that looks at the resolved configuration."""
    try:
        config = resolve_text(text)
    except UcmConfigError:
        return ()  # the section on the configuration has a row for every problem
    return section(config)


def _device() -> str | None:
    try:
        return detect_device()
    except Exception:
        # The row of register() shows the error, whatever it is.
        logger.debug("no device", exc_info=True)
        return None


def _report(examination: Examination, config: str | None) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "ok": all(check.status != "fail" for check in examination.checks),
        "device": examination.device,
        "checks": [asdict(check) for check in examination.checks],
        "config": _resolved(config),
        "verdict": verdict(examination.device, examination.checks),
    }


def _resolved(config: str | None) -> dict[str, Any] | None:
    try:
        return resolve_text(config).to_dict()
    except UcmConfigError:
        return None  # the section on the configuration has a row for every problem


STYLES = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}
NAME_WIDTH = 22


def print_report(device: str | None, checks: Sequence[Check]) -> None:
    """Prints the report to stdout. device: the device that the plugin would serve on, None if it would not."""
    console = prose_console()
    console.print(verdict(device, checks), style="bold")
    todo = [check for status in ("fail", "warn") for check in checks if check.status == status]
    if todo:
        console.print("\nTo do", style="bold")
        for check in todo:
            console.print(_to_do(check))
    for section in dict.fromkeys(check.section for check in checks):
        console.print(f"\n{section.capitalize()}", style="bold")
        console.print(_table([check for check in checks if check.section == section]))


def verdict(device: str | None, checks: Sequence[Check]) -> str:
    """A sentence: whether this machine can serve, and how many checks failed or warn."""
    failed, warned = (sum(check.status == status for check in checks) for status in ("fail", "warn"))
    warnings = f", with {counted(warned, 'warning')}" if warned else ""
    if failed:
        return f"This machine cannot serve so: {failed} of {counted(len(checks), 'check')} failed{warnings}."
    if device is None:
        return f"vLLM serves without the plugin here: no check failed{warnings}."
    return f"This machine can serve, on {device}: {'no check failed' + warnings if warned else 'no problem found'}."


def _to_do(check: Check) -> RenderableType:
    row = _grid()
    row.add_column(overflow="fold")
    lines = [Text(f"{check.section}, {check.name}", style="bold"), *map(Text, _finding(check))]
    row.add_row(_status(check), Text("\n").join(lines))
    return row


def _table(checks: Sequence[Check]) -> RenderableType:
    table = _grid()
    table.add_column(width=NAME_WIDTH, overflow="fold")
    table.add_column(overflow="fold")
    for check in checks:
        found = "see above" if check.status in ("warn", "fail") else "\n".join(_finding(check))
        table.add_row(_status(check), Text(check.name), Text(found))
    return table


def _finding(check: Check) -> Iterator[str]:
    yield check.found
    if check.expected and check.status in ("warn", "fail"):
        yield f"expected: {check.expected}"
    if check.advice:
        yield f"{'to do' if check.status in ('warn', 'fail') else 'hint'}: {check.advice}"


def _grid() -> Table:
    """Columns without lines, of which the first is the status."""
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(width=6, no_wrap=True)
    return grid


def _status(check: Check) -> Text:
    return Text(f"  {check.status}", style=STYLES[check.status])
