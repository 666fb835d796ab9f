"""Programs that import the bridge of the simulated card, each in a process of its own: forks of one that has torch.

Importing torch takes most of the time of such a program, and the bridge is not among what is imported before the fork.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.sim_path import SIM_PATH

CHILDREN = Path(__file__).parents[1] / "children"  # what every process of a test has
MARK = "=== "
PARENT = f"""
import json, os, sys
import torch._dynamo
assert not hasattr(torch, "hpu")
for name, (program, env, arguments) in json.loads(sys.argv[1]).items():
    print("{MARK}" + name, flush=True)
    if not os.fork():
        os.environ.update(env)
        sys.argv[1:] = arguments
        try:
            exec(program)
        except Exception as error:
            print(f"{{type(error).__name__}}: {{error}}")
        else:
            print("done")
        sys.exit()
    os.wait()
"""


class Program(NamedTuple):
    """Python, what it adds to the environment, and its arguments."""

    source: str
    env: Mapping[str, str]
    arguments: tuple[str, ...] = ()


def in_forks(programs: Mapping[str, Program], env: Mapping[str, str]) -> dict[str, list[str]]:
    """What each prints, one after the other: its lines, and "done" or what it raised.

    env: what all of them are started with, which the bridge takes for the user's.
    """
    env = {**env, "PYTHONPATH": f"{SIM_PATH}:{CHILDREN}", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", PARENT, json.dumps(programs)]
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split(MARK)[1:]
    return {name: lines for name, *lines in map(str.splitlines, parts)}
