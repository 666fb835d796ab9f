"""The interface of a sparse method: hooks of the scheduler's role and hooks of the worker's role.

Source: seed 000 (GSA), sections 2, 5 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_gaudi_ucm.sparse.options import MethodOptions

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_gaudi_ucm.protocol.sparse_meta import SparseMeta
    from vllm_gaudi_ucm.vllm_api.steps import Request, SchedulerOutput

INVALID_SLOT = -1
"""`estimate_num_slots_sparsed` returns this if the method does not change how many slots a request needs."""


class UcmSparseRole(Enum):
    """The process in which a method object lives."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


SCHEDULER_HOOKS = (
    "register_block_size",
    "request_begin",
    "estimate_num_slots_sparsed",
    "allocate_slots",
    "build_sparse_meta",
    "drafts_verified",
    "request_preempted",
    "request_finished_in_scheduler",
)
WORKER_HOOKS = (
    "register_kv_caches",
    "execute_begin",
    "attention_begin",
    "attention_finished",
    "execute_finished",
    "update_states",
    "request_finished_in_worker",
)


class SparseRoleError(RuntimeError):
    """A hook was called on a method object of the other role."""


class UcmSparseBase:
    """A sparse method that does nothing: every request is dense, every tensor passes through.

    A method overrides the hooks that it needs, and sets `Options` to the model of its options. One object serves one
    role; a hook of the other role raises `SparseRoleError`.

    Args:
        role: the process in which the object lives.
        config: the method's options: a mapping, an `Options`, or None for the defaults. Raises `UcmConfigError`.
    """

    Options: ClassVar[type[MethodOptions]] = MethodOptions

    def __init__(self, role: UcmSparseRole, config: Mapping[str, Any] | MethodOptions | None = None) -> None:
        self.role = role
        self.options = self.Options.resolve({} if config is None else config, type(self).__name__)
        # set on the object, so that hooks of the right role cost nothing and a method need not call super()
        for hook in WORKER_HOOKS if role is UcmSparseRole.SCHEDULER else SCHEDULER_HOOKS:
            setattr(self, hook, _refusal(type(self).__name__, hook, role))

    @classmethod
    def decides_by_counts(cls, options: MethodOptions) -> bool:
        """Returns whether the hooks of the scheduler's role read only `num_tokens` of requests, and of a step only its
        requests and the number of tokens of each. With asynchronous scheduling and drafts, such a method decides in the
        workers; a method that reads more has its steps scheduled one after the other. options: the method's own.
        """
        return False

    @property
    def selecting_method(self) -> UcmSparseBase:
        """The method that selects: this one, or the one that it wraps."""
        return self

    # --- scheduler role ---

    def register_block_size(self, block_size: int) -> None:
        """Called once, before the first request, with the tokens per block."""

    def request_begin(self, request_id: str, prompt_token_ids: Sequence[int]) -> None:
        """Called when a request that may be sparse was added. A finished request may have had the same id."""

    def estimate_num_slots_sparsed(self, request: Request) -> int:
        """Returns the slots that the request needs instead of one for each token, or INVALID_SLOT for no change."""
        return INVALID_SLOT

    def allocate_slots(self, request: Request, num_slots_sparsed: int) -> Any:
        """Allocates the slots that `estimate_num_slots_sparsed` returned; never called after INVALID_SLOT."""
        raise NotImplementedError(
            f"{type(self).__name__}.allocate_slots: found {num_slots_sparsed} slots asked for by "
            "estimate_num_slots_sparsed, expected INVALID_SLOT; a method that changes the number must override both"
        )

    def build_sparse_meta(self, scheduler_output: SchedulerOutput, requests: Mapping[str, Request]) -> SparseMeta:
        """Returns the selections of a step, once after scheduling. `requests` holds at least the scheduled ones."""
        from vllm_gaudi_ucm.protocol.sparse_meta import SparseMeta

        return SparseMeta()

    def drafts_verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Called when a step has verified the drafts of a live request."""

    def request_preempted(self, request_id: str) -> None:
        """Called when the request has lost its blocks and will be computed again: all data stored for it is invalid."""

    def request_finished_in_scheduler(self, request_id: str) -> None:
        """Called when the request finished or was aborted. Called for requests that never began, too."""

    # --- worker role ---

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Called once with the keys of each layer, [blocks, block size, kv heads, head size], by layer name."""

    def execute_begin(self, step: Any) -> None:
        """Called before the forward of a step; `step` is the worker's plan of it."""

    def attention_begin(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: Any,
        output: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Called before the attention of a layer; query [rows, heads, dim], key and value [rows, kv heads, dim]."""
        return query, key, value, output

    def attention_finished(self, layer_idx: int, output: Tensor | None) -> Tensor | None:
        """Called after the attention of a layer; output [rows, heads, dim], or None if `attention_begin` got none."""
        return output

    def execute_finished(self) -> None:
        """Called after the forward of a step."""

    def update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Called before a step is planned, with requests that begin, resume, were preempted or finished."""

    def request_finished_in_worker(self, request_id: str) -> None:
        """Called when the worker has dropped the request."""


class WrappingSparse(UcmSparseBase):
    """A method that wraps another one: a hook that the subclass does not define is the inner method's.

    Args:
        role: the process in which both objects live.
    """

    def __init__(
        self, role: UcmSparseRole, config: Mapping[str, Any] | MethodOptions | None, base_sparse: UcmSparseBase
    ) -> None:
        super().__init__(role, config)
        self.base_sparse = base_sparse
        for hook in SCHEDULER_HOOKS if role is UcmSparseRole.SCHEDULER else WORKER_HOOKS:
            if getattr(type(self), hook) is getattr(UcmSparseBase, hook):
                setattr(self, hook, getattr(base_sparse, hook))

    @property
    def selecting_method(self) -> UcmSparseBase:
        return self.base_sparse.selecting_method


def _refusal(method: str, hook: str, role: UcmSparseRole) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        other = UcmSparseRole.WORKER if role is UcmSparseRole.SCHEDULER else UcmSparseRole.SCHEDULER
        raise SparseRoleError(
            f"{method}.{hook}: found an object of the role {role.name}, expected {other.name}; "
            f"create one with UcmSparseRole.{other.name}"
        )

    return refuse
