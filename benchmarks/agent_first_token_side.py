"""One engine of `benchmarks.agent_first_token`, spoken to in JSON lines: answers the prompts of a trace."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sparse_engine_worker import answer, claim_stdout
from vllm_gaudi_ucm_tools.store.traffic_log import TrafficLog, read_traffic

SETTLE_SECONDS = 1.0


def main() -> None:
    """Starts the engine, prints `ready`, then answers one order per line until stdin closes."""
    answers = claim_stdout()
    import vllm

    engine = vllm.LLM(**json.loads(sys.argv[1]))
    answer(answers, {"ready": True})
    for line in sys.stdin:
        found = replay(engine, **json.loads(line))
        # an answer stops this process: the saves of the last prompt must not meet their deadline while it is stopped
        time.sleep(SETTLE_SECONDS)
        answer(answers, {"requests": found})


def replay(
    engine: Any, trace: str, block_tokens: int, at_once: int, most_answer: int, seed: int, most_requests: int | None
) -> list[dict[str, float]]:
    """Replays the first requests of a trace on an empty prefix cache. Returns what `first_tokens` does."""
    log = read_traffic(Path(trace), block_tokens)
    engine.reset_prefix_cache()
    first = TrafficLog(log.kind, log.unit_tokens, log.requests[:most_requests])
    return first_tokens(engine, first, at_once, most_answer, seed)


def prompts_of(log: TrafficLog, vocabulary: int, seed: int) -> Iterator[list[int]]:
    """Yields the tokens of each prompt: each block id has random ones, others for another seed.

    The last block of a prompt may be short. What follows the same blocks later begins with its tokens, because a turn
    of an agent goes on where the last one ended; ids do not say so.
    """
    tokens: dict[int, np.ndarray] = {}
    short: dict[int, np.ndarray] = {}  # by the id of the block before it
    for request in log.requests:
        numbers = [int(number) for number in request.prompt]
        for before, number in itertools.pairwise([-1, *numbers]):
            if number not in tokens:
                generator = np.random.default_rng([seed, number])
                tokens[number] = generator.integers(3, vocabulary, log.unit_tokens)
                begin = short.get(before, tokens[number][:0])
                tokens[number][: len(begin)] = begin
        prompt = np.concatenate([tokens[number] for number in numbers])[: request.prompt_tokens]
        if rest := len(prompt) % log.unit_tokens:
            short[[-1, *numbers][-2]] = prompt[-rest:]
        yield prompt.tolist()


def first_tokens(engine: Any, log: TrafficLog, at_once: int, most_answer: int, seed: int) -> list[dict[str, float]]:
    """Returns milliseconds to the first token, and the cached share of the prompt, of each request in order."""
    from vllm import SamplingParams

    # made before, so that no other request waits for it
    waiting = iter(enumerate(list(prompts_of(log, engine.model_config.get_vocab_size(), seed))))
    begun: dict[str, float] = {}
    found: dict[str, dict[str, float]] = {}
    core, is_over = engine.llm_engine, False
    while not is_over or core.has_unfinished_requests():
        while not is_over and core.get_num_unfinished_requests() < at_once:
            number, prompt = next(waiting, (-1, []))
            is_over = number < 0
            if not is_over:
                length = max(1, min(most_answer, log.requests[number].answer_tokens))
                params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
                name = f"{seed}-{at_once}-{number}"
                begun[name] = time.perf_counter()
                core.add_request(name, {"prompt_token_ids": prompt}, params)
        for output in core.step():
            if output.request_id not in found and output.outputs and output.outputs[0].token_ids:
                spent = time.perf_counter() - begun[output.request_id]
                cached = (output.num_cached_tokens or 0) / len(output.prompt_token_ids)
                found[output.request_id] = {"ms": 1e3 * spent, "cached": cached}
    return [found[name] for name in begun]


if __name__ == "__main__":
    main()
