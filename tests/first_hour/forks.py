"""Processes that a probe starts, as forks of one that has torch: in place of the launcher's, which start anew."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.first_hour.hours import ON_CARD, ROOT
from tests.warm_process import WarmProcess
from vllm_gaudi_ucm_tools.first_hour.bench import Bench
from vllm_gaudi_ucm_tools.first_hour.catalogue import BY_NUMBER
from vllm_gaudi_ucm_tools.first_hour.hour import ALWAYS, LAZY_MODE
from vllm_gaudi_ucm_tools.first_hour.probe import Mode, Unit
from vllm_gaudi_ucm_tools.first_hour.result import Ending, Event, Result, judge


def forked_probe(number: int, mode: Mode, function: Callable[[Bench], None], folder: Path, fault: str = "") -> Result:
    """What a probe says that does nothing itself but start processes; each has the fault. function: the probe's."""
    events: list[Event] = []
    bench = Bench(
        lambda kind, **values: events.append({"kind": kind, **values}),
        **{"kind": "hpu", "mode": mode, "case": "", "sizes": "small", "model": "", "folder": str(folder)},
        minutes=0,
    )
    with mock.patch(f"{function.__module__}.run_apart", partial(_run_apart, fault)):
        function(bench)
    events.append({"kind": "end", "status": "done", "text": ""})
    return judge(Unit(BY_NUMBER[number], mode), Ending(0, events, "", 0.0))


def _run_apart(fault: str, request: Mapping[str, Any], changes: Mapping[str, str | None], limit_s: float) -> Ending:
    """As the launcher's function."""
    folder = Path(tempfile.mkdtemp(dir=request["bench"]["folder"]))
    lazy: Any = {"PT_HPU_LAZY_MODE": LAZY_MODE[request["bench"]["mode"]]}
    given: dict[str, Any] = {**os.environ, **ALWAYS, **ON_CARD, **lazy, **changes}
    env = {name: value for name, value in given.items() if value is not None}
    log, said = folder / "log.txt", folder / "said"
    status = WarmProcess(_child, (dict(request), str(said), fault), log=log, env=env, cwd=ROOT).finish(limit_s)
    return Ending(status, [json.loads(line) for line in said.read_text().splitlines()], log.read_text(), 0.0)


def _child(request: Mapping[str, Any], said: str, fault: str) -> None:
    from tests.first_hour.faults import FAULTS
    from vllm_gaudi_ucm_tools.first_hour import child

    if fault:
        FAULTS[fault](setattr)
    with open(said, "w") as file:
        child.run_probe(
            lambda kind, **values: print(json.dumps({"kind": kind, **values}), file=file, flush=True), request
        )
