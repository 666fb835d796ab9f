"""Helpers of `test_features.py` that other tests use, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from tests.engine.model_classes import import_class
from tests.engine.tiny_models import make_config


def save_config(folder: Path, architecture: str, model_type: str, **changes: Any) -> Path:
    config = make_config(model_type, **changes)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


def start(model: Path, **options: Any) -> Any:
    """Everything up to the point where a worker would be started."""
    import_class(model)
    return EngineArgs(model=str(model), skip_tokenizer_init=True, **options).create_engine_config()


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
