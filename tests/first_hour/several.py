"""Several probes in one process, one after the other: starting a process costs more than most probes on the simulator.

`python -m tests.first_hour.several MODE FOLDER UNITS`, with units as JSON: [number, case, fault] each. It prints one
line of JSON for each: what the probe said. A fault is undone after its probe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.first_hour.hours import ON_CARD, ROOT
from tests.warm_process import WarmProcess
from vllm_gaudi_ucm_tools.first_hour.catalogue import BY_NUMBER
from vllm_gaudi_ucm_tools.first_hour.hour import ALWAYS, LAZY_MODE
from vllm_gaudi_ucm_tools.first_hour.probe import Mode, Unit
from vllm_gaudi_ucm_tools.first_hour.result import Ending, Result, judge

LIMIT_S = 280
SERVE = (24, 27, 28)
GRAPHS = 4  # of an engine of those; the command has twice as many compiled


class One(NamedTuple):
    """A probe, one of its cases, and the fault that is planted before it."""

    number: int
    case: str = ""
    fault: str = ""


class Together:
    """A process for each mode, all at once; each result is waited for when it is asked for."""

    def __init__(self, units: dict[Mode, Sequence[One]], folder: Path) -> None:
        self._pool = ThreadPoolExecutor(len(units))
        self._results: dict[Mode, Future[dict[One, Result]]] = {
            mode: self._pool.submit(_results, mode, ones, folder / mode) for mode, ones in units.items()
        }

    def __getitem__(self, unit: tuple[Mode, One]) -> Result:
        mode, one = unit
        return self._results[mode].result()[one]

    def close(self) -> None:
        """Waits for the processes."""
        self._pool.shutdown()


def _results(mode: Mode, ones: Sequence[One], folder: Path) -> dict[One, Result]:
    folder.mkdir()
    env = {**os.environ, **ALWAYS, **ON_CARD, "PYTHONPATH": f"{ROOT}:{ON_CARD['PYTHONPATH']}"}
    lazy = LAZY_MODE[mode]
    env |= {} if lazy is None else {"PT_HPU_LAZY_MODE": lazy}
    if mode == "lazy":
        env["SIM_HPU_TORCH_FORK"] = "1"
    if not any(BY_NUMBER[one.number].falls_back for one in ones):
        env["PT_HPU_USE_EAGER_FALLBACK"] = "0"
    if mode == "lazy":
        printed, errors, status = _cold(mode, ones, folder, env)
    else:
        printed, errors, status = _warm(mode, ones, folder, env)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("[{")]
    endings = [Ending(0, events, errors[-4000:], 0.0) for events in lines]
    endings += [Ending(status or 1, [], errors[-4000:], 0.0)] * (len(ones) - len(lines))
    pairs = zip(ones, endings, strict=True)
    return {one: judge(Unit(BY_NUMBER[one.number], mode, one.case), ending) for one, ending in pairs}


def _cold(mode: Mode, ones: Sequence[One], folder: Path, env: Mapping[str, str]) -> tuple[str, str, int]:
    """Output, errors and exit status of a process that is started: what passes for the vendor's torch must do so from
    the beginning.
    """
    command = [sys.executable, "-m", "tests.first_hour.several", mode, str(folder), json.dumps(ones)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    return done.stdout, done.stderr, done.returncode


def _warm(mode: Mode, ones: Sequence[One], folder: Path, env: Mapping[str, str]) -> tuple[str, str, int]:
    """The same of one that forks; output and errors are in one file."""
    log = folder / "log.txt"
    status = WarmProcess(main, (mode, folder, json.dumps(ones)), log=log, env=env, cwd=ROOT).finish(LIMIT_S)
    return log.read_text(), log.read_text(), status


def main(mode: str, folder: Path, ones: str) -> None:
    """In the new process. ones: as JSON."""
    from tests.first_hour.faults import FAULTS
    from vllm_gaudi_ucm_tools.first_hour import child

    all_ones = [One(*words) for words in json.loads(ones)]
    lent: _Lent | None = None
    for place, one in enumerate(all_ones):
        events: list[dict[str, Any]] = []

        def say(kind: str, events: list[dict[str, Any]] = events, **values: Any) -> None:
            events.append({"kind": kind, **values})

        own = folder / str(place)
        own.mkdir()
        bench = {"kind": "hpu", "mode": mode, "case": one.case, "sizes": "small", "model": "", "folder": str(own)}
        with ExitStack() as stack:
            if one.number in SERVE:
                from vllm_gaudi_ucm_tools.first_hour.probes import serving

                stack.enter_context(mock.patch.object(serving, "FEW_GRAPHS", GRAPHS))
                if not one.fault:
                    lent = lent or _Lent(
                        serving.Server, sum(each.number in SERVE and not each.fault for each in all_ones)
                    )
                    stack.enter_context(mock.patch.object(serving, "Server", lent))
            if one.fault:
                FAULTS[one.fault](_patching(stack))
            child.run_probe(say, {"function": BY_NUMBER[one.number].function, "bench": {**bench, "minutes": 0.02}})
        if lent is None or not lent.users_left:
            _forget()
        print(json.dumps(events, default=str), flush=True)


class _Lent:
    """An engine that probes have one after the other; what the last of them closes is closed.

    Starting one takes longer than what most of them ask of it.
    """

    def __init__(self, start: Callable[[Any], Any], users: int) -> None:
        self._start, self._server, self.users_left = start, None, users

    def __call__(self, bench: Any) -> Any:
        self._server = self._server or self._start(bench)
        self.users_left -= 1
        if self.users_left:
            self._server.close = lambda: None
        else:
            vars(self._server).pop("close", None)
        return self._server


def _patching(stack: ExitStack) -> Callable[[Any, str, Any], None]:
    def patch(target: Any, name: str, value: Any) -> None:
        stack.enter_context(mock.patch.object(target, name, value))

    return patch


def _forget() -> None:
    import torch

    torch._dynamo.reset()


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # the bridge may hang while an interpreter tidies up
