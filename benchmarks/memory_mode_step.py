"""A decode step in memory mode against the same step with every block on the device: the same requests, method, engine.

Blocks leave and come back during steps, and no step waits for one. The engines run in turn, step by step, in one
process, after their prompts. In the first half, most blocks that leave the device are copied off it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from benchmarks import memory_mode
from vllm_gaudi_ucm_tools.output import task_progress

if TYPE_CHECKING:
    from vllm import LLM
COLUMNS = {
    "ms": "ms, median",
    "against_resident": "against resident",
    "second_half": "second half",
    "all_steps": "all steps",
    "away": "blocks away",
    "loaded": "came back",
    "missed": "missed",
}


def main() -> None:
    parser = memory_mode.parser()
    parser.description = __doc__
    parser.set_defaults(requests=8, context=1280)
    options = parser.parse_args()
    title = f"{options.requests} requests of {options.context} tokens, {options.new_tokens} steps"
    memory_mode.report(title, COLUMNS, measure(options), options.json)


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Figures by contender, the first with everything resident.

    away: share of a request's blocks, on average. missed: share of the attention that was estimated to fall on these.
    """
    prompts, _ = memory_mode.texts(options)
    contenders = memory_mode.contenders(options)
    del contenders[memory_mode.DENSE]
    times: dict[str, list[float]] = {name: [] for name in contenders}
    away: dict[str, list[float]] = {name: [] for name in contenders}
    with ExitStack() as stack, task_progress("steps") as progress:
        engines: dict[str, LLM] = {}
        for name, ucm in contenders.items():
            engines[name] = stack.enter_context(memory_mode.engine(options.model, ucm, options))
            _compute_prompts(engines[name], prompts[: options.requests], options.new_tokens)
        while all(llm.llm_engine.has_unfinished_requests() for llm in engines.values()):
            # no engine always follows the same one
            for name in random.sample(list(engines), len(engines)):
                begin = time.perf_counter()
                engines[name].llm_engine.step()
                times[name].append(time.perf_counter() - begin)
                away[name].append(_totals(engines[name]).away)
            progress(len(times[name]) / options.new_tokens)
        blocks = options.requests * (options.context + options.new_tokens) / options.block_size
        resident = times[next(iter(times))]
        half = len(resident) // 2
        return {
            name: {
                "ms": statistics.median(spent) * 1e3,
                # of the same turn: other work on the machine slows both
                "against_resident": statistics.median(a / b for a, b in zip(spent, resident, strict=True)),
                "second_half": sum(spent[half:]) / sum(resident[half:]),
                "all_steps": sum(spent) / sum(resident),
                "away": statistics.mean(away[name]) / blocks,
                "loaded": float(_totals(engines[name]).loaded),
                "missed": memory_mode.missed(engines[name]),
            }
            for name, spent in times.items()
        }


def _compute_prompts(llm: LLM, prompts: list[list[int]], new_tokens: int) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    while scheduler.waiting or any(request.num_output_tokens == 0 for request in scheduler.running):
        llm.llm_engine.step()


def _totals(llm: LLM) -> Any:
    from vllm_gaudi_ucm.protocol.offload import OffloadTotals

    offload = getattr(llm.llm_engine.engine_core.engine_core.scheduler, "offload", None)
    return OffloadTotals() if offload is None else offload.totals


if __name__ == "__main__":
    main()
