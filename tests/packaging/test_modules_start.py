"""Every script and benchmark can be imported: a name that has moved is noticed here, not on a machine with a card."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # starts a process, which imports vLLM

ROOT = Path(__file__).resolve().parents[2]
# packages that are not here: peers of the benchmarks
OPTIONAL = {"matplotlib", "redis"}
# writes pages of the site when it is imported; the tests of the documentation run it
WRITES = "docs_reference"
IMPORT = """
import importlib, json, sys, traceback
sys.path[:0] = sys.argv[1:3]
wrong = {}
for name in sys.argv[3:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        wrong[name] = [error.name, str(error)]
    except BaseException as error:
        wrong[name] = [None, "".join(traceback.format_exception(error))]
print("\\n" + json.dumps(wrong))
"""


def _modules() -> list[str]:
    scripts = [path.stem for path in sorted((ROOT / "scripts").glob("*.py")) if path.stem != WRITES]
    benchmarks = [path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / "benchmarks").rglob("*.py"))]
    return scripts + [".".join(path.parts) for path in benchmarks if path.name != "__init__"]


def test_scripts_and_benchmarks_import() -> None:
    modules = _modules()
    assert "check_device_ranks" in modules
    assert "benchmarks.engine" in modules
    command = [sys.executable, "-c", IMPORT, str(ROOT / "scripts"), str(ROOT), *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    wrong = json.loads(done.stdout.splitlines()[-1])
    assert {name: why for name, (missing, why) in wrong.items() if missing not in OPTIONAL} == {}
