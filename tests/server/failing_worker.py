"""What a server's workers can be told by a test (`--worker-extension-cls`)."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class FailingWorker:
    """Methods that vLLM adds to those of the worker."""

    rank: int
    _steps: Any

    def run_out_of_memory(self, rank: int) -> None:
        """The next step of this rank raises."""
        if self.rank == rank:
            self._steps.execute_model = _run_out_of_memory


def _run_out_of_memory(_: object) -> NoReturn:
    raise torch.OutOfMemoryError("tried to allocate 7 GiB")
