"""What engines on the simulated card import, vLLM included: loaded once, then they fork from it.

The bridge is not among it: a process that has imported that must not be forked. `warm_imports` is for any device.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.warm_imports import import_vllm

# as in a process that has it on PYTHONPATH
sys.path.insert(0, str(Path(__file__).parent / "sim_hpu"))
import_vllm("hpu", "tests.engine.serving")
