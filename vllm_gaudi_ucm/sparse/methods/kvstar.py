"""KVStar keeps a selection of any base method locked over several steps and their drafts. Source: seed 002."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, cast

from pydantic import ConfigDict, Field

from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError, unknown_key
from vllm_gaudi_ucm.protocol.sparse_meta import RequestSelection, SelectionMode, SparseMeta
from vllm_gaudi_ucm.sparse.base import UcmSparseRole, WrappingSparse
from vllm_gaudi_ucm.sparse.methods.kvstar_metrics import KVStarMetrics
from vllm_gaudi_ucm.sparse.options import MethodOptions
from vllm_gaudi_ucm.sparse.registry import SPARSE_METHODS, SparseMethodError, method_class, options_class

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.steps import Request, SchedulerOutput


class KVStarOptions(MethodOptions):
    """Options of KVStar. `resolve` also checks the base method's options, which are kept as extra attributes."""

    model_config = ConfigDict(extra="allow")

    checkpoint_interval: Annotated[int, Field(ge=1)] = Field(
        default=8, description="Steps of a locked selection after which it is compared with a new one."
    )
    lock_duration: Annotated[int, Field(ge=1)] = Field(
        default=16, description="Steps of a lock, after which the selection is made anew in any case."
    )
    update_threshold: Annotated[int, Field(ge=0)] = Field(
        default=2,
        description="Blocks that a new selection may add and remove, together, without replacing the locked one.",
    )
    base_method: str = Field(
        default="GSA",
        description="Method that selects; its options are given with these, or in its own section.",
    )

    def __hash__(self) -> int:
        return hash((*self.__dict__.values(), *sorted(self.given_base_options().items())))

    @classmethod
    def resolve(cls, value: Any, key: str) -> Self:
        """Resolves options, see MethodOptions. KVStar with base method KVStar is refused."""
        if isinstance(value, cls) or not isinstance(value, Mapping):
            return super().resolve(value, key)
        own = {name: item for name, item in value.items() if name in cls.model_fields}
        rest = {name: item for name, item in value.items() if name not in cls.model_fields}
        options, found = super().resolve({}, key), []
        try:
            options = super().resolve(own, key)
        except UcmConfigError as error:
            found += error.problems
        try:
            base = _resolve_base(own.get("base_method", "GSA"), rest, key, list(cls.model_fields))
        except UcmConfigError as error:
            raise UcmConfigError(found + [p for p in error.problems if p.key not in {q.key for q in found}]) from None
        if found:
            raise UcmConfigError(found)
        return options.model_copy(update={name: getattr(base, name) for name in rest})

    def given_base_options(self) -> dict[str, Any]:
        """Returns the base method's options that were given together with KVStar's own."""
        return self.__pydantic_extra__ or {}

    def with_sections(self, section_of: Callable[[str, str], MethodOptions], key: str) -> Self:
        """Returns these options combined with those in the base method's own section, which given options override."""
        section = section_of(self.base_method, key)
        beside = {name: getattr(section, name) for name in type(section).model_fields}
        return self.resolve({**self.__dict__, **beside, **self.given_base_options()}, f"{key}.KVStar")

    @property
    def selecting(self) -> MethodOptions:
        return self.base_options().selecting

    def base_options(self) -> MethodOptions:
        """Returns the options with which the base method is created."""
        return options_class(self.base_method).resolve(self.given_base_options(), "KVStar")


def _resolve_base(name: Any, given: dict[str, Any], key: str, own: list[str]) -> MethodOptions:
    """Resolves the base method's options from keys that are not KVStar's `own`; problems name KVStar's key."""
    others = [method for method in SPARSE_METHODS.names() if method != "KVStar"]
    wrong = Problem(f"{key}.base_method", repr(name), f"another method, one of {', '.join(others)}")
    if name not in others:
        raise UcmConfigError([wrong])
    try:
        options = options_class(name)
    except SparseMethodError as error:
        raise UcmConfigError([Problem(wrong.key, wrong.found, f"a method that can be loaded ({error})")]) from error
    known = list(options.model_fields)
    unknown = [unknown_key(str(option), key, [*own, *known]) for option in given if option not in known]
    if unknown:
        raise UcmConfigError(unknown)
    base = options.resolve(given, key)
    reuse_steps = dict(base).get("reuse_steps", 1)
    if reuse_steps != 1:
        expected = "1, because KVStar's lock decides how long a selection serves"
        raise UcmConfigError([Problem(f"{key}.reuse_steps", repr(reuse_steps), expected)])
    return base


@dataclass
class KVStarState:
    """State of one request.

    request_id: opaque.
    checkpoint_interval, lock_duration: in steps of the request, whatever the number of its layers or tokens.
    is_locked: whether a selection is locked.
    locked_selection: logical blocks of a selection that the host knows; None while it is only on the device.
    lock_position: tokens of the request when it was locked.
    steps_since_lock, steps_since_checkpoint: steps that the locked selection has served.
    window: sinks, window and number of blocks at the lock or the last checkpoint; they stay until the next one, so that
        every token newer than the selection is attended.
    position: the last position passed to `get_selection`.
    """

    request_id: str
    checkpoint_interval: int = 8
    lock_duration: int = 16
    is_locked: bool = False
    locked_selection: list[int] | None = None
    lock_position: int = 0
    steps_since_lock: int = 0
    steps_since_checkpoint: int = 0
    window: RequestSelection | None = None
    position: int | None = None

    def lock(self, position: int, selection: list[int] | None = None) -> None:
        """Locks from this step on."""
        self.is_locked = True
        self.locked_selection = None if selection is None else list(selection)
        self.lock_position = self.position = position
        self.steps_since_lock = self.steps_since_checkpoint = 0
        self.window = None

    def unlock(self) -> None:
        self.is_locked = False
        self.locked_selection = self.window = None

    def next_step(self) -> SelectionMode:
        """Returns what the request's next step does; SELECT: there is no lock, or it has expired."""
        if not self.is_locked:
            return SelectionMode.SELECT
        self.steps_since_lock += 1
        self.steps_since_checkpoint += 1
        if self.steps_since_lock >= self.lock_duration:
            return SelectionMode.SELECT
        if self.steps_since_checkpoint >= self.checkpoint_interval:
            self.steps_since_checkpoint = 0
            return SelectionMode.CHECK
        return SelectionMode.REUSE


@dataclass(frozen=True)
class SpeculativeSession:
    """Drafts of a request that are not verified yet."""

    request_id: str
    num_tokens: int
    start_position: int


Sessions = dict[str, deque[SpeculativeSession]]
"""Open speculations by request, oldest first: under asynchronous scheduling the drafts of a step may begin before those
of the previous one are verified.
"""


class KVStar(WrappingSparse):
    """Decides, in the scheduler, in which steps the base method selects; in the worker the base method does the work.

    `lock_selection`, `unlock_selection` and `get_selection` are for selections that the host makes.

    Args:
        parts: further arguments of the base method's constructor.
    """

    Options: ClassVar[type[MethodOptions]] = KVStarOptions

    def __init__(
        self, role: UcmSparseRole, config: Mapping[str, Any] | MethodOptions | None = None, **parts: Any
    ) -> None:
        options = KVStarOptions.resolve({} if config is None else config, "KVStar")
        base = method_class(options.base_method)(role, options.base_options(), **parts)
        super().__init__(role, options, base)
        self.kvstar_options = options
        self.metrics = KVStarMetrics()
        self._states: dict[str, KVStarState] = {}
        self.sessions: Sessions = {}
        """Drafts that are not verified yet, by request; removed when a request ends or is preempted."""
        self.speculative = KVStarSpeculative(self)

    @classmethod
    def decides_by_counts(cls, options: MethodOptions) -> bool:
        base = cast(KVStarOptions, options)
        own = cls.build_sparse_meta is KVStar.build_sparse_meta
        return own and method_class(base.base_method).decides_by_counts(base.base_options())

    # --- selections that the host makes ---

    def lock_selection(self, request_id: str, selection: Sequence[int] | None, position: int) -> None:
        """Locks a selection of logical blocks; None: the one that the device chooses in the request's next step."""
        state = self._state(request_id)
        if state.is_locked:
            self.metrics.record_unlock()
        state.lock(position, None if selection is None else list(selection))
        self.metrics.record_lock()

    def unlock_selection(self, request_id: str) -> None:
        """Makes the request's next step select anew; does nothing without a lock."""
        state = self._states.get(request_id)
        if state is not None and state.is_locked:
            state.unlock()
            self.metrics.record_unlock()

    def get_selection(
        self, request_id: str, current_position: int, fallback_selector: Callable[[], Sequence[int]]
    ) -> list[int]:
        """Returns the locked selection, or locks and returns a new one.

        A step is counted when the position has changed since the last call, so that every layer may call this; no step
        is counted while drafts are open. The blocks do not include sinks, window and tail block.
        """
        state = self._state(request_id)
        if state.is_locked and state.locked_selection is not None:
            if state.position == current_position or request_id in self.sessions:
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

    def ensure_locked(self, request_id: str) -> None:
        """Locks the selection of the request's next step, unless a selection is locked."""
        if not self._state(request_id).is_locked:
            self.lock_selection(request_id, None, self.current_position(request_id))

    def current_position(self, request_id: str) -> int:
        """Returns the tokens of the request at the last call for its selection, 0 before the first one."""
        state = self._states.get(request_id)
        return 0 if state is None or state.position is None else state.position

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
        # a step in which the request was dense opened no session
        if session is not None and session.num_tokens == num_drafts:
            self.speculative.end_speculation(request_id, num_accepted)
        self.base_sparse.drafts_verified(request_id, num_drafts, num_accepted)

    def build_sparse_meta(self, scheduler_output: SchedulerOutput, requests: Mapping[str, Request]) -> SparseMeta:
        """Returns the base method's budgets, with the modes and windows of the locks."""
        base = self.base_sparse.build_sparse_meta(scheduler_output, requests)
        offered = base.requests
        for request_id in scheduler_output.num_scheduled_tokens:
            if request_id not in offered:
                self.unlock_selection(request_id)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        meta = SparseMeta(dense_steps=base.dense_steps)
        for request_id, selection in offered.items():
            if selection.tile_rows:
                # rows of a prompt choose for themselves, and nothing is locked
                self.unlock_selection(request_id)
                meta.requests[request_id] = selection
                continue
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
        self.sessions.pop(request_id, None)


class KVStarSpeculative:
    """Opens and closes speculations: drafts and their verification see one selection.

    A speculation is one step of the lock, however many of its tokens are accepted.

    Args:
        kvstar: the method, which owns the open speculations.
    """

    def __init__(self, kvstar: KVStar) -> None:
        self.kvstar = kvstar
        self._sessions = kvstar.sessions

    def begin_speculation(
        self, request_id: str, num_speculative_tokens: int | None = None, *, num_speculative: int | None = None
    ) -> None:
        """Begins drafts; locks the selection if none is locked. The number may be given by either name of the seed.

        Raises TypeError unless exactly one of the names is given, ValueError for a negative number.
        """
        if (num_speculative_tokens is None) == (num_speculative is None):
            raise TypeError(
                f"begin_speculation of request {request_id!r}: found num_speculative_tokens="
                f"{num_speculative_tokens!r} and num_speculative={num_speculative!r}, expected exactly one of them"
            )
        num_tokens = num_speculative if num_speculative_tokens is None else num_speculative_tokens
        if num_tokens is None or num_tokens < 0:
            raise ValueError(f"begin_speculation of request {request_id!r}: found {num_tokens} tokens, expected >= 0")
        self.kvstar.ensure_locked(request_id)
        position = self.kvstar.current_position(request_id)
        session = SpeculativeSession(request_id, num_tokens, position)
        self._sessions.setdefault(request_id, deque()).append(session)

    def end_speculation(self, request_id: str, accepted_tokens: int) -> None:
        """Ends the oldest open speculation after verification. The lock stays, whether all, some or no drafts were
        accepted.

        Does nothing for a request without an open speculation, which has finished or was preempted. Raises ValueError
        for more accepted tokens than drafts.
        """
        session = self.oldest_session(request_id)
        if session is None:
            return
        if not 0 <= accepted_tokens <= session.num_tokens:
            raise ValueError(
                f"end_speculation of request {request_id!r}: found {accepted_tokens} accepted tokens, "
                f"expected 0 to {session.num_tokens}"
            )
        sessions = self._sessions[request_id]
        sessions.popleft()
        if not sessions:
            del self._sessions[request_id]
        self.kvstar.metrics.record_speculation(session.num_tokens, accepted_tokens)

    def oldest_session(self, request_id: str) -> SpeculativeSession | None:
        """Returns the drafts that are verified next; None if none are open."""
        sessions = self._sessions.get(request_id)
        return sessions[0] if sessions else None

    def verify_consistency(
        self, request_id: str, draft_selection: Iterable[int], target_selection: Iterable[int]
    ) -> bool:
        """Returns whether drafts and verification of a request used the same blocks."""
        return set(draft_selection) == set(target_selection)
