"""Measures the effect of the KV cache's dtype on answers: real text, followed token by token, in the dtype of the
model, in bfloat16 and in 8-bit floats, densely and with GSA.

Every contender has an engine of its own, in turn, in this process. Scales of the 8-bit cache are 1, as for a checkpoint
without any. Nats refer to the real text; next tokens are compared with those of the first contender.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.memory_mode import MODEL, engine, report, texts
from benchmarks.memory_mode_quality import equal_share, follow
from benchmarks.positive import positive
from vllm_gaudi_ucm.vllm_api.cache_options import float_kv_dtype

COLUMNS = {"nats": "nats/token", "perplexity": "perplexity", "same": "next token same", "bytes": "bytes per token"}


class Contender(NamedTuple):
    """An engine to compare: a dtype of the KV cache, and options of the plugin."""

    dtype: str
    ucm: dict[str, Any]


def main() -> None:
    options = parser().parse_args()
    prompts, answers = texts(options)
    rows: dict[str, dict[str, float]] = {}
    likeliest: list[list[int]] = []
    for name, contender in contenders(options.sparse_ratio).items():
        begin = time.perf_counter()
        with engine(options.model, contender.ucm, options, kv_cache_dtype=contender.dtype) as llm:
            found = follow(llm, prompts[: options.texts], answers[: options.texts])
            caches = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.parts
            per_token = sum(one[0].nbytes for pair in caches.kv_caches.values() for one in pair)
        likeliest = likeliest or found["likeliest"]
        rows[name] = {
            "nats": found["nats"],
            "perplexity": math.exp(found["nats"]),
            "same": equal_share(found["likeliest"], likeliest),
            "bytes": per_token,
        }
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    title = f"{options.texts} texts of {options.context} tokens, {options.new_tokens} tokens followed in each"
    report(title, COLUMNS, rows, options.json)


def contenders(ratio: float) -> dict[str, Contender]:
    method = {"sparse_ratio": ratio, "sparse_steps": "always", "min_tokens": 256}
    sparse = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": method}}
    dtypes = {"float32": "auto", "bfloat16": float_kv_dtype("bfloat16"), "fp8": "fp8"}
    found = {name: Contender(dtype, {}) for name, dtype in dtypes.items()}
    return found | {f"{name}, GSA {ratio:.0%}": Contender(dtype, sparse) for name, dtype in dtypes.items()}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--model", type=Path, default=MODEL)
    found.add_argument("--block-size", type=positive, default=32)
    found.add_argument("--context", type=positive, default=1536)
    found.add_argument("--new-tokens", type=positive, default=128)
    found.add_argument("--texts", type=positive, default=8, help="prompts whose real continuation is followed")
    found.add_argument("--requests", type=positive, default=8, help="requests at once")
    found.add_argument("--sparse-ratio", type=float, default=0.3)
    found.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    return found


if __name__ == "__main__":
    main()
