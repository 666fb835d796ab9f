"""Probe 20: recipes on disk, across processes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from vllm_gaudi_ucm_tools.first_hour.bench import Bench
from vllm_gaudi_ucm_tools.first_hour.launcher import run_apart
from vllm_gaudi_ucm_tools.first_hour.probes.recipes import double
from vllm_gaudi_ucm_tools.first_hour.result import Ending

LIMIT_S = 150
SHAPES = (4, 8, 16, 32)


def disk_cache(bench: Bench) -> None:
    """Probe 20: starts itself in processes that share a folder."""
    folder = bench.folder / "recipes"
    first, second = _count(bench, folder), _count(bench, folder)
    bench.claim("compilations of the first start", first, len(SHAPES), first >= len(SHAPES))
    bench.claim("compilations of the second start", second, 0)
    together = bench.folder / "shared"
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(_count(bench, together))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bench.claim("two processes at once", f"{len(found)} ended well", "2 ended well")
    bench.note("compilations of two processes at once", found)
    bench.note("files", sum(1 for path in folder.rglob("*") if path.is_file()))


def start(bench: Bench) -> None:
    """Not a probe: one of the processes."""
    run = bench.region(double)
    inputs = [bench.random(rows, 64) for rows in SHAPES]
    bench.measure("compilations", bench.compilations(lambda: [run(x) for x in inputs]), "")


def _count(bench: Bench, folder: Path) -> int:
    settings: dict[str, Any] = {"kind": bench.kind, "mode": bench.mode, "case": "", "model": "", "minutes": 0}
    settings |= {"sizes": "full" if bench.full else "small", "folder": str(bench.folder)}
    request = {"function": "cache:start", "bench": settings, "limit_s": LIMIT_S}
    ending: Ending = run_apart(request, {"PT_HPU_RECIPE_CACHE_CONFIG": f"{folder},false,1024"}, LIMIT_S)
    measured = [event["value"] for event in ending.events if event["kind"] == "measure"]
    if not measured:
        raise RuntimeError(f"a start with recipes on disk failed: {json.dumps(list(ending.events))}\n{ending.log}")
    return int(measured[0])
