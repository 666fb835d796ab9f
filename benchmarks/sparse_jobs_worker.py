"""One engine of `benchmarks.sparse_jobs`, spoken to in JSON lines: answers whole jobs, prompts and decodes."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.sparse_engine_worker import answer, claim_stdout


def main() -> None:
    """Starts the engine, prints `ready`, then answers one order per line until stdin closes."""
    answers = claim_stdout()
    import vllm

    llm = vllm.LLM(**json.loads(sys.argv[1]))
    answer(answers, {"ready": True})
    for line in sys.stdin:
        answer(answers, run_job(llm, **json.loads(line)))


def run_job(llm: Any, requests: int, context: int, new_tokens: int, seed: int) -> dict[str, Any]:
    """Answers `requests` prompts of `context` tokens each, of which no block is cached. Returns seconds: of the whole
    job, and until the last request has its first token.
    """
    import torch
    import vllm

    engine = llm.llm_engine
    llm.reset_prefix_cache()
    vocabulary, numbers = llm.model_config.get_vocab_size(), torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, vocabulary, (requests, context), generator=numbers).tolist()
    params = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    begin, first = time.perf_counter(), dict[str, float]()
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{seed}-{index}", {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            first.setdefault(output.request_id, time.perf_counter() - begin)
    return {"seconds": time.perf_counter() - begin, "first_token_seconds": max(first.values())}


if __name__ == "__main__":
    main()
