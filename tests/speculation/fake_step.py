"""A step that verifies drafts, without a model: the logits of a row are a function of what was written before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from vllm import SamplingParams

from tests.batch.scheduling import Known, new_request, step_output
from tests.sampling.sampling_twins import VOCAB, engine_config
from vllm_gaudi_ucm.batch.request_table import LiveRequest, RequestTable
from vllm_gaudi_ucm.protocol.step_drafts import StepDrafts
from vllm_gaudi_ucm.sampling.draft_probabilities import DraftProbabilities
from vllm_gaudi_ucm.sampling.sampling import (
    Grammar,
    SampledTokens,
    SamplingBatch,
    SlotSampler,
    TokenSampler,
    VllmSampler,
)
from vllm_gaudi_ucm.speculation.verification import StepLogits, Verification

CPU = torch.device("cpu")
BLOCK_SIZE = 4
MAX_MODEL_LEN = 64


@cache
def _random_logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def random_logits(tokens: Sequence[int]) -> torch.Tensor:
    """float32 [VOCAB], always the same after the same tokens."""
    seed = int(np.dot(np.arange(1, len(tokens) + 1), tokens)) % (1 << 31)
    return _random_logits(seed)


class FakeModel:
    """An Execution over the rows of one step: `contexts[row]` are the tokens up to it. Counts its calls."""

    max_logits = 64

    def __init__(self, contexts: list[list[int]]) -> None:
        self._contexts = contexts
        self.calls: list[int] = []

    def logits(self, rows: NDArray[np.int64]) -> torch.Tensor:
        self.calls.append(len(rows))
        return torch.stack([random_logits(self._contexts[row]) for row in rows.tolist()])

    def likeliest(self, rows: NDArray[np.int64]) -> torch.Tensor | None:
        """All at once, with a row of garbage behind."""
        self.calls.append(len(rows))
        found = [int(random_logits(self._contexts[row]).argmax()) for row in rows.tolist()]
        return torch.tensor([*found, -5])


class World:
    """A request table with its sampler, stepped by hand.

    Args:
        at_once: see StepLogits.
        likeliest: steps of greedy requests alone are verified without logits, as an engine does.
        sampler: instead of vLLM's.
        seed: of the engine, which requests without one draw theirs by.
        kept: distributions that drafts were drawn from.
    """

    def __init__(
        self,
        at_once: bool = True,
        sampler: TokenSampler | None = None,
        mode: str = "raw_logprobs",
        likeliest: bool = False,
        seed: int = 0,
        kept: DraftProbabilities | None = None,
    ) -> None:
        self.table = RequestTable(8, MAX_MODEL_LEN, BLOCK_SIZE)
        self.batch = SamplingBatch(engine_config(mode, seed=seed), CPU)
        self.calls: list[int] = []
        self._at_once = at_once
        self._likeliest = likeliest
        sampler = sampler or VllmSampler(cast(Any, mode), False)
        slots = SlotSampler(self.batch, sampler, self.table, lambda logits: None)
        self._verification = Verification(slots, kept=kept)

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> LiveRequest:
        self.table.update(step_output({name: len(prompt)}, [new_request(Known(name, prompt, params=params))]))
        return self.table.requests[name]

    def step(
        self,
        drafts: dict[str, list[int]],
        grammar: Callable[[dict[str, list[int]]], Grammar | None] = lambda drafts: None,
        chunks: int = 0,
    ) -> tuple[list[str], SampledTokens]:
        """Verifies these drafts; a request without any decodes. Names in the order of the results.

        chunks: further requests of the step, in the middle of their prompts.
        """
        requests = list(self.table.requests.values())
        self.table.write_drafts(drafts)
        self.batch.sync(requests)
        contexts: list[list[int]] = []
        last_rows = []
        for request in self.batch.slots:
            known = int(self.table.num_tokens[request.row])
            count = len(drafts.get(request.request_id, ()))
            tokens = self.table.token_ids[request.row].tolist()
            contexts += [tokens[: known + j] for j in range(count + 1)]
            last_rows.append(len(contexts) - 1)
        num_scheduled = {request.request_id: 1 + len(drafts.get(request.request_id, ())) for request in requests}
        num_scheduled.update((f"chunk-{number}", 8) for number in range(chunks))
        step = StepDrafts({name: tokens for name, tokens in drafts.items() if tokens}, num_scheduled)
        model = FakeModel(contexts)
        logits = StepLogits(cast(Any, model), step, self._at_once, self._likeliest and self.batch.wants_likeliest)
        names = self.batch.req_ids
        logits.compute(self.batch.slots, np.array(last_rows, np.int64))
        sampled = self._verification.sample(logits, step, grammar(drafts))
        self.table.check_integrity()
        self.calls = model.calls
        return names, sampled


def scheduled_drafts(drafts: dict[str, list[int]], num_scheduled: dict[str, int]) -> Any:
    """The part of a SchedulerOutput that names drafts."""
    return SimpleNamespace(scheduled_spec_decode_tokens=drafts, num_scheduled_tokens=num_scheduled)
