"""Whole decode steps of a model whose rows choose tokens (DSA), and of the same model with its indexer ignored.

    python -m benchmarks.chosen_tokens_steps --device cuda --contexts 32768 131072 --requests 1 8

Each side is an engine in a process of its own, with random weights, captured graphs and tuned buckets. Contexts are not
computed, which would take minutes: blocks of the cache hold random numbers, and the scheduler is made to believe that a
store has loaded all tokens of a prompt but the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_shapes import config_of
from benchmarks.engine_steps_side import BLOCK, SETTLED, SPARE, Side, device_name
from benchmarks.machine import describe_machine
from benchmarks.positive import positive
from benchmarks.tensor_parallel import DEVICE_KIND

CHOSEN, DENSE = "chosen", "dense"
PROMPT = 2048  # tokens of the largest step


def loaded_contexts() -> Any:
    """Returns what takes the place of a connector's scheduler side: each prompt is loaded but for its last token."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

    def nothing(*args: Any, **others: Any) -> None:
        return None

    class LoadedContexts(KVConnectorBase_V1):
        start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = nothing
        update_state_after_alloc = build_connector_meta = on_new_request = nothing
        take_events = get_kv_connector_stats = update_connector_output = nothing

        def __init__(self) -> None:
            # the base class asks for a configuration
            self._connector_metadata = None

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
            return request.num_prompt_tokens - 1 - num_computed_tokens, False

        def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
            return False, None

    return LoadedContexts()


def longest(options: dict[str, Any]) -> int:
    """Returns the tokens of the longest request, in whole blocks."""
    return -(-(max(options["contexts"]) + new_tokens(options)) // BLOCK) * BLOCK


def new_tokens(options: dict[str, Any]) -> int:
    return int(SETTLED + options["repeats"] + SPARE + 2)


def write_buckets(path: Path, options: dict[str, Any], config: dict[str, Any]) -> None:
    """Writes a bucket of its own for each number of requests and context, and the largest."""
    from vllm_gaudi_ucm.graphs.cost.specs import ModelSpec, device_spec
    from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
    from vllm_gaudi_ucm.graphs.lookup import BucketSet
    from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
    from vllm_gaudi_ucm.graphs.shapes.limits import Limits
    from vllm_gaudi_ucm.graphs.strategies.file import write_bucket_file

    most, blocks = max(options["requests"]), longest(options) // BLOCK
    limits = Limits(PROMPT, most, longest(options), BLOCK, most * blocks + 1, False, blocks)
    shapes = [limits.maximum.forward]
    for context in options["contexts"]:
        each = -(-(context + new_tokens(options)) // BLOCK)
        shapes += [
            ForwardShape.from_sizes(False, count, 0, min(count * each + 1, limits.max_unique_blocks))
            for count in options["requests"]
        ]
    cost = CostModel(device_spec("h200"), ModelSpec.from_hf_config(config), BLOCK)
    buckets = BucketSet(shapes, sorted({1, *options["requests"]}), limits, cost)
    write_bucket_file(path, buckets, {"benchmark": "chosen_tokens_steps"})


def serve(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Measures the side that `options` names, in this process; returns its steps and facts."""
    import torch
    from vllm import LLM

    config = dict(config_of(options["shape"]))
    if options["side"] == DENSE:
        # no context is longer than what a row may choose
        config["index_topk"] = longest(options)
    (folder / "config.json").write_text(json.dumps(config))
    write_buckets(folder / "buckets.yaml", options, config)
    on_cpu, log = options["device"] == "cpu", folder / "steps.jsonl"
    graphs = {"mode": "eager" if on_cpu else "capture", "warm_up": "full", "buckets": str(folder / "buckets.yaml")}
    ucm = {"phase_log": str(log), "graphs": graphs, "scheduler": {"async_scheduling": not on_cpu}}
    engine = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32" if on_cpu else "bfloat16",
        block_size=BLOCK,
        max_model_len=longest(options),
        max_num_seqs=max(options["requests"]),
        max_num_batched_tokens=PROMPT,
        enable_prefix_caching=False,
        seed=0,
        additional_config={"ucm": ucm},
        **({"kv_cache_memory_bytes": 1 << 28} if on_cpu else {}),
    ).llm_engine
    core = engine.engine_core.engine_core
    caches = core.model_executor.driver_worker.worker.model_runner.parts.kv_caches
    torch.manual_seed(0)
    with torch.inference_mode():
        for cache in caches.values():
            for tensor in cache:
                tensor.normal_()
    core.scheduler.connector = loaded_contexts()
    steps = []
    for context in options["contexts"]:
        asked = {
            "config": config,
            "context": context,
            "prompt": PROMPT,
            "requests": options["requests"],
            "repeats": options["repeats"],
            "ahead": not on_cpu,
            "adapters": 0,
            "kernels": options["kernels"],
        }
        side = Side(asked, engine, log)
        for requests in options["requests"]:
            found = side.decode(requests)
            found["kernels"] = side.kernels.get(f"decode of {requests}", [])
            steps.append(found)
    core.scheduler.connector = None
    engine.engine_core.shutdown()
    return {"device": device_name(), "caches": [type(one).__name__ for one in caches.values()],
            "steps": side.worker_times(steps)}  # fmt: skip


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the results of each side, from a process of its own."""
    found = {}
    for side in options["sides"]:
        with tempfile.TemporaryDirectory() as folder:
            env = {
                **os.environ,
                DEVICE_KIND: options["device"],
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
            }
            command = [sys.executable, "-m", "benchmarks.chosen_tokens_steps", "--serve", folder]
            command.append(json.dumps({**options, "side": side}))
            subprocess.run(command, check=True, env=env, stdout=sys.stderr)
            found[side] = json.loads((Path(folder) / "result.json").read_text())
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """Returns a line for each kind of step, with the ratio of the sides."""
    sides = {side: {(s["requests"], s["tokens"]): s for s in one["steps"]} for side, one in found.items()}
    result = []
    for kind in next(iter(sides.values())):
        parts = []
        for side, steps in sides.items():
            device = steps[kind]["device_ms"]
            shown = "" if device is None else f" (device {device:.3f})"
            parts.append(f"{side} {steps[kind]['wall_ms']:.3f} ms{shown}")
        if len(sides) == 2:
            parts.append(f"dense / chosen {sides[DENSE][kind]['wall_ms'] / sides[CHOSEN][kind]['wall_ms']:.2f}")
        result.append(f"decode of {kind[0]} at {kind[1]}: " + ", ".join(parts))
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["--serve"]:
        folder = Path(given[1])
        (folder / "result.json").write_text(json.dumps(serve(json.loads(given[2]), folder)))
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chosen_tokens_steps", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", default="v3.2")
    parser.add_argument("--contexts", type=positive, nargs="+", default=[32768, 131072])
    parser.add_argument("--requests", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=positive, default=20)
    parser.add_argument("--sides", choices=(CHOSEN, DENSE), nargs="+", default=[CHOSEN, DENSE])
    parser.add_argument("--kernels", action="store_true", help="also list the kernels of each step in the JSON file")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = vars(parser.parse_args(given))
    path = options.pop("json")
    found = measure(options)
    print(f"{next(iter(found.values()))['device']}; {describe_machine()}; {options['shape']}")
    print("\n".join(lines(found)))
    if path is not None:
        path.write_text(json.dumps({"machine": describe_machine(), "options": options, "sides": found}, indent=2))


if __name__ == "__main__":
    main()
