"""Runs the probes one after the other, each in a process of its own, and keeps their findings."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vllm_gaudi_ucm import envs
from vllm_gaudi_ucm.device.detect import has_gaudi_software
from vllm_gaudi_ucm_tools.first_hour.child import MACHINE
from vllm_gaudi_ucm_tools.first_hour.launcher import run_apart
from vllm_gaudi_ucm_tools.first_hour.machine import describe
from vllm_gaudi_ucm_tools.first_hour.probe import DEVICES, MODES, Mode, Probe, Unit, units
from vllm_gaudi_ucm_tools.first_hour.result import Ending, Result, Verdict, judge, without_process

Sizes = Literal["auto", "small", "full"]
MACHINE_LIMIT_S = 120.0
LAZY_REFUSED = "refused, as expected: probe 1 saw that this torch refuses lazy mode"
LAZY_PROBE = 1
# Loading a model needs no network, an engine stays in its probe's process, and no usage report is sent.
ALWAYS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
LAZY_MODE: dict[Mode, str | None] = {"stock": None, "eager": "0", "compile": "0", "lazy": "1"}


@dataclass(frozen=True)
class Options:
    """Options of a run.

    sizes: `auto` is full on an accelerator, small on a CPU. model: a folder, or None for a small random model.
    time_limit: seconds of each process instead of its probe's own. minutes: how long probe 24 serves.
    """

    probes: Sequence[Probe]
    modes: Collection[Mode] = MODES
    sizes: Sizes = "auto"
    model: Path | None = None
    time_limit: float | None = None
    minutes: float = 30.0


@dataclass
class Findings:
    """Findings of a run: the machine, a row for each process, files that probes wrote, and whether a user ended it."""

    device: str
    machine: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    files: dict[str, Path] = field(default_factory=dict)
    interrupted: bool = False

    def add(self, result: Result) -> None:
        """One more row."""
        self.results.append(result)
        if result.verdict is Verdict.INTERRUPTED:
            self.interrupt()

    def interrupt(self) -> None:
        """A person has ended the run."""
        self.interrupted = True


class Hour:
    """A run. Files of probes are in `folder`, which `close` removes."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.folder = Path(tempfile.mkdtemp(prefix="first-hour-"))
        ending = self._run(MACHINE, "", "eager", "", MACHINE_LIMIT_S, falls_back=True)
        machine = describe(ending)
        self.findings = Findings(_device(machine.get("device")), machine, interrupted=ending.interrupted)
        self.units = list(units(options.probes, self.findings.device, options.modes))

    def run_steps(self, on_begin: Callable[[Unit], None], on_end: Callable[[Result], None]) -> Findings:
        """Runs all probes, even after failures; a KeyboardInterrupt ends with the probes that ran."""
        try:
            self._run_all(on_begin, on_end)
        except KeyboardInterrupt:  # between two processes
            self.findings.interrupt()
        return self.findings

    def _run_all(self, on_begin: Callable[[Unit], None], on_end: Callable[[Result], None]) -> None:
        refused = False
        for unit in self.units:
            if self.findings.interrupted:
                return
            on_begin(unit)
            result = self._result(unit, refused)
            lazy_probe = unit.mode == "lazy" and unit.probe.number == LAZY_PROBE
            refused = refused or (lazy_probe and result.found.startswith("refused, as expected"))
            self.findings.add(result)
            on_end(result)

    def close(self) -> None:
        """Removes the files that the probes wrote."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _result(self, unit: Unit, lazy_is_refused: bool) -> Result:
        probe, device = unit.probe, self.findings.device
        if device not in probe.devices:
            return without_process(unit, Verdict.DOES_NOT_APPLY, f"asks for {' or '.join(probe.devices)}, not {device}")
        if unit.mode == "lazy" and lazy_is_refused:
            return without_process(unit, Verdict.AS_EXPECTED, LAZY_REFUSED)
        limit = self._options.time_limit or probe.limit_s
        return judge(unit, self._run(probe.function, device, unit.mode, unit.case, limit, probe.falls_back))

    def _run(self, function: str, device: str, mode: Mode, case: str, limit: float, falls_back: bool) -> Ending:
        kind = device or _device(None)
        sizes = self._options.sizes
        if sizes == "auto":
            sizes = "small" if kind == "cpu" else "full"
        name = "-".join((function.replace(":", "-"), mode, case.replace(" ", "-"))).strip("-")
        folder = self.folder / name
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            return Ending(1, [], f"no folder for the probe's files: {error}", 0.0)
        bench = {
            "kind": kind,
            "mode": mode,
            "case": case,
            "sizes": sizes,
            "model": "" if self._options.model is None else str(self._options.model.resolve()),
            "folder": str(folder),
            "minutes": self._options.minutes,
        }
        changes: dict[str, str | None] = {**ALWAYS, "PT_HPU_LAZY_MODE": LAZY_MODE[mode]}
        changes["PT_HPU_USE_EAGER_FALLBACK"] = None if falls_back else "0"
        if device:
            changes[envs.DEVICE] = device
        ending = run_apart({"function": function, "bench": bench, "limit_s": limit}, changes, limit)
        if device:
            found = (path for path in folder.glob("*.json") if path.is_file())
            self.findings.files.update({f"{name}-{path.name}": path for path in found})
        return ending


def _device(found: object) -> str:
    """Returns the device that the plugin chose; if it chose none, or failed, the likeliest one."""
    if isinstance(found, str) and found in DEVICES:
        return found
    choice = envs.device_choice()
    if choice in DEVICES:
        return choice
    return "hpu" if has_gaudi_software() else "cpu"
