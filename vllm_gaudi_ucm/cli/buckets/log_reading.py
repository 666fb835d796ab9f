"""Phase logs as commands read them: step by step, and with a bar where that takes long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_gaudi_ucm.observability.phase_log import PhaseLogReader

LONG_BYTES = 32 << 20  # about 100,000 steps, read in two seconds


@contextmanager
def open_log(path: Path) -> Iterator[PhaseLogReader]:
    """The log while the block runs. Raises PhaseLogError, see `PhaseLogReader`."""
    if not path.is_file() or path.stat().st_size < LONG_BYTES:
        with PhaseLogReader(path) as log:
            yield log
        return
    # imported here: short logs are read before rich could be loaded
    from vllm_gaudi_ucm.cli.task_progress import task_progress

    with task_progress("reading") as progress, PhaseLogReader(path, progress) as log:
        yield log
