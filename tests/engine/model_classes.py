"""vLLM learns what a model class can do from a new process, 10 s each on a machine that has not seen the class before.

An engine in the test's process imports the class anyway, so it is asked there.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from vllm import ModelRegistry


def import_class(model: Path) -> None:
    """Registers vLLM's own class of a model's folder, imported."""
    for architecture in json.loads((model / "config.json").read_text())["architectures"]:
        _import(architecture)


@cache
def _import(architecture: str) -> None:
    if known := ModelRegistry.models.get(architecture):
        ModelRegistry.register_model(architecture, known.load_model_cls())
