"""Groups of layers that keep a state for each request, updated by each token: the base of all such kinds."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.execution.cache_group import CacheGroup, Tensors, ToDevice
from vllm_gaudi_ucm.execution.step_sizes import Sizes, of_rows
from vllm_gaudi_ucm.execution.step_tensors import StepArrays, StepTensor, group_suffix
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.batch.batch_plan import BatchInput, PlanOfGroup, UnifiedPlan
    from vllm_gaudi_ucm.batch.block_use import Room
    from vllm_gaudi_ucm.batch.group_planner import Planned
    from vllm_gaudi_ucm.batch.kv_group import KvGroup
    from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
    from vllm_gaudi_ucm.graphs.shapes.limits import Limits
    from vllm_gaudi_ucm.ops.unified_attention.api import Plan
    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheSpec


_NONE = np.zeros(0, np.int64)


class StatePlaces(NamedTuple):
    """The places of a group's states, in tensors of [`rows`, ...]: the first rows belong to blocks, by block id.

    If blocks have states, the state after the last token of a block belongs to the block, so prefix caching keeps it
    with the block. Each running request has a slot, whose rows are the states after its last tokens: the request
    continues from one of them, however many of its drafts were rejected.

    num_blocks: blocks of the KV cache that have a state, or numbers of kept states; the first one is for pads.
    num_slots: requests that run at once. rows_each: rows of a slot, for the tokens of a request whose acceptance one
    step decides: its drafts and one more.
    """

    num_blocks: int
    num_slots: int
    rows_each: int

    @property
    def rows(self) -> int:
        """Returns the number of rows. The last one is never written, because a request begins with zeros."""
        return self.zeros + 1

    @property
    def zeros(self) -> int:
        return self.num_blocks + self.num_slots * self.rows_each

    def of_tokens(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rows of states after tokens at these positions, of requests with these slots."""
        return self.num_blocks + slots * self.rows_each + positions % self.rows_each


class StatePlan(NamedTuple):
    """Reads and writes of states in a step; requests are in flat order. See StateInputs."""

    sources: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    kept_rows: NDArray[np.int64]
    kept_at: NDArray[np.int64]

    @property
    def parts(self) -> tuple[str, ...]:
        return ()


class StateInputs(NamedTuple):
    """A step's inputs for layers with a state. In a bucket the last entries are pads, which change no state in use.

    sources: int64 [requests] rows of the states from which requests continue.
    first_rows: int64 [requests] first row of each request in the step; its other rows follow.
    row_requests: int64 [rows] request of each row.
    kept_rows: int64 [kept] rows of the step after which the state is kept.
    kept_at: int64 [kept] rows of states to which they are written. Only pads are written to one row several times.
    """

    sources: torch.Tensor
    first_rows: torch.Tensor
    row_requests: torch.Tensor
    kept_rows: torch.Tensor
    kept_at: torch.Tensor

    @classmethod
    def from_tensors(cls, tensors: Tensors) -> StateInputs:
        return cls(*(tensors[name] for name in cls._fields))


class MadeOfTensors(Protocol):
    """Inputs of layers, made of a step's tensors."""

    @classmethod
    def from_tensors(cls, tensors: Tensors) -> Any:
        """Returns the inputs. tensors: by the names in `StateGroup.tensors`."""
        ...


class StateGroup(CacheGroup):
    """States of requests. A subclass names its layers, and defines shapes and dtypes of what a layer keeps.

    A layer has `get_kv_cache_spec`, `bind_kv_cache`, which gets a tensor [rows, *shape] for each entry of `states_of`,
    as a tuple, and `join(step)`: in the forward `step.metadata` is a StateInputs.

    Args:
        kv: see CacheGroup; it uses the table of the first group.
        max_num_seqs: requests that run at once.
        rows_each: tokens of a request whose acceptance one step decides.
        kept_states: states that are kept for prefix caching, if blocks have none.

    of_blocks: whether each block has a state, so that prefix caching may begin behind it. Otherwise the kind needs
        prefix caching switched off: large states fit for running requests alone.
    inputs: the class of `step.metadata`.
    """

    of_blocks: ClassVar[bool] = True
    inputs: ClassVar[type[MadeOfTensors]] = StateInputs

    def __init__(self, kv: KvGroup, max_num_seqs: int, rows_each: int, kept_states: int = 0) -> None:
        super().__init__(kv)
        self._kept_states = kept_states
        self._max_num_seqs = max_num_seqs
        self._rows_each = rows_each
        self._planner: StatePlanner | None = None
        self._states: dict[str, tuple[torch.Tensor, ...]] = {}

    @classmethod
    def make(cls, kv: KvGroup, vllm_config: VllmConfig) -> StateGroup:
        return cls(kv, vllm_config.scheduler_config.max_num_seqs, 1 + vllm_config.num_speculative_tokens)

    @classmethod
    @abstractmethod
    def states_of(cls, spec: KVCacheSpec) -> Sequence[tuple[tuple[int, ...], torch.dtype]]:
        """Returns shape and dtype of each tensor that a layer keeps for a request."""

    @property
    def follows_requests(self) -> StatePlanner:
        return self._made_planner()

    def bytes_per_block(self, spec: KVCacheSpec) -> int:
        return self._bytes_each(spec) if self.of_blocks else 0

    def bytes_of_requests(self, spec: KVCacheSpec) -> int:
        return self._places(1).rows * self._bytes_each(spec)

    def _bytes_each(self, spec: KVCacheSpec) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.states_of(spec))

    def _places(self, num_blocks: int) -> StatePlaces:
        count = num_blocks if self.of_blocks else 1 + self._kept_states
        return StatePlaces(count, self._max_num_seqs, self._rows_each)

    def allocate(self, specs: Mapping[str, KVCacheSpec], num_blocks: int, device: torch.device) -> dict[str, Any]:
        places = self._places(num_blocks)
        self._planner = self.make_planner(places)
        for name, spec in specs.items():
            # each in an allocation of its own: Gaudi's bridge tells tensors that graphs write by their storage
            self._states[name] = tuple(
                torch.zeros((places.rows, *shape), dtype=dtype, device=device) for shape, dtype in self.states_of(spec)
            )
        return dict(self._states)

    @property
    def states(self) -> list[torch.Tensor]:
        """Returns the tensors of all layers; tensors of one shape follow each other."""
        return [one for alike in zip(*self._states.values(), strict=True) for one in alike]

    @property
    def bytes_of_request(self) -> int:
        """Returns the bytes of the states of one running request in all layers."""
        return self._rows_each * sum(one[0].nbytes for one in self.states)

    def make_planner(self, places: StatePlaces) -> StatePlanner:
        """Returns the planner of an engine."""
        return StatePlanner(self.kv.block_size if self.of_blocks else None, places)

    def refill(self) -> None:
        for states in self._states.values():
            for one in states:
                one.zero_()

    def _made_planner(self) -> StatePlanner:
        assert self._planner is not None, "allocate makes the planner"
        return self._planner

    def planner(self, causal_slice: int, batches: int) -> StatePlanner:
        return self._made_planner()

    def tensors(self, number: int) -> tuple[StepTensor, ...]:
        end = group_suffix(number)

        def entry(name: str, pad: int) -> StepTensor:
            def values(step: StepArrays) -> NDArray[np.int64]:
                found: NDArray[np.int64] = getattr(step.plan.groups[number], name)
                return found

            return StepTensor(name + end, values, self._of_requests if "kept" not in name else self._of_kept, pad)

        return (
            # pads read a state that they leave unchanged
            entry("sources", DUMMY_BLOCK),
            entry("first_rows", 0),
            StepTensor("row_requests" + end, attrgetter("plan.row_requests"), of_rows, lambda sizes: sizes.spans - 1),
            entry("kept_rows", 0),
            entry("kept_at", DUMMY_BLOCK),
        )

    @staticmethod
    def _of_requests(sizes: Sizes) -> tuple[int, ...]:
        return (sizes.spans,)

    def _of_kept(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns the room for the last tokens of each request, and of each block that becomes full."""
        rows, requests = sizes.shape.query_len, sizes.spans - 1
        full = min(rows, rows // self.kv.block_size + requests) if self.of_blocks else 0
        return (min(rows, requests * self._rows_each) + full,)

    def divide(self, batch: BatchInput, room: Room | None) -> list[NDArray[np.int64]]:
        """Divides a step so that a request that continues from a block runs after the part that fills the block."""
        return self._made_planner().divide(batch)

    def at_true_shape(self, plan: UnifiedPlan, own: PlanOfGroup, tensors: Tensors, to_device: ToDevice) -> Any:
        return self.inputs.from_tensors(tensors)

    def in_buckets(self, number: int, limits: Limits, causal_slice: int, device: torch.device) -> _InBuckets:
        return _InBuckets(self.inputs)

    def metadata(self, inputs: Any, implementation: str, plan: Plan | None) -> Any:
        return inputs


class _InBuckets:
    """Makes the inputs of a state group in buckets; see GroupInBuckets."""

    def __init__(self, inputs: type[MadeOfTensors]) -> None:
        self._inputs = inputs

    def make_inputs(self, shape: ForwardShape, tensors: Tensors) -> Any:
        return self._inputs.from_tensors(tensors)

    def refill(self) -> None:
        """Does nothing, because the group has no tensors of its own."""


class StatePlanner:
    """Plans reads and writes of states, and gives running requests their slots.

    Args:
        block_size: tokens of a block; None if blocks have no states.
    """

    def __init__(self, block_size: int | None, places: StatePlaces) -> None:
        self._block_size = block_size
        self.places = places
        self._free = list(range(places.num_slots))[::-1]
        # by row of the request table
        self._slots: dict[int, int] = {}
        # for each slot, the tokens after which its rows hold states: positions [begin, end)
        self._begin = np.zeros(places.num_slots, np.int64)
        self._end = np.zeros(places.num_slots, np.int64)
        # the same of requests whose states are elsewhere, by a number
        self._away: dict[int, tuple[int, int]] = {}

    def leave(self, row: int, number: int) -> NDArray[np.int64]:
        """Returns the rows of the states of a request, which are copied away. number: says where; see `come_back`."""
        slot = self._slots[row]
        self._away[number] = int(self._begin[slot]), int(self._end[slot])
        return self._rows_of(slot)

    def come_back(self, row: int, number: int) -> NDArray[np.int64]:
        """Gives a request a slot, and returns its rows, to which the states are copied that `leave` has returned."""
        (slot,) = self._slots_of(np.array([row])).tolist()
        self._begin[slot], self._end[slot] = self._away.pop(number)
        return self._rows_of(slot)

    def row_behind(self, row: int, tokens: int) -> int:
        """Returns the row of the state behind so many tokens of a request; ValueError if its slot does not hold it."""
        slot, computed = np.array([self._slots[row]]), np.array([tokens])
        if not self._in_slots(slot, computed).all():
            raise ValueError(f"a state behind {tokens} tokens: found none; report this as a defect of the plugin")
        return int(self.places.of_tokens(slot, computed - 1)[0])

    def _rows_of(self, slot: int) -> NDArray[np.int64]:
        each = self.places.rows_each
        return self.places.num_blocks + slot * each + np.arange(each)

    def forget(self, row: int) -> None:
        """Frees the slot of a request; see KeepsOfRequests."""
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._begin[slot] = self._end[slot] = 0
            self._free.append(slot)

    def plan(self, batch: BatchInput, step: UnifiedPlan, planned: Planned) -> PlanOfGroup:
        """Plans a step; see GroupPlanner and `plan_states`."""
        return self.plan_states(batch, step)

    def plan_states(self, batch: BatchInput, step: UnifiedPlan) -> StatePlan:
        """Plans the reads and writes of a step.

        A request with more rows than a verification has is a prompt, whose tokens are certain: its last state is kept.

        Raises:
            ValueError: a request continues after a token whose state is not kept.
        """
        slots = self._slots_of(step.table_rows)
        computed = batch.num_computed[step.requests].astype(np.int64)
        tables = batch.block_tables
        sources = self._sources(slots, computed, tables, step.requests, step.table_rows)
        first, behind = step.query_start[:-1], step.query_start[1:]
        kept = np.where(behind - first > self.places.rows_each, 1, behind - first)
        from_end = behind[step.row_requests] - 1 - np.arange(step.num_rows)
        last = np.flatnonzero(from_end < kept[step.row_requests])
        last_at = self.places.of_tokens(slots[step.row_requests[last]], step.positions[last])
        self._end[slots] = computed + behind - first
        self._begin[slots] = self._end[slots] - kept
        full, blocks = self._full_blocks(step, tables)
        return StatePlan(sources, first, np.concatenate([last, full]), np.concatenate([last_at, blocks]))

    def _begin_with(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rows of the states with which these requests begin: of zeros, unless a planner knows better."""
        return np.full(len(rows), self.places.zeros, np.int64)

    def _full_blocks(self, step: UnifiedPlan, tables: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the rows after which a block is full, and these blocks."""
        size = self._block_size
        if size is None:
            return _NONE, _NONE
        full = np.flatnonzero((step.positions + 1) % size == 0)
        blocks = tables[step.requests[step.row_requests[full]], step.positions[full] // size]
        return full, blocks.astype(np.int64)

    def divide(self, batch: BatchInput) -> list[NDArray[np.int64]]:
        """Returns the requests, by index, of each part: none continues from a block that its own part fills."""
        rows = np.arange(len(batch.num_scheduled)) if batch.table_rows is None else batch.table_rows
        computed = batch.num_computed.astype(np.int64)
        from_blocks, size = self._read_blocks(rows, computed), self._block_size
        if size is None or not from_blocks.any():
            return [np.arange(len(rows))]
        parts, filled = [[]], set()  # type: ignore[var-annotated]
        for index, begin in enumerate(computed.tolist()):
            table = batch.block_tables[index]
            if from_blocks[index] and int(table[begin // size - 1]) in filled:
                parts.append([])
                filled = set()
            parts[-1].append(index)
            filled |= set(table[begin // size : (begin + int(batch.num_scheduled[index])) // size].tolist())
        return [np.array(part) for part in parts]

    def _slots_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        for row in rows.tolist():
            if row not in self._slots:
                self._slots[row] = self._free.pop()
        return np.array([self._slots[row] for row in rows.tolist()], np.int64)

    def _read_blocks(self, rows: NDArray[np.int64], computed: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns which requests continue from the state of a block."""
        slots = np.array([self._slots.get(row, -1) for row in rows.tolist()], np.int64)
        return (computed > 0) & ~((slots >= 0) & self._in_slots(slots, computed))

    def _in_slots(self, slots: NDArray[np.int64], computed: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns which slots hold the state after so many tokens."""
        return (self._begin[slots] < computed) & (computed <= self._end[slots])

    def _sources(
        self,
        slots: NDArray[np.int64],
        computed: NDArray[np.int64],
        tables: NDArray[np.int32],
        requests: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        found = self._begin_with(rows)
        in_slot = self._in_slots(slots, computed)
        found[in_slot] = self.places.of_tokens(slots[in_slot], computed[in_slot] - 1)
        others, size = np.flatnonzero((computed > 0) & ~in_slot & (found == self.places.zeros)), self._block_size
        lost = others if size is None else others[computed[others] % size != 0]
        if len(lost):
            wanted = "none, as blocks have no states" if size is None else f"one behind each block of {size} tokens"
            raise ValueError(
                f"a state behind {int(computed[lost[0]])} tokens: found none, expected {wanted}; report this as a "
                "defect of the plugin"
            )
        if size is not None:
            found[others] = tables[requests[others], computed[others] // size - 1]
        return found
