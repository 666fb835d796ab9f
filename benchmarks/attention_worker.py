"""One side of the CPU attention table, spoken to in JSON lines over stdin and stdout.

Arguments: the repository's root, and the side. Runs in our environment and in the peer's.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import IO, Any

Call = Callable[[], Any]


def main() -> None:
    """Say `ready`, then answer orders: {"case": index} prepares one, {"run": name} times one call of it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # all printed output goes to stderr
    arguments = json.loads(sys.argv[1])
    # at the end: modules of the side's own environment must come before the repository's
    sys.path.append(arguments["root"])
    import torch

    sides: dict[str, Any] = {
        name: importlib.import_module(f"benchmarks.attention_side_{name}") for name in arguments["sides"]
    }
    _answer(answers, {"ready": True, "torch": torch.__version__, "threads": torch.get_num_threads()})
    calls: dict[str, Call] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "case" in order:
            errors = _prepare(order["case"], sides, calls)
            _answer(answers, {"errors": errors})
        else:
            _answer(answers, {"seconds": _time(calls[order["run"]])})


def _prepare(index: int, sides: dict[str, Any], calls: dict[str, Call]) -> dict[str, float]:
    """Makes the case's calls, and checks each against float64."""
    from benchmarks.attention_case import CASES, exact_rows, make_data, relative_error

    calls.clear()
    case = CASES[index]
    data = make_data(case)
    rows, exact = exact_rows(data, case)
    for side in sides.values():
        calls.update(side.calls(case, data))
    return {name: relative_error(call(), rows, exact) for name, call in calls.items()}


def _time(call: Call) -> float:
    call()  # the other side ran between: caches and threads come back first
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _answer(answers: IO[str], value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
