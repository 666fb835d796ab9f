"""Helpers of `test_scheduler.py` that other tests use, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.scheduler.schedulers import (
    make_scheduler,
    vllm_config,
)
from vllm_gaudi_ucm.scheduler.scheduler import UcmAsyncScheduler, UcmScheduler


def scheduler_of(folder: Path, ucm: dict[str, Any], **sizes: Any) -> Any:
    is_async = sizes.get("async_scheduling", False)
    return make_scheduler(vllm_config(folder, ucm, **sizes), UcmAsyncScheduler if is_async else UcmScheduler)
