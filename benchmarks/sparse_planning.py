"""Time on the host to plan a sparse step: the scheduler's decisions, the worker's state, and the plan itself.

`python -m benchmarks.sparse_planning`; one thread, no device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from vllm_gaudi_ucm.batch.batch_plan import BatchInput, plan_batch
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.selection.selection_state import SelectionState
from vllm_gaudi_ucm.sparse.selection.sparse_worker import ServerSizes, selection_limits

BLOCK_SIZE = 128
PARTS = ("scheduler", "state", "plan", "dense_plan")
GOAL_MS = 0.3
METHODS = {"GSA": {}, "KVStar": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=positive, nargs="+", default=[8, 64])
    parser.add_argument("--context", type=positive, default=32768)
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    print(f"{describe_machine()}; contexts of {options.context} tokens, {options.ratio:.0%}; median and fastest ms")
    print(f"{'':<8}{'requests':>9}" + "".join(f"{part:>18}" for part in PARTS) + f"{'state + plan':>14}")
    rows = []
    for method in METHODS:
        for requests in options.requests:
            found = measure(method, requests, options.context, options.ratio, options.steps)
            rows.append({"method": method, "requests": requests, **found})
            shown = "".join(f"{found[part][0]:>9.3f}{found[part][1]:>9.3f}" for part in PARTS)
            print(f"{method:<8}{requests:>9}{shown}{found['state'][0] + found['plan'][0]:>14.3f}")
    print(f"goal: state + plan of 64 requests in {GOAL_MS} ms")
    if options.json:
        options.json.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=2) + "\n")


def measure(name: str, requests: int, context: int, ratio: float, steps: int) -> dict[str, tuple[float, float]]:
    """(median, fastest) milliseconds of each part, over steps of the same requests, one token each."""
    method: Any = UcmSparseFactory.create_sparse_method(name, UcmSparseRole.SCHEDULER, {"sparse_ratio": ratio})
    method.register_block_size(BLOCK_SIZE)
    ids = [f"request-{index}" for index in range(requests)]
    rng = np.random.default_rng(0)
    computed = (context - rng.integers(0, BLOCK_SIZE, requests)).astype(np.int32)
    width = (context + steps) // BLOCK_SIZE + 2
    tables = 1 + rng.permutation(requests * width).reshape(requests, width).astype(np.int32)
    sizes = ServerSizes(context + steps + BLOCK_SIZE, requests, 1, BLOCK_SIZE, requests * width + 1, static=True)
    state = SelectionState(sizes.num_blocks, selection_limits(method.selecting_method.block_options, sizes), True)
    full = np.arange(width) < (computed // BLOCK_SIZE)[:, None]
    state.summaries.brought(tables[full])
    for request_id in ids:
        method.request_begin(request_id, ())
    live = {request_id: SimpleNamespace(num_tokens=0) for request_id in ids}
    new, no_drafts = np.ones(requests, np.int32), np.zeros(requests, np.int64)
    spent: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(steps):
        for request_id, tokens in zip(ids, computed.tolist(), strict=True):
            live[request_id].num_tokens = tokens + 1
        output: Any = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(ids, 1),
            scheduled_spec_decode_tokens={},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=ids, num_computed_tokens=computed.tolist()),
        )
        reach = int(computed.max()) // BLOCK_SIZE + 1
        batch = BatchInput(computed.copy(), new, computed + 1, (tables[:, :reach].copy(),))
        state.begin_step()
        times = [time.perf_counter()]
        meta = method.build_sparse_meta(output, live)
        times.append(time.perf_counter())
        selection = state.step(ids, batch, no_drafts, meta.requests)
        times.append(time.perf_counter())
        plan = plan_batch(batch, BLOCK_SIZE, selection=selection.input)
        times.append(time.perf_counter())
        plan_batch(batch, BLOCK_SIZE)
        times.append(time.perf_counter())
        assert plan.selection is not None
        assert len(plan.selection.counts) == requests
        for part, begin, end in zip(PARTS, times, times[1:], strict=False):
            spent[part].append((end - begin) * 1e3)
        computed += 1
    return {part: (statistics.median(values), min(values)) for part, values in spent.items()}


if __name__ == "__main__":
    main()
