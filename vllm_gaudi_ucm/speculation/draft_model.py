"""Drafts of a smaller model with the same vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import BatchInput
from vllm_gaudi_ucm.batch.group_planner import make_planner
from vllm_gaudi_ucm.batch.kv_group import KvGroup
from vllm_gaudi_ucm.execution.graph_manager import Compile, Stage, uncompiled
from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.ops.likeliest_tokens import likeliest_tokens
from vllm_gaudi_ucm.sampling.draft_probabilities import DraftProbabilities
from vllm_gaudi_ucm.speculation.draft_choice import DraftChoice, RandomDrafts
from vllm_gaudi_ucm.speculation.draft_heads import load_draft_head
from vllm_gaudi_ucm.vllm_api.loading import get_model

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.batch.batch_plan import SteadyPlanner, UnifiedPlan
    from vllm_gaudi_ucm.batch.group_planner import StepPlanner
    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.execution.bucketed_execution import BucketedExecution
    from vllm_gaudi_ucm.execution.execution import Execution
    from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
    from vllm_gaudi_ucm.speculation.drafts_ahead import DraftsAhead
    from vllm_gaudi_ucm.speculation.proposer import SampledStep


class DraftModelProposer:
    """Proposes drafts by a draft model, see DraftProposer. Its K/V are in the same blocks as the target's, in tensors
    of their own.

    In every step it computes the same tokens as the target, and the new ones: every block of the target, also in the
    prefix cache, has its K/V, too. The next step overwrites K/V of rejected drafts, as for the target; a block counts
    as full, and may be shared, only with accepted tokens.

    A draft head (`draft_heads.py`) reads the token after a row's own, with the model's hidden state of the row. So its
    rows end a token earlier; vLLM gives a request one block less of the prefix cache, because the last row of a block
    depends on the token behind it.

    Args:
        execution: the draft model's execution. The rows of a pass are within the limits of its shapes: for each
            request, vLLM's scheduler schedules a token less than fits
            (`SpeculativeConfig.max_num_new_slots_for_drafting`).
        max_model_len: of the draft model; a longer request gets no more drafts.
        choice: makes drafts of the logits of a pass; None: the likeliest tokens.
        divided: called for each pass that no shape holds as a whole.
        host: counts the passes, each of which ends with a read of its tokens.
        ahead: with async scheduling, takes the drafts, which are then known only on the device: no pass waits for the
            previous one. None: each is read.
    """

    def __init__(
        self,
        execution: Execution,
        table: RequestTable,
        groups: Sequence[KvGroup],
        max_model_len: int,
        choice: DraftChoice | None = None,
        divided: Callable[[], None] = lambda: None,
        host: HostWork | None = None,
        ahead: DraftsAhead | None = None,
    ) -> None:
        self._ahead = ahead
        self._host = host or HostWork()
        self._execution = execution
        self.choice = choice or DraftChoice()
        self._divided = divided
        self._table = table
        self._max_model_len = min(max_model_len, table.max_model_len)
        self._groups = tuple(groups)
        # the first pass of a step has other rows than the later ones: each goes on from its like
        self._planners = [make_planner(self._groups, causal_slice=512) for _ in range(2)]

    def propose(self, step: SampledStep) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in step.requests]
        if self._ahead is not None:
            self._ahead.begin()
        self.choice.begin(step.requests)
        rows = np.array([request.row for request in step.requests], np.int64)
        known, wanted = self._within_reach(step, rows)
        index = np.flatnonzero(known > step.batch.num_computed)
        begin = step.batch.num_computed.astype(np.int64)
        planner, later = self._planners
        # the first round computes the certain tokens, each later one a draft of the round before
        while len(index):
            for at, token in self._run(rows[index], begin[index], known[index], wanted[index] > 0, planner):
                request = int(index[at])
                drafts[request].append(token)
                place = known[request] + self._table.drafts_read_next
                if place < self._table.max_model_len:
                    # after the request's tokens, where the next step's drafts go, too
                    self._table.token_ids[rows[request], place] = token
            begin = known
            known = known + 1
            wanted = wanted - 1
            index = np.flatnonzero(wanted > 0)
            planner = later
        if self._ahead is not None:
            self._ahead.end()
        return drafts

    def _within_reach(self, step: SampledStep, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns int64 [requests] each: tokens to compute now, counted from the beginning, and drafts to propose.

        Neither goes beyond the draft model's length or the blocks that a request holds.
        """
        batch = step.batch
        reads_next = self._table.drafts_read_next
        every, ended = batch.num_computed + batch.num_scheduled, self._table.num_tokens[rows] - reads_next
        tokens = np.where(step.yields, ended, every)
        room = np.minimum(self._table.room(rows), self._max_model_len - reads_next)
        # a draft is computed for the next one only
        wanted = np.minimum(step.wanted, room - tokens + 1)
        return np.minimum(tokens, room).astype(np.int64), np.where(tokens > room, 0, wanted)

    def _run(
        self,
        rows: NDArray[np.int64],
        begin: NDArray[np.int64],
        end: NDArray[np.int64],
        drafts: NDArray[np.bool_],
        planner: SteadyPlanner | StepPlanner,
    ) -> list[tuple[int, int]]:
        """Computes tokens [begin, end) of table rows, in parts if they fit no shape; returns (index into rows, the
        likeliest next token) of the rows that get drafts.
        """
        table = self._table
        batch = BatchInput(
            num_computed=begin.astype(np.int32),
            num_scheduled=(end - begin).astype(np.int32),
            # with a token more than is computed a request yields nothing
            num_tokens=(end + ~drafts).astype(np.int32),
            tables=table.tables_of(rows, self._groups),
            table_rows=rows,
        )
        divisions = self._execution.divide(batch)
        if len(divisions) == 1:
            return self._compute(planner.plan(batch), batch)
        self._divided()
        found: list[tuple[int, int]] = []
        for index in divisions:
            part = batch.take(index)
            found += [(int(index[at]), token) for at, token in self._compute(planner.plan(part), part)]
        return found

    def _compute(self, plan: UnifiedPlan, batch: BatchInput) -> list[tuple[int, int]]:
        self._execution.stage(self._table.planned_draft(plan))
        self._execution.forward()
        if not len(plan.logits_rows):
            return []
        # all rows of the bucket: cutting them to those in use would be a shape of its own
        logits, count = self._execution.logits(plan.logits_rows), len(plan.logits_rows)
        assert batch.table_rows is not None, "a pass of the request table"
        rows, at = batch.table_rows[plan.logits_requests], plan.logits_requests
        num_tokens = self._table.num_tokens[rows].astype(np.int64)
        # the first pass ends at the last token, or before it with a head, and each later one a token further
        before = batch.num_tokens[at] + self._table.drafts_read_next - num_tokens
        chosen = self.choice.choose(logits, rows, num_tokens, int(before[0]))
        if self._ahead is not None:
            drafts = self._ahead.put(chosen[:count])
        else:
            drafts = self._host.fetch(chosen, "drafts of a model").tolist()[:count]
        return list(zip(plan.logits_requests.tolist(), drafts, strict=True))


DRAFT_PREFIX = "draft_model"
"""Prefix of the names of a draft model's layers."""


def load_draft_model(vllm_config: VllmConfig, model: nn.Module, device: torch.device) -> nn.Module | None:
    """Loads the model of `speculative_config.draft_model_config`, or a head of the model; returns None without one.

    It shares the target's compilation configuration, where attention layers register themselves: so vLLM sizes and
    allocates the KV cache of both at once. If all layers are alike, they are in one group, and a request's block table
    serves both models; otherwise each reads the tables of its layers' groups.
    """
    config = vllm_config.speculative_config
    if config is None or config.method == "ngram":
        return None
    if config.method != "draft_model":
        draft_model = load_draft_head(vllm_config, model, DRAFT_PREFIX, device)
    else:
        own = copy.copy(vllm_config)
        own.model_config = config.draft_model_config
        own.quant_config = None
        draft_model = get_model(vllm_config=own, prefix=DRAFT_PREFIX, load_config=config.draft_load_config)
    if config.draft_sample_method == "probabilistic":
        # with the model, so that the measurement of free memory for the KV cache counts it
        DraftProbabilities(
            vllm_config.scheduler_config.max_num_seqs,
            config.num_speculative_tokens,
            vllm_config.model_config.get_vocab_size(),
            device,
        ).give_to(draft_model)
    return draft_model


def is_draft_layer(name: str) -> bool:
    """True if an attention layer is the draft model's."""
    return name.startswith(f"{DRAFT_PREFIX}.")


class DraftModelGraphs:
    """Forward and logits graphs, and the choice of drafts from the logits of a bucket: all functions of the bucket
    alone, so a pass compiles nothing once its bucket is warm.

    Args:
        make_execution: makes the draft model's execution, given a context for its device work.
        stage: the target's; labels mark the draft model's work.
        region: makes a region of the choice.
        kept: takes the distributions of random drafts; None: drafts are the likeliest tokens.
    """

    def __init__(
        self,
        make_execution: Callable[[Stage], BucketedExecution],
        stage: Stage,
        region: Compile = uncompiled,
        kept: DraftProbabilities | None = None,
        max_rows: int = 0,
    ) -> None:
        self._likeliest = region(likeliest_tokens)
        self._target_stage = stage
        self.execution = make_execution(self._stage)
        self.kept = kept
        self._random = None if kept is None else RandomDrafts(kept, max_rows, self.likeliest, self._stage, region)

    @property
    def choice(self) -> DraftChoice:
        """Returns the choice of drafts from the logits of a bucket."""
        return DraftChoice(self.likeliest) if self._random is None else self._random

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 [rows] on the device; logits: float32 [rows of a bucket, vocabulary]."""
        with self._stage("greedy"):
            tokens: torch.Tensor = self._likeliest(logits)
            return tokens

    def warm_forward(self, shape: ForwardShape) -> None:
        """See BucketedExecution."""
        self.execution.warm_forward(shape)

    def warm_logits(self, rows: int) -> None:
        """The graph of `rows` logits rows, and the choice among them."""
        logits = self.execution.warm_logits(rows)
        self.likeliest(logits)
        if self._random is not None:
            self._random.warm(logits)

    def refill(self) -> None:
        """Fills every tensor that outlives a pass again, after a warm-up that computed nothing."""
        self.execution.refill()
        if self._random is not None:
            self._random.refill()

    def _stage(self, label: str) -> AbstractContextManager[object]:
        return self._target_stage(f"{label}, draft model")
