"""The same requests twice: sampled at static shapes, and by vLLM's own sampler over the true rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import LogprobsLists

from vllm_gaudi_ucm.batch.request_table import LiveRequest
from vllm_gaudi_ucm.execution.graph_manager import Compile, uncompiled
from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.sampling.sampling import Grammar, SampledTokens, SamplingBatch, VllmSampler
from vllm_gaudi_ucm.sampling.static_sampling import StaticSampler

# no multiple of 32, so that the last word of a bitmask has bits without a token
VOCAB = 70
CPU = torch.device("cpu")
MAX_ROWS = 8
MAX_MODEL_LEN = 40
WIDTH = 6
MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


def engine_config(mode: str = "raw_logprobs", max_logprobs: int = WIDTH, **model: Any) -> VllmConfig:
    """Only what samplers and vLLM's processors read of the configuration."""
    fields: dict[str, Any] = {
        "get_vocab_size": lambda: VOCAB,
        "logits_processors": None,
        "is_diffusion": False,
        "max_model_len": MAX_MODEL_LEN,
        "max_logprobs": max_logprobs,
        "logprobs_mode": mode,
        "use_fp64_gumbel": False,
        "seed": 0,
    }
    config = SimpleNamespace(
        model_config=SimpleNamespace(**fields | model),
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_ROWS),
        speculative_config=None,
        reasoning_config=None,
        structured_outputs_config=SimpleNamespace(reasoning_parser=""),
    )
    return cast(VllmConfig, config)


class Twins:
    """Two worlds that differ in their sampler only.

    Args:
        config: of both.
        stage: entered around each stage of the sampler under test.
        region: makes regions of these stages.
    """

    def __init__(
        self,
        config: VllmConfig,
        stage: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
        region: Compile = uncompiled,
    ) -> None:
        self.bypasses: list[str] = []
        self.host = HostWork()
        self.static = StaticSampler(config, CPU, MAX_ROWS, stage, self.bypasses.append, self.host, region)
        self.own = VllmSampler(config.model_config.logprobs_mode, config.model_config.use_fp64_gumbel)
        self.batch, self.own_batch = SamplingBatch(config, CPU), SamplingBatch(config, CPU)
        self._pairs: dict[str, tuple[LiveRequest, LiveRequest]] = {}
        self._added = 0

    @property
    def names(self) -> list[str]:
        return list(self._pairs)

    def add(self, params: SamplingParams, prompt: list[int] | None = None, name: str | None = None) -> str:
        name = name or f"request-{self._added}"
        self._added += 1
        prompt = prompt or [3, 5, 5, 7]
        one, other = (LiveRequest(name, 0, list(prompt), params) for _ in range(2))
        self._pairs[name] = one, other
        return name

    def remove(self, name: str) -> None:
        del self._pairs[name]

    def sync(self, names: list[str]) -> None:
        """Both batches hold these requests."""
        self.batch.sync([self._pairs[name][0] for name in names])
        self.own_batch.sync([self._pairs[name][1] for name in names])
        assert self.batch.req_ids == self.own_batch.req_ids

    def sample(self, logits: torch.Tensor, grammar: Grammar | None = None) -> tuple[SampledTokens, SampledTokens]:
        """One step in both worlds, from the same state of the global generator; the first world's tokens count."""
        true = logits[: len(self.batch.slots)].clone()
        state = torch.get_rng_state()
        found = self.static.sample(logits, self.batch, grammar)
        torch.set_rng_state(state)
        expected = self.own.sample(true, self.own_batch, grammar)
        for batch in (self.batch, self.own_batch):
            for request, (token,) in zip(batch.slots, found.tokens, strict=True):
                request.output_token_ids.append(token)
        return found, expected


def poisoned_logits(count: int, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Random logits in the true rows, NaN in the pads."""
    logits = torch.full((rows, VOCAB), torch.nan)
    logits[:count] = torch.randn(count, VOCAB, generator=generator) * 3
    return logits


def random_grammar(req_ids: list[str], rng: random.Random) -> Grammar:
    """Bitmasks for some of the requests and for others that are not in the batch, in any order."""
    named = [name for name in req_ids if rng.random() < 0.6] + ["elsewhere-1", "elsewhere-2"]
    rng.shuffle(named)
    bits = np.random.default_rng(rng.randrange(1 << 30)).integers(-(1 << 31), 1 << 31, (len(named), 3), np.int64)
    scheduled = cast(SchedulerOutput, SimpleNamespace(scheduled_spec_decode_tokens={}))
    return Grammar(scheduled, GrammarOutput(named, bits.astype(np.int32)))


def assert_same(found: SampledTokens, expected: SampledTokens) -> None:
    assert found.tokens == expected.tokens
    assert (found.logprobs is None) == (expected.logprobs is None)
    if found.logprobs is not None and expected.logprobs is not None:
        assert_same_logprobs(found.logprobs, expected.logprobs)


def assert_same_logprobs(found: LogprobsLists, expected: LogprobsLists) -> None:
    """Bit for bit. Tokens without a score may come in any order: those that a mask leaves out, and all tokens of a row
    whose masks leave none."""
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)
    np.testing.assert_array_equal(found.sampled_token_ranks, expected.sampled_token_ranks)
    assert found.logprob_token_ids.dtype == expected.logprob_token_ids.dtype
    assert found.sampled_token_ranks.dtype == expected.sampled_token_ranks.dtype
    decided = np.isfinite(found.logprobs)
    np.testing.assert_array_equal(found.logprob_token_ids[decided], expected.logprob_token_ids[decided])
