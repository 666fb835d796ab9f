"""What engines on the simulated card import, vLLM included: loaded once, then they fork from it.

The bridge is not among it: a process that has imported that must not be forked. `warm_imports` is for any device.
"""

from __future__ import annotations

import os
import sys

from tests.sim_path import SIM_PATH
from tests.warm_imports import import_vllm

# as in a process that has it on PYTHONPATH
sys.path[:0] = SIM_PATH.split(os.pathsep)
import_vllm("hpu", "tests.engine.serving")
