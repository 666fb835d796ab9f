"""Attention of other models than Llama: windows, sinks, soft caps, slopes, latents; decodes, verifications, chunks.

`python -m benchmarks.attention --device cuda --models`. Planned and staged at the true shape, and requests with several
rows in a bucket, too; with `--variants` only these, for windows, compared with other tiles. vLLM's Triton kernels are
measured as well: its unified kernel, in both of its forms, and the one for decodes over latents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.attention_cuda_case import Batch, Case, Model, Request
from benchmarks.attention_cuda_result import OURS, Result
from benchmarks.attention_cuda_rows import BUCKET, in_bucket, least_ms, planned, window_sides
from benchmarks.attention_cuda_sides import Side, ours, vllm_latent, vllm_triton

Sides = dict[str, Side | None]

GPT_OSS = Model(heads=64, kv_heads=8, dim=64, sinks=True)
GEMMA_2 = Model(heads=16, kv_heads=8, dim=256, cap=50.0)
LATENT = Model(heads=16, kv_heads=1, dim=576, latent=512)
MODELS = {
    "gpt-oss, window 128": replace(GPT_OSS, window=128),
    "gpt-oss": GPT_OSS,
    "Llama, window 1024": Model(window=1024),
    "Llama, window 4096": Model(window=4096),
    "Gemma 2, window 4096": replace(GEMMA_2, window=4096),
    "Gemma 2": GEMMA_2,
    "DeepSeek-V2-Lite": LATENT,
    "DeepSeek-V2-Lite, 8-bit cache": replace(LATENT, narrow=True),
    "DeepSeek-V3": replace(LATENT, heads=128),
    "BLOOM": Model(kv_heads=32, slopes=True),
}
COUNTS = (1, 16, 64)
CONTEXTS = (128, 1024, 8192, 32768, 131072)  # the first: the cost of a window is compared with it
MOST_BYTES = 20e9  # of a cache: making more takes longer than measuring it

LLAMA, RANK_OF_70B = Model(), Model(heads=8, kv_heads=1)
SMALL_BLOCKS = Model(window=512, block_size=64)


def _shared(requests: int, prefix: int, own: int) -> tuple[Request, ...]:
    return (Request(prefix + own - 1, 1, prefix),) * requests


SMALL = (
    (LLAMA, Case("8B, 16 decodes at 512 shared + 64", _shared(16, 512, 64), 0.0)),
    (LLAMA, Case("8B, 4 decodes at 512 shared + 64", _shared(4, 512, 64), 0.0)),
    (RANK_OF_70B, Case("70B/TP8, 256 decodes at 2048 shared + 128", _shared(256, 2048, 128), 0.0)),
    (RANK_OF_70B, Case("70B/TP8, 16 decodes at 512 shared + 64", _shared(16, 512, 64), 0.0)),
    (RANK_OF_70B, Case("70B/TP8, 700 after 5000", (Request(5000, 700),), 0.0)),
    (SMALL_BLOCKS, Case("window 512, blocks of 64: 24 decodes at 33K", (Request(33 * 1024, 1),) * 24, 0.0)),
    (SMALL_BLOCKS, Case("window 512, blocks of 64: verify 16 x (8192 + 4)", (Request(8192, 4),) * 16, 0.0)),
    (SMALL_BLOCKS, Case("window 512, blocks of 64: 1000 after 12000", (Request(12000, 1000),), 0.0)),
)
"""Short shared prefixes, one KV head, and small blocks under a window."""

SEVERAL = (
    Case("verify 16 x (8192 + 4)", (Request(8192, 4),) * 16, 0.0),
    Case("512 after 8192", (Request(8192, 512),), 0.0),
    Case("prompt of 2048", (Request(0, 2048),), 0.0),
)


def cases(model: Model) -> list[Case]:
    """Decodes, and requests with several rows."""
    decodes = [
        Case(f"{count} at {tokens}", (Request(tokens - 1, 1),) * count, 0.0)
        for tokens in CONTEXTS
        for count in COUNTS
        if _bytes(model, count, tokens) <= MOST_BYTES
    ]
    # new tokens of latents are expanded by the model, see docs/inside/kv-caches.md
    return [*decodes, *(SEVERAL[:-1] if model.latent else SEVERAL)]


def sides(batch: Batch) -> Sides:
    """Returns vLLM's sides, and ours in a bucket if requests have several rows."""
    if batch.model.latent:
        return {"triton latent": vllm_latent(batch)}
    bucket: Sides = {}
    if max(request.new for request in batch.case.requests) > 1:
        bucket[BUCKET] = ours(in_bucket(batch), "auto")
    return bucket | {"triton 2d": vllm_triton(batch, split=False), "triton 3d": vllm_triton(batch, split=True)}


def measure_all(one: Callable[..., Result], variants: bool = False) -> list[Result]:
    """Measures every model and case; then prints what is slower than vLLM, and the cost of context beyond a window.

    one: as `attention_cuda.measure`, for a case and the rest by name. variants: requests with several rows of windows,
        compared with other tiles.
    """
    results, peers = [], window_sides if variants else sides
    for name, model in MODELS.items():
        of_windows = SEVERAL if model.window else ()
        for case in of_windows if variants else cases(model):
            of_model = replace(case, name=f"{name}: {case.name}")
            results.append(one(of_model, model=model, peers=peers, parts=planned, least_ms=least_ms))
            print(results[-1].line(), flush=True)
    print("slower than vLLM's Triton kernels: " + (", ".join(slower(results)) or "in no row"))
    for line in beyond_windows(results):
        print(line)
    return results


def measure_small(one: Callable[..., Result]) -> list[Result]:
    """Measures SMALL; see `measure_all`."""
    results = []
    for model, case in SMALL:
        results.append(one(case, model=model, peers=sides, parts=planned, least_ms=least_ms))
        print(results[-1].line(), flush=True)
    print("slower than vLLM's Triton kernels: " + (", ".join(slower(results)) or "in no row"))
    return results


def slower(results: list[Result]) -> list[str]:
    """Rows in which the better of the peer's kernels is faster, with how much."""
    found = []
    for result in results:
        own = result.milliseconds[OURS]
        peers = [ms for name, ms in result.milliseconds.items() if name.startswith("triton")]
        if peers and min(peers) < own:
            found.append(f"{result.name} ({min(peers) / own:.2f}x)")
    return found


def beyond_windows(results: list[Result]) -> list[str]:
    """Returns how much longer the longest context takes than one that a window just covers."""
    by_name = {result.name: result.milliseconds[OURS] for result in results}
    lines = []
    for name, model in MODELS.items():
        if model.window not in CONTEXTS:
            continue
        for count in COUNTS:
            there = [by_name.get(f"{name}: {count} at {tokens}") for tokens in (model.window, CONTEXTS[-1])]
            if there[0] is not None and there[1] is not None:
                lines.append(f"{name}: {count} at {CONTEXTS[-1]} takes {there[1] / there[0]:.2f} of {model.window}")
    return lines


def _bytes(model: Model, count: int, tokens: int) -> int:
    seen = min(tokens, model.window or tokens)
    return 2 * count * seen * model.kv_heads * (model.dim if model.latent else 2 * model.dim)
