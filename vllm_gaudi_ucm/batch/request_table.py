"""Persistent state of the live requests: one row of a few numpy arrays per request; no Python per token in a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan
from vllm_gaudi_ucm.batch.block_table import BlockTable
from vllm_gaudi_ucm.batch.kv_group import KvGroup
from vllm_gaudi_ucm.batch.planned_step import NO_BLOCKS, PlannedStep
from vllm_gaudi_ucm.batch.row_input import BUILT_IN_INPUTS, RowInput, RowInputs, TokenIds
from vllm_gaudi_ucm.batch.token_table import TokenTable

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_gaudi_ucm.vllm_api.steps import CachedRequestData, LogprobsTensors, NewRequestData, SchedulerOutput

InputT = TypeVar("InputT", bound=RowInput)

# A preempted request keeps its row until it is resumed or finished, so more than max_num_seqs requests can be live.
GROWTH = 2

UNKNOWN_TOKEN = -1
"""Placeholder in `output_token_ids` for a token that is sampled, but that only the device knows yet."""


@dataclass(eq=False)
class LiveRequest:
    """State that does not fit an array. Logits processors hold a reference to the list `output_token_ids`."""

    request_id: str
    row: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    noise_seed: int | None = None
    prompt_logprobs: LogprobsTensors | None = None
    prompt_scored: bool = False

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Returns whether its prompt still has to be scored."""
        return self.sampling_params.prompt_logprobs is not None and not self.prompt_scored

    def seed(self, noise_seed: int) -> None:
        """Sets the seed of its random tokens, which is kept across preemption; they also depend on their positions."""
        self.noise_seed = noise_seed

    def begin_scores(self, scores: LogprobsTensors) -> None:
        """Sets the buffer for the scores of its prompt."""
        self.prompt_logprobs = scores

    def keeps(self, num_outputs: int) -> None:
        """Has the prompt scored again if the scheduler, which takes scores with the first output, has no output."""
        if not num_outputs:
            self.prompt_scored = False

    def take_scores(self) -> LogprobsTensors | None:
        """Returns the scores of its whole prompt, once; a prompt computed again after a preemption gets no scores."""
        scores, self.prompt_logprobs = self.prompt_logprobs, None
        self.prompt_scored = True
        return scores


class DraftModelRows(NamedTuple):
    """Groups and row inputs of a draft model; see RequestTable. reads_next: 1 if rows read the next token."""

    groups: Sequence[KvGroup] = ()
    inputs: RowInputs = BUILT_IN_INPUTS
    reads_next: int = 0


NO_DRAFT_MODEL = DraftModelRows()


class KeepsOfRequests(Protocol):
    """An object that keeps data of running requests, by their rows in the request table."""

    def forget(self, row: int) -> None:
        """Forgets the request of this row, which has finished or was preempted."""
        ...


class RequestTable:
    """Rows of the live requests.

    Args:
        max_num_seqs: number of rows to begin with; the table grows if preempted requests still occupy rows.
        max_model_len: tokens of the longest request.
        by_token: whether each token has its own slot; operations then read `block_size` slots as a block.
        groups: groups of the KV cache; the first one has `block_size`. Empty for one group with all layers.
        draft: groups and inputs of a draft model, whose blocks are in tables of the same requests.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        *,
        by_token: bool = False,
        groups: Sequence[KvGroup] = (),
        inputs: RowInputs = BUILT_IN_INPUTS,
        draft: DraftModelRows = NO_DRAFT_MODEL,
    ) -> None:
        self._block_size = block_size
        self._tokens = TokenTable(max_num_seqs, block_size) if by_token else None
        self._groups = tuple(groups) or (KvGroup(0, block_size),)
        # by number, in vLLM's lists of block ids
        self._tables = {
            group.number: BlockTable(max_num_seqs, 0 if by_token else -(-max_model_len // group.block_size))
            for group in (*self._groups, *draft.groups)
        }
        self._first = next(iter(self._tables.values()))
        self._keepers: tuple[KeepsOfRequests, ...] = ()
        self.max_model_len = max_model_len
        kinds: tuple[type[RowInput], ...] = (TokenIds, *inputs, *draft.inputs)
        made = {kind: kind(max_num_seqs, max_model_len) for kind in dict.fromkeys(kinds)}
        self._token_ids = made[TokenIds]
        self._made = made
        self._inputs = tuple(made.values())
        self._read = tuple(made[kind] for kind in inputs)
        self.drafts_read_next = draft.reads_next
        self._read_by_drafts = tuple(made[kind] for kind in draft.inputs)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_computed = np.zeros(max_num_seqs, np.int32)
        self.requests: dict[str, LiveRequest] = {}
        self._free_rows = list(range(max_num_seqs))[::-1]

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Returns [rows, longest request]; see TokenIds."""
        return self._token_ids.kept

    @property
    def block_tables(self) -> NDArray[np.int32]:
        """Returns [rows, width] physical block ids of the first group."""
        return self._first.blocks

    @property
    def num_blocks(self) -> NDArray[np.int32]:
        """Returns [rows] the number of blocks of each row in the first group."""
        return self._first.num_blocks

    def follow(self, keepers: Iterable[KeepsOfRequests]) -> None:
        """Notifies these objects, and no others, when requests lose their place on the device."""
        self._keepers = tuple(keepers)

    def input_of(self, kind: type[InputT]) -> InputT:
        """Returns the object of an input, which one of the models reads."""
        return cast(InputT, self._made[kind])

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Applies the scheduler's data for finished, new, running and resumed requests, in this order.

        Finished requests come first, because an id may be reused in the same step.
        """
        if self._keepers:
            self._forget((*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())))
        for request_id in scheduler_output.finished_req_ids:
            self._remove(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            self._add(new)
        self._update_cached(scheduler_output.scheduled_cached_reqs)
        if self._tokens is not None:
            self._tokens.flush()

    def scheduled(self, num_scheduled_tokens: dict[str, int]) -> tuple[list[LiveRequest], BatchInput]:
        """Returns the step's requests and the arrays for `plan_batch`, both in the scheduler's order."""
        requests = [self.requests[request_id] for request_id in num_scheduled_tokens]
        rows = np.fromiter((request.row for request in requests), np.int64, len(requests))
        num_scheduled = np.fromiter(num_scheduled_tokens.values(), np.int32, len(requests))
        num_computed = self.num_computed[rows]
        tables = self.tables_of(rows, self._groups)
        return requests, BatchInput(num_computed, num_scheduled, self.num_tokens[rows], tables, rows)

    def planned(self, plan: UnifiedPlan, summaries: NDArray[np.int64] = NO_BLOCKS) -> PlannedStep:
        """Returns the step with the model's inputs for its rows. summaries: see PlannedStep."""
        return PlannedStep(plan, {one.name: one.of(plan) for one in self._read}, summaries)

    def planned_draft(self, plan: UnifiedPlan) -> PlannedStep:
        """Returns a pass of the draft model with its inputs for the rows."""
        found = {one.name: one.of(plan) for one in self._read_by_drafts}
        if self.drafts_read_next:
            found[TokenIds.name] = self._token_ids.of(plan._replace(positions=plan.positions + 1))
        return PlannedStep(plan, found)

    def tables_of(self, rows: NDArray[np.int64], groups: Sequence[KvGroup]) -> tuple[NDArray[np.int32], ...]:
        """Returns the block tables of some rows in each of these groups, in the form of a BatchInput."""
        if self._tokens is not None:
            return tuple(self._tokens.blocks_of(rows) for _ in groups)
        return tuple(self._tables[group.number].blocks_of(rows) for group in groups)

    def room(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [rows] the number of tokens that the blocks or slots of some rows hold."""
        if self._tokens is not None:
            return self._tokens.num_slots[rows].astype(np.int64)
        return self.num_blocks[rows].astype(np.int64) * self._block_size

    def write_drafts(self, drafts: dict[str, list[int]]) -> None:
        """Writes drafts after the tokens of their requests, for one step; `num_tokens` does not count them."""
        for request_id, tokens in drafts.items():
            row = self.requests[request_id].row
            known = self.num_tokens[row]
            self.token_ids[row, known : known + len(tokens)] = tokens

    def append_token(self, request: LiveRequest, token_id: int) -> None:
        """Writes a sampled token back, once. A token beyond the model length needs no place: it is never computed."""
        position = self.num_tokens[request.row]
        if position < self.max_model_len:
            self.token_ids[request.row, position] = token_id
        self.num_tokens[request.row] += 1
        request.output_token_ids.append(token_id)

    def append_unknown(self, request: LiveRequest, slot: int) -> int:
        """Adds a token sampled in this slot that only the device knows. Returns its index in the outputs."""
        index = len(request.output_token_ids)
        self.append_token(request, UNKNOWN_TOKEN)
        position = len(request.prompt_token_ids) + index
        if position < self.max_model_len:
            self.token_ids[request.row, position] = -1 - slot
        return index

    def learn(self, request: LiveRequest, index: int, token_id: int) -> None:
        """Sets an output token that has arrived. Ignored if its request has ended, or no longer waits for the token."""
        outputs = request.output_token_ids
        is_live = self.requests.get(request.request_id) is request
        if not is_live or index >= len(outputs) or outputs[index] != UNKNOWN_TOKEN:
            return
        outputs[index] = token_id
        position = len(request.prompt_token_ids) + index
        if position < self.max_model_len:
            self.token_ids[request.row, position] = token_id

    def sends_again(self, scheduler_output: SchedulerOutput) -> bool:
        """Returns whether the scheduler sends all tokens of a live request, of which none may be unknown."""
        return bool(scheduler_output.scheduled_cached_reqs.resumed_req_ids) or any(
            new.req_id in self.requests for new in scheduler_output.scheduled_new_reqs
        )

    def blocks(self, request_id: str, count: int) -> NDArray[np.int32]:
        """Returns [count] the physical ids of a request's first blocks."""
        return self.block_tables[self.requests[request_id].row, :count]

    def set_block(self, request_id: str, number: int, block: int) -> None:
        """Gives logical block `number` of a request another physical block."""
        self.block_tables[self.requests[request_id].row, number] = block

    def moved(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Renames physical block `sources[i]` to `targets[i]` in every table. int64 [n] each; no block is in both."""
        tables = [table.blocks for table in self._tables.values()]
        number = int(max(sources.max(), targets.max(), *(blocks.max() for blocks in tables)))
        renamed = np.arange(number + 1, dtype=self.block_tables.dtype)
        renamed[sources] = targets
        rows = [request.row for request in self.requests.values()]
        for blocks in tables:
            blocks[rows] = renamed[blocks[rows]]

    def check_integrity(self) -> None:
        """Checks that each row is free or owned by exactly one request, and that a live row knows its own tokens."""
        owned = [request.row for request in self.requests.values()]
        if sorted(owned + self._free_rows) != list(range(len(self.num_tokens))):
            raise AssertionError(f"request table rows: owned {sorted(owned)}, free {sorted(self._free_rows)}")
        for request in self.requests.values():
            known = len(request.prompt_token_ids) + len(request.output_token_ids)
            if self.num_tokens[request.row] != known:
                raise AssertionError(
                    f"request {request.request_id}: row says {self.num_tokens[request.row]} tokens, lists say {known}"
                )

    def _add(self, new: NewRequestData) -> None:
        """Adds a request, replaces a session's previous input with the next one, or takes back a preempted request.

        The scheduler has two contracts: it sends a resumed request as a cached one, or as a new one; in the second case
        every new request has `prefill_token_ids`. A resumed request keeps its generator and its prompt logprobs. Its
        prompt is the same as before; the prompt of a next input is longer by at least one token.
        """
        from vllm_gaudi_ucm.vllm_api.steps import prompt_tokens

        prompt = prompt_tokens(new)
        tokens = new.prefill_token_ids if new.prefill_token_ids is not None else prompt
        request = self.requests.get(new.req_id)
        if request is None or len(request.prompt_token_ids) != len(prompt):
            self._remove(new.req_id)
            # None if the model pools; then nothing samples
            params = cast("SamplingParams", new.sampling_params)
            request = LiveRequest(new.req_id, self._take_row(), list(prompt), params)
            self.requests[new.req_id] = request
        # in place: logits processors hold this list
        request.output_token_ids[:] = tokens[len(prompt) :]
        request.keeps(len(request.output_token_ids))
        row = request.row
        for one in self._inputs:
            one.add(row, new)
        self.num_tokens[row] = len(tokens)
        self.num_computed[row] = new.num_computed_tokens
        self._clear_blocks(row)
        self._append_blocks(row, new.block_ids)

    def _update_cached(self, cached: CachedRequestData) -> None:
        for index, (request_id, block_ids, num_computed, num_outputs) in enumerate(
            zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
        ):
            request = self.requests[request_id]
            row = request.row
            request.keeps(num_outputs)
            if num_outputs < len(request.output_token_ids):
                # a connector's load within the step has failed: the scheduler has discarded the step's results
                del request.output_token_ids[num_outputs:]
                self.num_tokens[row] = len(request.prompt_token_ids) + num_outputs
            elif num_outputs > len(request.output_token_ids) and cached.new_token_ids:
                self._learn(request, num_outputs, cached, index)
            # with async scheduling it counts all drafts of the previous step as accepted; the last token is new
            self.num_computed[row] = min(num_computed, int(self.num_tokens[row]) - 1)
            if request_id in cached.resumed_req_ids:
                self._clear_blocks(row)
            if block_ids is not None:
                self._append_blocks(row, block_ids)

    def _learn(self, request: LiveRequest, num_outputs: int, cached: CachedRequestData, index: int) -> None:
        """Adds tokens that another worker, the last stage of a pipeline, has sampled.

        The scheduler sends the tokens that the step computes, or all tokens of a request that was not in the previous
        step.
        """
        known = len(request.prompt_token_ids) + len(request.output_token_ids)
        missing = num_outputs - len(request.output_token_ids)
        every = cached.all_token_ids.get(request.request_id)
        if every is not None:
            tokens = every[known:]
        else:
            tokens = cached.new_token_ids[index][max(0, known - cached.num_computed_tokens[index]) :]
        if len(tokens) < missing:
            raise ValueError(
                f"request {request.request_id}: the scheduler sent {len(tokens)} new tokens, expected {missing}, which "
                "another stage has sampled; report this as a defect of the plugin"
            )
        for token in tokens[:missing]:
            self.append_token(request, token)

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                for keeper in self._keepers:
                    keeper.forget(request.row)

    def _clear_blocks(self, row: int) -> None:
        for table in self._tables.values():
            table.clear(row)
        if self._tokens is not None:
            self._tokens.clear(row)

    def _append_blocks(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Gives a request more blocks. block_ids: for each group, by its number; empty for an encoder."""
        if not block_ids:
            return
        if self._tokens is not None:
            self._tokens.append(row, block_ids[0])
            return
        for number, table in self._tables.items():
            table.append(row, block_ids[number])

    def _remove(self, request_id: str) -> None:
        """Frees a row. An unknown id belongs to a request that ended before this worker saw it."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        # data of this request must not reach the row's next owner
        for one in self._inputs:
            one.remove(request.row)
        self._clear_blocks(request.row)
        for table in self._tables.values():
            table.blocks[request.row] = 0
        self.num_tokens[request.row] = self.num_computed[request.row] = 0
        self._free_rows.append(request.row)

    def _take_row(self) -> int:
        if not self._free_rows:
            self._grow()
        return self._free_rows.pop()

    def _grow(self) -> None:
        size = len(self.num_tokens)
        for name in ("num_tokens", "num_computed"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(size * (GROWTH - 1), array.dtype)]))
        for one in self._inputs:
            one.grow(size * GROWTH)
        for table in self._tables.values():
            table.grow(size * GROWTH)
        if self._tokens is not None:
            self._tokens.grow(size * GROWTH)
        self._free_rows = list(range(size, size * GROWTH))[::-1]
