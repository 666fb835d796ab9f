"""Measures the cost of a preempted request: blocks swapped to host memory and back, or its tokens computed again.

`python -m benchmarks.preemption [--model FOLDER] [--plot FILE]`. First modelled: the smallest block size from which
swapping is faster, by the length of the context; the copy of a block takes its bytes over the link and a fixed time.
With `--model` then measured here: an engine whose KV cache is too small for its requests, with every mode.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table

from benchmarks.positive import positive
from vllm_gaudi_ucm.graphs.cost.specs import LLAMA_8B, device_spec
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm_tools.output import report_console

if TYPE_CHECKING:
    from vllm import LLM

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
STEP_TOKENS = 2048
PER_BLOCK = (30e-6, 100e-6, 300e-6, 1e-3)
"""Seconds to begin the copy of a block: no card was measured."""
COLOURS = ("#0072B2", "#009E73", "#E69F00", "#D55E00")
MODES = ("recompute", "swap", "auto")
ROUNDS = 2


def recompute_seconds(tokens: int, device: str, block_size: int = 128) -> float:
    """A prompt of this many tokens, alone, in steps of STEP_TOKENS."""
    cost = CostModel(device_spec(device), LLAMA_8B, block_size)
    shapes = [
        ForwardShape.from_sizes(True, min(STEP_TOKENS, tokens - begin), begin // block_size, 0)
        for begin in range(0, tokens, STEP_TOKENS)
    ]
    return sum(cost.forward(shape) for shape in shapes)


def swap_seconds(tokens: int, block_size: int, link: float, per_block: float) -> float:
    """Returns the seconds there and back. link: bytes per second. per_block: seconds for each copy of a block in
    addition to its bytes.
    """
    blocks = -(-tokens // block_size)
    return 2 * blocks * (block_size * LLAMA_8B.kv_bytes_per_token / link + per_block)


def crossing(tokens: int, device: str, link: float, per_block: float) -> int | None:
    """The smallest block size at which swapping is faster; None: at none."""
    again = recompute_seconds(tokens, device)
    return next((size for size in BLOCK_SIZES if swap_seconds(tokens, size, link, per_block) < again), None)


class Run(NamedTuple):
    """An engine under pressure. seconds: of all requests."""

    mode: str
    preemptions: int
    computed_again: int
    swapped: int
    seconds: float


def measure(model: Path, mode: str, requests: int, length: int) -> Run:
    """Requests of `length` prompt tokens and as many generated ones; the KV cache holds a third of them."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    rng, block = random.Random(0), 16
    blocks = max(2 * length // block + 2, requests * 2 * length // block // 3)
    llm = LLM(
        model=str(model),
        dtype="float32",
        block_size=block,
        max_model_len=2 * length + block,
        max_num_seqs=requests,
        num_gpu_blocks_override=blocks,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        additional_config={"ucm": {"preemption": {"mode": mode}}},
    )
    counted = _count(llm)
    prompts: list[Any] = [
        {"prompt_token_ids": [rng.randrange(3, 1000) for _ in range(length)]} for _ in range(requests)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    llm.generate(prompts[:1], SamplingParams(max_tokens=4), use_tqdm=False)
    counted.clear()
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    core: Any = llm.llm_engine.engine_core
    scheduler = core.engine_core.scheduler
    swapped = 0 if mode == "recompute" else scheduler.block_policies.totals.swapped_out
    # each answer but its last token, and each prompt, is computed once
    again = sum(counted) - requests * (2 * length - 1)
    preemptions = counted.preemptions
    core.engine_core.model_executor.shutdown()
    scheduler.shutdown()
    return Run(mode, preemptions, again, swapped, seconds)


class _Counted(list[int]):
    """Tokens of each step."""

    preemptions = 0


def _count(llm: LLM) -> _Counted:
    core: Any = llm.llm_engine.engine_core
    scheduler, counted = core.engine_core.scheduler, _Counted()
    schedule, preempt = scheduler.schedule, scheduler._preempt_request

    def counting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        counted.append(output.total_num_scheduled_tokens)
        return output

    def preempting(*args: Any, **kwargs: Any) -> None:
        counted.preemptions += 1
        preempt(*args, **kwargs)

    scheduler.schedule, scheduler._preempt_request = counting, preempting
    return counted


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="gaudi3", help="whose modelled prompts are compared (default: %(default)s)")
    parser.add_argument("--link", type=float, default=50.0, help="GB/s to host memory and back (default: %(default)g)")
    parser.add_argument("--plot", type=Path, help="draws where swapping begins to pay to this file (PNG, SVG, PDF)")
    parser.add_argument("--model", type=Path, help="a model to measure with on this machine")
    parser.add_argument("--requests", type=positive, default=12, help="with --model (default: %(default)s)")
    parser.add_argument(
        "--length", type=positive, default=256, help="tokens of prompt and answer (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    console = report_console(least_width=110)
    console.print(_modelled(args.device, args.link * 1e9))
    if args.plot is not None:
        plot(args.plot, args.device, args.link * 1e9)
    if args.model is not None:
        runs = [[measure(args.model, mode, args.requests, args.length) for mode in MODES] for _ in range(ROUNDS)]
        # the faster of each: the machine may be busy with other things
        console.print(_measured([min(same, key=lambda one: one.seconds) for same in zip(*runs, strict=True)]))
    return 0


def _modelled(device: str, link: float) -> Table:
    table = Table("tokens", "computed again", "swapped, blocks of 128", "swap is faster from blocks of")
    for tokens in LENGTHS:
        again = recompute_seconds(tokens, device)
        swap = swap_seconds(tokens, 128, link, PER_BLOCK[1])
        sizes = [crossing(tokens, device, link, per_block) for per_block in PER_BLOCK]
        found = ", ".join(
            f"{size or 'none'} ({1e6 * per_block:.0f} us)" for size, per_block in zip(sizes, PER_BLOCK, strict=True)
        )
        table.add_row(f"{tokens:,}", f"{1e3 * again:,.1f} ms", f"{1e3 * swap:,.1f} ms", found)
    return table


def _measured(runs: Sequence[Run]) -> Table:
    table = Table("mode", "preemptions", "tokens again", "blocks swapped", "seconds", "")
    for one in runs:
        ratio = f"{runs[0].seconds / one.seconds:.2f}x"
        figures = (f"{count:,}" for count in (one.preemptions, one.computed_again, one.swapped))
        table.add_row(one.mode, *figures, f"{one.seconds:.1f}", ratio)
    return table


def plot(path: Path, device: str, link: float) -> None:
    """Above a line swapping is faster."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=110, layout="constrained")
    axes = figure.subplots()
    lengths = [round(256 * 2 ** (step / 4)) for step in range(29)]
    for per_block, colour in zip(PER_BLOCK, COLOURS, strict=True):
        points = [(tokens, _exact_crossing(tokens, device, link, per_block)) for tokens in lengths]
        axes.plot(*zip(*points, strict=True), color=colour, label=f"{1e6 * per_block:,.0f} us for each block")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens of the preempted request", fontsize=8)
    axes.set_ylabel("block size", fontsize=8)
    axes.set_title("Swapping is faster above its line, computing again below", fontsize=9, loc="left")
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def _exact_crossing(tokens: int, device: str, link: float, per_block: float) -> float:
    """The block size at which both take the same time, as a real number; `nan` if the bytes alone take longer."""
    left = recompute_seconds(tokens, device) / 2 - tokens * LLAMA_8B.kv_bytes_per_token / link
    return tokens * per_block / left if left > 0 else float("nan")


if __name__ == "__main__":
    raise SystemExit(main())
