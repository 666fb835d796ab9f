"""Runs in every process that a test starts, when its interpreter does: tests/conftest.py puts this on PYTHONPATH.

A test starts engines with more processes than the machine has cores, and each of them imports vLLM.
"""

import gc
import os
import time

# importing vLLM makes 700,000 objects, and none of them ever dies: looking for garbage takes a third of the time
gc.set_threshold(100_000)
# vLLM's processes wait for each other by yielding over and over for a second, which takes the core from the one that
# they wait for
os.sched_yield = lambda: time.sleep(0.0005)
