"""Time to the first token of a prompt whose beginning is stored, against the same engine without a store."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

HITS = (0, 25, 50, 75, 100)
BLOCK_SIZE = 32


def measure_first_token(
    model: Path, prompt_tokens: int, repeats: int, progress: Callable[[float], None]
) -> list[dict[str, Any]]:
    """Rows: median milliseconds, and how many times sooner than without a store. Local prefix caching is off."""
    with tempfile.TemporaryDirectory() as folder:
        transfer = KVTransferConfig(
            kv_connector="UcmConnector",
            kv_connector_module_path="vllm_gaudi_ucm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"store": {"kind": "file", "path": f"{folder}/store", "deadline": 10.0}},
        )
        engines = {name: _start(model, prompt_tokens, given) for name, given in (("plain", None), ("store", transfer))}
        vocabulary = engines["plain"].model_config.get_vocab_size()
        generator = torch.Generator().manual_seed(0)

        def fresh(count: int) -> list[int]:
            return torch.randint(3, vocabulary, (count,), generator=generator).tolist()

        stored = fresh(prompt_tokens)
        _first_token(engines["store"], stored)
        saver = _worker(engines["store"]).saver
        assert saver.flush(30)
        times: dict[str, list[float]] = {}
        for repeat in range(repeats + 1):
            for index, (name, engine, hits) in enumerate(
                [("no store", engines["plain"], 0), *((f"{hits} %", engines["store"], hits) for hits in HITS)]
            ):
                # a whole number of blocks, and one token that has to be computed
                known = prompt_tokens * hits // 100 // BLOCK_SIZE * BLOCK_SIZE
                prompt = stored[:known] + fresh(prompt_tokens - known)
                spent, cached = _first_token(engine, prompt)
                assert cached == min(known, (prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE), (name, cached)
                if repeat:
                    times.setdefault(name, []).append(spent)
                assert saver.flush(30)
                progress((repeat + index / (len(HITS) + 1)) / (repeats + 1))
        for engine in engines.values():
            engine.llm_engine.engine_core.shutdown()
    base = statistics.median(times["no store"])
    return [
        {"hits": name, "ms": statistics.median(spent) * 1e3, "times sooner": base / statistics.median(spent)}
        for name, spent in times.items()
    ]


def _start(model: Path, prompt_tokens: int, transfer: KVTransferConfig | None) -> LLM:
    return LLM(
        str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=prompt_tokens + BLOCK_SIZE,
        max_num_seqs=2,
        max_num_batched_tokens=512,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        kv_transfer_config=transfer,
    )


def _worker(engine: LLM) -> Any:
    core: Any = engine.llm_engine.engine_core
    transfer = core.engine_core.model_executor.driver_worker.worker.model_runner.transfer
    return transfer.connector.worker_side


def _first_token(engine: LLM, prompt: list[int]) -> tuple[float, int]:
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    start = time.perf_counter()
    (output,) = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return time.perf_counter() - start, output.num_cached_tokens or 0
