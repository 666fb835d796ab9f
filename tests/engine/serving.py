"""An engine in this process, requests that arrive when a test says so, and the comparison of what came back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from vllm import LLM, RequestOutput, SamplingParams
from vllm.envs import disable_envs_cache
from vllm.model_executor.layers import rotary_embedding
from vllm.v1.engine import core as engine_core

from tests.engine.contracts import v2_without_driver
from tests.engine.model_classes import import_class
from vllm_gaudi_ucm.kv_cache.pair import distinct, in_blocks
from vllm_gaudi_ucm.ops.narrow_floats import E4M3
from vllm_gaudi_ucm.start.model_runner import ModelRunner

# Two float32 computations may order tokens differently where their logits are closer than this.
NEAR_TIE = 1e-3
TINY_OPTIONS: Mapping[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 8 << 20,
    "block_size": 16,
    "skip_tokenizer_init": True,
    "seed": 0,
}


@dataclass(frozen=True)
class Answer:
    """Tokens of one greedy request, with the logprob of each and its distance to the runner-up."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]
    cached_tokens: int

    def first(self, count: int) -> Answer:
        """The answer to the same request for so many tokens."""
        return Answer(self.tokens[:count], self.logprobs[:count], self.gaps[:count], self.cached_tokens)


def share_groups() -> None:
    """From now on all engines of this process share vLLM's groups of workers, which outlive each of them.

    The end of an engine takes the groups of all with it, even where it is collected late, and waits 0.1 s for that.
    """
    vars(engine_core)["cleanup_dist_env_and_memory"] = disable_envs_cache


class Engine:
    """vLLM's engine with our worker, in process.

    Args:
        model: folder of the model.
        ucm: the plugin's options.
        options: of `LLM`, over `TINY_OPTIONS`. With `async_scheduling` true the next step is scheduled while one runs:
            on a CPU vLLM's flag alone does not do that, so the plugin's option is set, too, and the queue of steps is
            checked.
    """

    def __init__(self, model: Path, ucm: Mapping[str, Any] | None = None, **options: Any) -> None:
        ahead = options.get("async_scheduling") is True
        ucm = dict(ucm or {})
        if ahead:
            ucm["scheduler"] = {"async_scheduling": True, **ucm.get("scheduler", {})}
        merged = {"model": str(model), **TINY_OPTIONS, "additional_config": {"ucm": ucm}, **options}
        import_class(model)
        # vLLM builds encoders that are left out on the meta device, and keeps their rotary tables for later models
        rotary_embedding._ROPE_DICT.clear()
        share_groups()
        with v2_without_driver():
            self.llm = LLM(**merged)
        self.preemptions = 0
        client: Any = self.llm.llm_engine.engine_core
        self._core = client.engine_core
        assert not ahead or self._core.batch_queue_size == 2, "the engine does not schedule ahead"
        self._next_id = 0
        self._count_preemptions()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends this engine alone; `shutdown` of the core would tear down what other engines of the process use."""
        self._core.model_executor.shutdown()
        self._core.scheduler.shutdown()
        parts = [weakref.ref(self._core), weakref.ref(self._core.model_executor)]
        del self.llm, self._core
        gc.collect(1)
        # a look at all objects only for what has outlived a collection, or what a test still holds
        if any(part() is not None for part in parts):
            gc.collect()

    @property
    def core(self) -> Any:
        """vLLM's engine core, with the scheduler."""
        return self._core

    @property
    def runner(self) -> ModelRunner:
        return self._core.model_executor.driver_worker.worker.model_runner

    def cached_blocks(self) -> list[torch.Tensor]:
        """Keys and values of each layer, [blocks, block size, kv heads, head size]; of layers with one memory, once."""
        parts = self.runner.parts
        return [blocks for pair in distinct(parts.kv_caches.values()) for blocks in in_blocks(pair, parts.block_size)]

    @torch.inference_mode()
    def poison(self, blocks: Sequence[int] | None = None) -> None:
        """Writes NaN over these blocks of all layers, or over all blocks."""
        chosen = slice(None) if blocks is None else torch.tensor(blocks, dtype=torch.int64)
        for cache in self.cached_blocks():
            if cache.dtype == E4M3:
                cache.view(torch.uint8)[chosen] = 0x7F
            else:
                cache[chosen] = float("nan")

    def generate(self, prompts: Sequence[Any], params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
        inputs: list[Any] = [
            prompt if isinstance(prompt, str | dict) else {"prompt_token_ids": list(prompt)} for prompt in prompts
        ]
        return self.llm.generate(inputs, params, use_tqdm=False)

    def greedy(self, prompts: Sequence[Any], max_tokens: int = 24) -> list[Answer]:
        """All prompts at once."""
        return [answer_of(output) for output in self.generate(prompts, greedy_params(max_tokens))]

    def alone(self, prompts: Iterable[Any], max_tokens: int = 24) -> list[Answer]:
        """One prompt after the other."""
        return [self.greedy([prompt], max_tokens)[0] for prompt in prompts]

    def staggered(self, prompts: Sequence[Any], arrivals: Sequence[int], max_tokens: int = 24) -> list[Answer]:
        """Prompt i arrives before step `arrivals[i]`."""
        ids = [self.new_id() for _ in prompts]
        finished: dict[str, RequestOutput] = {}
        step = 0
        while len(finished) < len(prompts):
            for index in (i for i, arrival in enumerate(arrivals) if arrival == step):
                self.add(ids[index], prompts[index], greedy_params(max_tokens))
            finished.update((output.request_id, output) for output in self.step() if output.finished)
            step += 1
        return [answer_of(finished[request_id]) for request_id in ids]

    def new_id(self) -> str:
        self._next_id += 1
        return f"test-{self._next_id}"

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)

    def step(self) -> list[RequestOutput]:
        outputs = self.llm.llm_engine.step()
        self.runner.parts.requests.check_integrity()
        return [output for output in outputs if isinstance(output, RequestOutput)]

    def check_idle(self) -> None:
        """Nothing is left of any request: not a block, not a row beyond those the next step's message will free."""
        pool = self._core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert not self._core.scheduler.has_unfinished_requests()
        table = self.runner.parts.requests
        table.check_integrity()
        assert set(table.requests) <= self._core.scheduler.finished_req_ids

    def _count_preemptions(self) -> None:
        preempt = self._core.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        self._core.scheduler._preempt_request = counted


def greedy_params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)


def answer_of(output: RequestOutput) -> Answer:
    completion = output.outputs[0]
    assert completion.logprobs is not None
    chosen, gaps = [], []
    for token, found in zip(completion.token_ids, completion.logprobs, strict=True):
        assert found is not None
        ranked = sorted((entry.logprob for entry in found.values()), reverse=True)
        chosen.append(found[token].logprob)
        gaps.append(ranked[0] - ranked[1])
    return Answer(list(completion.token_ids), chosen, gaps, output.num_cached_tokens or 0)


def assert_same(found: Sequence[Answer], expected: Sequence[Answer], near_ties: int = 1) -> None:
    """Equal tokens and logprobs. At most `near_ties` requests may part at a near tie; they are compared up to there."""
    parted = 0
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        differing = (i for i, pair in enumerate(zip(one.tokens, other.tokens, strict=True)) if pair[0] != pair[1])
        end = next(differing, len(other.tokens))
        if end < len(other.tokens):
            assert other.gaps[end] < NEAR_TIE, f"request {index} parts at token {end}: {one.tokens} {other.tokens}"
            parted += 1
        assert one.logprobs[:end] == pytest.approx(other.logprobs[:end], abs=NEAR_TIE)
    assert parted <= near_ties
