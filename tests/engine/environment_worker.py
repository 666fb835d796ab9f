"""What a test asks a worker for (`worker_extension_cls`)."""

from __future__ import annotations

import os

from vllm_gaudi_ucm.envs import waiting_at_start


class EnvironmentWorker:
    """Methods that vLLM adds to those of the worker."""

    def get_environment(self, names: list[str]) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def get_waiting(self) -> dict[str, str]:
        return waiting_at_start()
