"""KVStar: keeps the selection of any base method locked over several steps. Source: seed 002."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from vllm_gaudi_ucm.protocol.sparse_meta import RequestSelection, SelectionMode, SparseMeta
from vllm_gaudi_ucm.sparse.base import UcmSparseBase, UcmSparseRole
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.methods.kvstar.delegation import BaseMethodHooks
from vllm_gaudi_ucm.sparse.methods.kvstar.metrics import KVStarMetrics
from vllm_gaudi_ucm.sparse.methods.kvstar.options import KVStarOptions
from vllm_gaudi_ucm.sparse.methods.kvstar.speculative import KVStarSpeculative
from vllm_gaudi_ucm.sparse.methods.kvstar.state import KVStarState
from vllm_gaudi_ucm.sparse.options import MethodOptions

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class KVStar(BaseMethodHooks, UcmSparseBase):
    """In the scheduler it decides in which steps the base method selects; in the worker the base method does the work.

    `lock_selection`, `unlock_selection` and `get_selection` serve selections that the host makes.
    """

    Options: ClassVar[type[MethodOptions]] = KVStarOptions

    def __init__(self, role: UcmSparseRole, config: Mapping[str, Any] | MethodOptions | None = None) -> None:
        super().__init__(role, config)
        self.kvstar_options = cast(KVStarOptions, self.options)
        self.base_sparse = UcmSparseFactory.create_sparse_method(
            self.kvstar_options.base_method, role, self.kvstar_options.base_options()
        )
        self.metrics = KVStarMetrics()
        self._states: dict[str, KVStarState] = {}
        self._speculatives: list[KVStarSpeculative] = []
        self.speculative = KVStarSpeculative(self)

    # --- selections that the host makes ---

    def lock_selection(self, request_id: str, selection: Sequence[int] | None, position: int) -> None:
        """Locks a selection of logical blocks; None: one that the device chooses in the request's next step."""
        state = self._state(request_id)
        if state.is_locked:
            self.metrics.record_unlock()
        state.lock(position, None if selection is None else list(selection))
        self.metrics.record_lock()

    def unlock_selection(self, request_id: str) -> None:
        """The request's next step selects anew; nothing happens without a lock."""
        state = self._states.get(request_id)
        if state is not None and state.is_locked:
            state.unlock()
            self.metrics.record_unlock()

    def get_selection(
        self, request_id: str, current_position: int, fallback_selector: Callable[[], Sequence[int]]
    ) -> list[int]:
        """The locked selection, or a new one that is locked then.

        A step is counted when the position has changed since the last call, so that every layer may ask; while drafts
        are open none is counted. The blocks are those of the top-k part: sinks, window and tail join them elsewhere.
        """
        state = self._state(request_id)
        if state.is_locked and state.locked_selection is not None:
            if state.position == current_position or self._is_speculating(request_id):
                return list(state.locked_selection)
            state.position = current_position
            mode = state.next_step()
            if mode == SelectionMode.REUSE:
                return list(state.locked_selection)
            if mode == SelectionMode.CHECK:
                return self._checkpoint_update(state, fallback_selector)
        selection = list(fallback_selector())
        self.lock_selection(request_id, selection, current_position)
        return selection

    def _checkpoint_update(self, state: KVStarState, fallback_selector: Callable[[], Sequence[int]]) -> list[int]:
        selection, locked = list(fallback_selector()), state.locked_selection or []
        updated = len(set(selection) ^ set(locked)) > self.kvstar_options.update_threshold
        self.metrics.record_checkpoint(updated)
        if updated:
            state.locked_selection = selection
        return list(state.locked_selection or [])

    # --- speculation ---

    def attach_speculative(self, speculative: KVStarSpeculative) -> None:
        """Speculations that end when their request does."""
        self._speculatives.append(speculative)

    def ensure_locked(self, request_id: str) -> None:
        """Locks what the request's next step selects, unless a selection is locked."""
        if not self._state(request_id).is_locked:
            self.lock_selection(request_id, None, self.current_position(request_id))

    def current_position(self, request_id: str) -> int:
        """Tokens of the request when its selection was last asked for, 0 before that."""
        state = self._states.get(request_id)
        return 0 if state is None or state.position is None else state.position

    def _is_speculating(self, request_id: str) -> bool:
        return any(speculative.oldest_session(request_id) for speculative in self._speculatives)

    # --- scheduler role ---

    def request_begin(self, request_id: str, prompt_token_ids: Sequence[int]) -> None:
        self._forget(request_id)
        self.base_sparse.request_begin(request_id, prompt_token_ids)

    def request_preempted(self, request_id: str) -> None:
        self._forget(request_id)
        self.base_sparse.request_preempted(request_id)

    def request_finished_in_scheduler(self, request_id: str) -> None:
        self._forget(request_id)
        self.base_sparse.request_finished_in_scheduler(request_id)

    def drafts_verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        session = self.speculative.oldest_session(request_id)
        # a step in which the request was dense opened none
        if session is not None and session.num_tokens == num_drafts:
            self.speculative.end_speculation(request_id, num_accepted)
        self.base_sparse.drafts_verified(request_id, num_drafts, num_accepted)

    def build_sparse_meta(self, scheduler_output: SchedulerOutput, requests: Mapping[str, Request]) -> SparseMeta:
        """The base method's budgets, with the modes and windows of the locks."""
        offered = self.base_sparse.build_sparse_meta(scheduler_output, requests).requests
        for request_id in scheduler_output.num_scheduled_tokens:
            if request_id not in offered:
                self.unlock_selection(request_id)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        meta = SparseMeta()
        for request_id, selection in offered.items():
            meta.requests[request_id] = self._decide(request_id, selection, requests[request_id].num_tokens)
            if request_id in drafts:
                self.speculative.begin_speculation(request_id, len(drafts[request_id]))
        meta.locks = (self.metrics.lock_count, self.metrics.unlock_count)
        return meta

    def _decide(self, request_id: str, offered: RequestSelection, position: int) -> RequestSelection:
        state = self._state(request_id)
        mode = state.next_step()
        if mode == SelectionMode.SELECT or state.window is None:
            mode = SelectionMode.SELECT
            self.lock_selection(request_id, None, position)
        state.position = position
        if mode != SelectionMode.REUSE or state.window is None:
            state.window = offered
        window = state.window
        threshold = self.kvstar_options.update_threshold if mode == SelectionMode.CHECK else 0
        return RequestSelection(mode, window.sink_blocks, window.window_start, window.num_selected, threshold)

    def _state(self, request_id: str) -> KVStarState:
        state = self._states.get(request_id)
        if state is None:
            options = self.kvstar_options
            state = KVStarState(request_id, options.checkpoint_interval, options.lock_duration)
            self._states[request_id] = state
        return state

    def _forget(self, request_id: str) -> None:
        self.unlock_selection(request_id)
        self._states.pop(request_id, None)
        for speculative in self._speculatives:
            speculative.forget(request_id)
