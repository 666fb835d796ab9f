"""One start of benchmarks.engine_start: starts an engine, and writes `facts.json` into the folder it is given."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

from benchmarks.engine_steps_side import device_name, start, start_facts


def main() -> None:
    """Starts the engine, and ends it."""
    asked, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    begin = time.perf_counter()
    importlib.import_module("vllm.entrypoints.llm")
    imported = time.perf_counter()
    engine = start(asked, folder, folder / "steps.jsonl")
    facts = start_facts(engine, imported - begin, time.perf_counter() - begin)
    engine.engine_core.shutdown()
    (folder / "facts.json").write_text(json.dumps({"device": device_name(), **facts}))


if __name__ == "__main__":
    main()
