"""The process of one probe: `python -m vllm_gaudi_ucm_tools.first_hour.child FD REQUEST`.

It writes one JSON object per line to the file descriptor, as soon as it has a result, so that a crash loses nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_gaudi_ucm_tools.first_hour.loading import LONGEST_ERROR, DoesNotApply, Refused, loading

Say = Callable[..., None]
"""Takes a kind and values by name."""

PROBES = "vllm_gaudi_ucm_tools.first_hour.probes"
MACHINE = "card:machine"
PR_SET_PDEATHSIG = 1  # of Linux, <linux/prctl.h>
STACKS_AT = 0.9  # of the time limit: the stacks of a process that hangs


def main(descriptor: int, request: dict[str, Any]) -> int:
    """Runs the function that the request names and reports how it ended. Returns 0, whatever the probe found."""
    os.set_inheritable(descriptor, False)
    _die_first()
    die_with(request["parent"])
    faulthandler.dump_traceback_later(STACKS_AT * request["limit_s"])

    def say(kind: str, **values: Any) -> None:
        line = json.dumps(_plain({"kind": kind, **values}), default=str)
        os.write(descriptor, line.encode() + b"\n")

    run_probe(say, request)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    # an interpreter with a device may crash or hang while it tidies up; all is said
    os._exit(0)


def run_probe(say: Say, request: Mapping[str, Any]) -> None:
    """Runs the function, and reports how it ended, even after an exception."""
    try:
        module, _, name = request["function"].partition(":")
        with loading(request["bench"]["mode"]):
            from vllm_gaudi_ucm_tools.first_hour.bench import Bench

        bench = Bench(say, **request["bench"])
        probe = vars(importlib.import_module(f"{PROBES}.{module}"))[name]
        if request["function"] == MACHINE:
            probe(bench)  # also if the bridge cannot be loaded
        else:
            with bench.started():
                probe(bench)
    except DoesNotApply as reason:
        say("end", status="does not apply", text=str(reason))
    except Refused as reason:
        say("end", status="refused", text=str(reason))
    except BaseException as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:LONGEST_ERROR]
        say("end", status="error", text=f"{type(error).__name__}: {text}")
    else:
        say("end", status="done", text="")


def _die_first() -> None:
    """Makes the system end this process, not the one that writes the report, if memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def die_with(parent: int) -> None:
    """This process ends when the thread that started it does: none is left behind that holds a card.

    parent: its process. Its group is another one, so that it can be ended with its children.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _plain(value: Any) -> Any:
    """JSON has no infinity, and no number that is none: they become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
