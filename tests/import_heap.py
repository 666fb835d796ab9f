"""Keeps the garbage collector off what was imported: vLLM brings 700,000 objects, and none of them ever dies.

An engine asks for a full collection five times between its start and its end. Each looks at every object, which takes
0.4 s: nine tenths of the life of a tiny engine.
"""

from __future__ import annotations

import atexit
import gc
import importlib
from types import SimpleNamespace

_freeze, _unfreeze = gc.freeze, gc.unfreeze
REAL = {"freeze": _freeze, "unfreeze": _unfreeze}
"""The functions that `gc` has in an engine outside of tests."""


def freeze_imports() -> None:
    """Puts all that is alive out of the collector's sight.

    vLLM freezes what an engine has made, and thaws everything when it ends. Neither happens from here on: the engine of
    a test must be collected, and what was imported must stay where it is.
    """
    gc.freeze()
    for name in ("freeze", "unfreeze"):
        setattr(gc, name, lambda: None)
    # Before the process ends: libraries complain of objects that nobody collected. Not earlier: pytest collects five
    # times when it ends.
    atexit.register(_unfreeze)
    # what a test makes is small beside what was imported: one look for each thousand new objects is too often
    gc.set_threshold(100_000)
    gc.enable()


def freeze_rest() -> None:
    """Puts out of sight what a file of tests has left: modules that are imported late, compiled code, caches.

    Numba, dynamo and the models bring as many objects again as there were in the beginning. Called between two files,
    when nothing lives that must be collected later, but for fixtures of the session.
    """
    gc.collect()
    _freeze()


def leave_out_collections() -> None:
    """Of vLLM's engines: three before a freeze, two for each model that is loaded, and one of each shutdown.

    An engine of a test collects when it ends.
    """
    vars(importlib.import_module("vllm.v1.engine.core"))["freeze_gc_heap"] = lambda: None
    for module in ("model_executor.model_loader.base_loader", "distributed.parallel_state"):
        left = SimpleNamespace(collect=lambda: 0, unfreeze=lambda: None)
        vars(importlib.import_module(f"vllm.{module}"))["gc"] = left
