"""A sparse method of a third party that selects nothing and remembers which hooks were called, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_gaudi_ucm.sparse.base import SCHEDULER_HOOKS, WORKER_HOOKS, UcmSparseBase, UcmSparseRole
from vllm_gaudi_ucm.sparse.options import MethodOptions

# Hooks whose first argument is worth remembering: a layer's index, or a request's id.
_WITH_ARGUMENT = ("attention_begin", "attention_finished", "request_begin", "request_finished_in_worker")


class HookLog(UcmSparseBase):
    """Subclasses the interface only. calls: name of each hook, and its first argument where that is a plain value."""

    def __init__(self, role: UcmSparseRole, config: Mapping[str, Any] | MethodOptions | None = None) -> None:
        super().__init__(role, config)
        self.calls: list[tuple[Any, ...]] = []
        for hook in SCHEDULER_HOOKS if role is UcmSparseRole.SCHEDULER else WORKER_HOOKS:
            setattr(self, hook, self._logged(hook, getattr(self, hook)))

    def _logged(self, hook: str, run: Any) -> Any:
        def logged(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((hook, args[0]) if hook in _WITH_ARGUMENT else (hook,))
            return run(*args, **kwargs)

        return logged
