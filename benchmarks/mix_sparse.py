"""The scheduler role of a sparse method over a mix's messages, called as vllm_gaudi_ucm/scheduler/scheduler.py does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.protocol.attachments import attach_sparse_meta
from vllm_gaudi_ucm.scheduler.setup import scheduler_role
from vllm_gaudi_ucm.sparse.options import read_extra_args

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_gaudi_ucm.graphs.shapes.limits import Limits

# Of contexts that are scaled down: three blocks are enough to choose among.
_SCALED: dict[str, Any] = {"min_tokens": 12, "local_window_sz": 1, "init_window_sz": 1, "min_blocks": 2}
# Between them every kind of summary but one, and every way to use a choice again.
METHODS: dict[str, dict[str, Any]] = {
    "GSA": {**_SCALED, "reuse_steps": 3, "dense_layers": [0], "summary": "minmax"},
    "ESA": {**_SCALED, "sparse_ratio": 0.5, "summary": "box_mean"},
    "KVStar": {**_SCALED, "checkpoint_interval": 3, "lock_duration": 9, "update_threshold": 1, "summary": "hash"},
}


def sparse_config(method: str) -> dict[str, Any]:
    """The plugin's options for a method of METHODS; none for "none"."""
    if method == "none":
        return {}
    return {"ucm_sparse_method": method, "ucm_sparse_config": {method: METHODS[method]}}


class MixSparse:
    """Calls the method's hooks for requests, and attaches its selections to messages.

    Args:
        ucm: the plugin's options, with a method.
        limits: of the server.
    """

    def __init__(self, ucm: Mapping[str, Any], limits: Limits) -> None:
        config = resolve_config({"ucm": dict(ucm)})
        role = scheduler_role(config, limits.block_size, limits.max_model_len)
        if role is None:
            raise ValueError("ucm.ucm_sparse_method: found none, expected the name of a method")
        self._method = role

    def begin(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """A request that is scheduled for the first time."""
        self._method.request_finished_in_scheduler(request_id)
        if read_extra_args(params.extra_args):
            self._method.request_begin(request_id, prompt)

    def attach(self, message: SchedulerOutput, requests: Mapping[str, Any]) -> None:
        """requests: objects with `num_tokens` by id, at least the scheduled ones."""
        for request_id in message.preempted_req_ids or ():
            self._method.request_preempted(request_id)
        for request_id in message.finished_req_ids:
            self._method.request_finished_in_scheduler(request_id)
        attach_sparse_meta(message, self._method.build_sparse_meta(message, requests))

    def verified(self, drafts: Iterable[tuple[str, int, int]]) -> None:
        """drafts: request id, drafts of it that were verified, and how many of these were accepted."""
        for request_id, num_drafts, num_accepted in drafts:
            self._method.drafts_verified(request_id, num_drafts, num_accepted)
