"""Time to the first token of a stored prompt under memory mode: with all of its blocks, and with its initial ones.

python -m benchmarks.store_partial_first_token [--model FOLDER] [--tokens 1536] [--tail 1] [--static] [--turns 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

BLOCK_SIZE = 32
MEMORY_MODE = {
    "ucm_sparse_method": "GSA",
    "ucm_sparse_config": {"GSA": {"sparse_steps": "always", "min_tokens": 512}},
    "memory_mode": {"enabled": True},
}
STATIC = {"graphs": {"mode": "eager", "warm_up": "full", "max_graphs": 24}}
TEXT = Path(__file__).parents[1] / "docs"


def main() -> None:
    """Prints a row for each way to load, of interleaved turns; the first turn of each is not counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m-instruct"))
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--tail", type=int, default=1, help=f"tokens behind the stored blocks, 1 to {BLOCK_SIZE}")
    parser.add_argument("--static", action="store_true", help="static shapes, operator by operator")
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    if not 1 <= given.tail <= BLOCK_SIZE:
        parser.error(f"--tail is {given.tail}, expected 1 to {BLOCK_SIZE}")
    with tempfile.TemporaryDirectory() as folder:
        engine = _start(given.model, given.tokens, Path(folder), given.static)
        worker, scheduler = _sides(engine)
        stored = given.tokens // BLOCK_SIZE
        # real text, because random tokens cannot be predicted
        text = "\n".join(page.read_text() for page in sorted(TEXT.glob("*.md")))
        prompt = engine.get_tokenizer().encode(text)[: stored * BLOCK_SIZE + given.tail]
        computed, _ = _first_token(engine, prompt)
        # in turns on one engine: vLLM has one connector in a process
        ways = {"whole": None, "partial": scheduler._partial}
        times: dict[str, list[float]] = {name: [] for name in ways}
        blocks: dict[str, int] = {}
        for turn in range(given.turns + 1):
            for name, partial in ways.items():
                assert worker.saver.flush(30)
                scheduler._partial, before = partial, worker.loads.counts.loaded_blocks
                spent, cached = _first_token(engine, prompt)
                assert cached == len(prompt) - given.tail, (name, cached)
                blocks[name] = worker.loads.counts.loaded_blocks - before
                if turn:
                    times[name].append(spent)
        core: Any = engine.llm_engine.engine_core
        print(f"{len(prompt)} tokens, computed: {1e3 * computed:.0f} ms")
        for name, spent in times.items():
            median, least, most = (1e3 * value for value in (statistics.median(spent), min(spent), max(spent)))
            print(f"{name}: {median:.0f} ms ({least:.0f} to {most:.0f}), {blocks[name]} of {stored}")
        print(core.engine_core.scheduler.offload.totals)
        core.shutdown()


def _start(model: Path, prompt_tokens: int, folder: Path, static: bool) -> LLM:
    transfer = KVTransferConfig(
        kv_connector="UcmConnector",
        kv_connector_module_path="vllm_gaudi_ucm.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"store": {"kind": "file", "path": str(folder / "store"), "deadline": 10.0}},
    )
    return LLM(
        str(model),
        dtype="float32",
        max_model_len=prompt_tokens + 2 * BLOCK_SIZE,
        max_num_seqs=2,
        max_num_batched_tokens=512,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        kv_transfer_config=transfer,
        additional_config={"ucm": {**MEMORY_MODE, **(STATIC if static else {})}},
    )


def _sides(engine: LLM) -> tuple[Any, Any]:
    core: Any = engine.llm_engine.engine_core
    worker = core.engine_core.model_executor.driver_worker.worker.model_runner.transfer.connector.worker_side
    return worker, core.engine_core.scheduler.connector.scheduler_side


def _first_token(engine: LLM, prompt: list[int]) -> tuple[float, int]:
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    start = time.perf_counter()
    (output,) = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return time.perf_counter() - start, output.num_cached_tokens or 0


if __name__ == "__main__":
    main()
