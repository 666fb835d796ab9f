"""One engine of `benchmarks.sparse_engine`, spoken to in JSON lines: decodes requests of a given context, step by step.

A context is not computed: its blocks are given to the prefix cache, and keys, values and summaries are random numbers.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import IO, Any

WARM, PROFILED = 4, 4


def main() -> None:
    """Starts the engine, prints `ready`, then answers one order per line until stdin closes."""
    answers = claim_stdout()
    import vllm

    # registers its loader of weights
    import benchmarks.known_drafts  # noqa: F401

    served = Served(vllm.LLM(**json.loads(sys.argv[1])))
    answer(answers, {"ready": True, "device": served.device})
    for line in sys.stdin:
        answer(answers, served.measure(**json.loads(line)))


class Served:
    """An engine in this process, with access to its parts."""

    def __init__(self, llm: Any) -> None:
        import torch

        self._torch = torch
        self._engine = llm.llm_engine
        core = self._engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._parts = core.model_executor.driver_worker.worker.model_runner.parts
        self._vocabulary = llm.model_config.get_vocab_size()
        self._load_format = llm.llm_engine.vllm_config.load_config.load_format
        self._numbers = torch.Generator().manual_seed(0)
        caches = [tensor for pair in self._parts.kv_caches.values() for tensor in pair]
        # the same in every engine, so that tokens can be compared
        torch.manual_seed(0)
        with torch.inference_mode():
            for tensor in caches:
                tensor.normal_()
        self._is_cuda, self._cached_as = caches[0].is_cuda, caches[0].dtype
        self.device = torch.cuda.get_device_name() if self._is_cuda else "cpu"

    def measure(
        self,
        requests: int,
        context: int,
        steps: int,
        kernels: int,
        drafts: int = 0,
        acceptance: float = 1.0,
        source: str = "host",
    ) -> dict[str, Any]:
        """Measures steps of `requests` with `context` tokens each: medians in milliseconds, and the tokens that they
        yield.

        kernels: how many of the device's kernels to name, those that take longest. drafts: of each request in a step;
        each is right with the probability `acceptance`, and made at the `source` (known_drafts).
        """
        from benchmarks.known_drafts import propose_known_drafts

        if drafts:
            propose_known_drafts(self._parts, self._vocabulary, acceptance, source)
        prompts = self._begin(requests, context, (WARM + steps + PROFILED + 2) * (1 + drafts))
        self._outputs: dict[str, list[int]] = {}
        for _ in range(WARM):
            self._step()
        dense, tokens = self._dense_steps(), self._num_outputs()
        wall, spent = [], time.process_time()
        for _ in range(steps):
            begin = time.perf_counter()
            self._step()
            wall.append((time.perf_counter() - begin) * 1e3)
        found = {
            "wall_ms": statistics.median(wall),
            "mean_ms": statistics.mean(wall),
            "fastest_ms": min(wall),
            "cpu_ms": (time.process_time() - spent) * 1e3 / steps,
            "tokens": (self._num_outputs() - tokens) / steps,
            "dense_steps": self._dense_steps() - dense,
            "steps": steps,
            "output_tokens": list(self._outputs.values()),
        }
        if self._is_cuda:
            found |= self._profile(kernels)
        found["wrong"] = self._wrong(prompts)
        self._engine.abort_request(list(prompts))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return found

    def _step(self) -> None:
        """Runs a step. With async scheduling, a step that was only queued has no outputs yet."""
        outputs = self._engine.step()
        while not outputs and self._engine.has_unfinished_requests():
            outputs = self._engine.step()
        for output in outputs:
            self._outputs[output.request_id] = list(output.outputs[0].token_ids)

    def _num_outputs(self) -> int:
        return sum(map(len, self._outputs.values()))

    def _wrong(self, prompts: dict[str, list[int]]) -> int:
        """Requests of a model whose tokens are known that have others."""
        from benchmarks.known_drafts import LOAD_FORMAT, first_wrong

        if self._load_format != LOAD_FORMAT:
            return 0
        pairs = ((prompts[name], tokens) for name, tokens in self._outputs.items())
        return sum(first_wrong(prompt, tokens, self._vocabulary) is not None for prompt, tokens in pairs)

    def _begin(self, requests: int, context: int, new_tokens: int) -> dict[str, list[int]]:
        """Adds requests whose prompts are in the prefix cache, except for their last token; returns these by name."""
        from vllm import SamplingParams

        # blocks of an earlier order must not be found: they have other keys than their tokens say
        self._scheduler.kv_cache_manager.reset_prefix_cache()
        size = (requests, context + 1)
        prompts = self._torch.randint(3, self._vocabulary, size, generator=self._numbers).tolist()
        ids = [f"{context}-{index}-{time.monotonic_ns()}" for index in range(requests)]
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        for request_id, prompt in zip(ids, prompts, strict=True):
            self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        manager, waiting = self._scheduler.kv_cache_manager, list(self._scheduler.waiting)
        blocks: list[int] = []
        for request in waiting:
            if manager.allocate_slots(request, context) is None:
                raise RuntimeError(f"the KV cache has no room for {requests} contexts of {context} tokens")
            blocks += manager.get_block_ids(request.request_id)[0]
        for request in waiting:
            manager.free(request)
        self._summarise(blocks)
        return dict(zip(ids, prompts, strict=True))

    def _summarise(self, blocks: list[int]) -> None:
        import numpy as np

        from vllm_gaudi_ucm.ops.narrow_floats import E4M3, narrow

        sparse = self._parts.sparse
        if sparse is None:
            return
        self._torch.manual_seed(len(blocks))
        with self._torch.inference_mode():
            for summaries in sparse.selector.summaries:
                if summaries.dtype == self._torch.uint8:
                    summaries.random_(0, 200)
                else:
                    # torch cannot draw 8-bit floats: they are the rounded numbers of other engines
                    drawn = self._torch.empty_like(summaries, dtype=self._cached_as).normal_()
                    summaries.copy_(narrow(drawn) if summaries.dtype == E4M3 else drawn)
        ids = np.array(blocks, np.int64)
        sparse.loaded(ids, ids)

    def _dense_steps(self) -> int:
        method = getattr(getattr(self._scheduler, "sparse", None), "selecting_method", None)
        return getattr(method, "dense_steps", 0)

    def _profile(self, kernels: int) -> dict[str, Any]:
        """Time of a step in which the device computes anything, and the kernels that take longest."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(PROFILED):
                self._step()
            self._torch.cuda.synchronize()
        events = [event for event in found.events() if event.device_type.name == "CUDA"]
        busy, end = 0.0, 0.0
        for begin, stop in sorted((event.time_range.start, event.time_range.end) for event in events):
            busy += max(0.0, stop - max(begin, end))
            end = max(end, stop)
        spent: dict[str, list[float]] = {}
        for event in events:
            spent.setdefault(event.name, []).append(event.time_range.end - event.time_range.start)
        top = sorted(spent.items(), key=lambda item: -sum(item[1]))[:kernels]
        return {
            "device_ms": busy / PROFILED / 1e3,
            "launches": len(events) / PROFILED,
            "kernels": [[name[:70], len(times) / PROFILED, sum(times) / PROFILED / 1e3] for name, times in top],
        }


def claim_stdout() -> IO[str]:
    """Keeps the real stdout for answers; the engine's output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer(answers: IO[str], value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
