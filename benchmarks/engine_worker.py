"""One engine under measurement, controlled by JSON lines over stdin and stdout.

Runs in our environment and in the peer's: it may import nothing but vLLM and the standard library. The first argument
is a JSON object with the arguments of `vllm.LLM`; the first line out says `ready` after a first token was generated, or
a first prompt embedded if `runner` is `pooling`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import IO, Any


def main() -> None:
    """Start the engine, say `ready`, then answer one line per workload until stdin closes."""
    answers = _claim_stdout()
    import torch
    import vllm

    arguments = json.loads(sys.argv[1])
    llm, embeds = vllm.LLM(**arguments), arguments.get("runner") == "pooling"
    if embeds:
        _embed(llm, [[[101, 102]]])
    else:
        _generate(vllm, llm, [[1]], 1)
    facts = {"vllm": vllm.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    _answer(answers, {"ready": True, **facts})
    for line in sys.stdin:
        order = json.loads(line)
        if embeds:
            _answer(answers, _embed(llm, order["batches"]))
            continue
        if order.get("is_decode"):
            # leaves all full blocks of the prompts in the prefix cache
            _generate(vllm, llm, order["prompts"], 1)
        _answer(answers, _generate(vllm, llm, order["prompts"], order["output_tokens"]))


def _generate(vllm: Any, llm: Any, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
    """Greedy outputs of exactly `output_tokens` tokens, and the seconds from the first submission to the last token."""
    params = vllm.SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.generate(requests, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "outputs": [list(output.outputs[0].token_ids) for output in outputs]}


def _embed(llm: Any, batches: list[list[list[int]]]) -> dict[str, Any]:
    """Returns the embeddings of the last batch, and the seconds of each from its submission to its last embedding."""
    seconds, outputs = [], []
    for prompts in batches:
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        outputs = llm.embed(requests, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "outputs": [list(output.outputs.embedding) for output in outputs]}


def _claim_stdout() -> IO[str]:
    """Keeps the real stdout for answers; all output of the engine and its processes goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: IO[str], value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
