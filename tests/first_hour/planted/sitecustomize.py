"""On the path of a probe's process: spoils the simulated card, as PLANTED_FAULT says, before the probe begins."""

import os
import runpy
import sys
from pathlib import Path

# what every process of a test has: this file stands before it on the path
runpy.run_path(str(Path(__file__).parents[2] / "children/sitecustomize.py"))

if os.environ.get("PLANTED_FAULT") and "vllm_gaudi_ucm_tools.first_hour.child" in sys.orig_argv:
    from tests.first_hour.faults import FAULTS

    FAULTS[os.environ["PLANTED_FAULT"]](setattr)
