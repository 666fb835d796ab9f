"""Times decodes of one layer whose rows choose tokens (DSA), and dense attention over the same latents.

    python -m benchmarks.chosen_tokens --device cuda --contexts 32768 131072 --requests 1 8

A step of a model has as many of these layers as the model, and its projections and experts, which are not timed here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from vllm_gaudi_ucm.ops.chosen_tokens.api import attend_tokens, choose_tokens
from vllm_gaudi_ucm.ops.chosen_tokens.implementation import IndexRows, TokenPlaces
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, UniquePart
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec

BLOCK, SCALE = 128, 0.1


def decode(
    requests: int, context: int, chosen: int, device: str, dtype: torch.dtype, *, heads: int
) -> dict[str, float]:
    """Returns milliseconds of the choice, of attention over chosen tokens, and of dense attention, in DeepSeek V3.2's
    sizes for so many heads.
    """
    latent, cached, index_heads, index_size = 512, 576, 64, 128
    blocks = -(-context // BLOCK)
    total = requests * blocks

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    rows = torch.arange(requests, device=device).repeat_interleave(blocks)
    ids = torch.arange(total, device=device)
    full = torch.full((total,), BLOCK, dtype=torch.int32, device=device)
    unique = UniquePart(
        ids,
        rows,
        torch.zeros_like(full),
        full,
        requests,
        num_tokens=total * BLOCK,
        most_of_row=blocks,
        places=ids % blocks,
    )
    parts = AttentionParts(unique=unique)
    cache, keys = random(total * BLOCK, cached), random(total * BLOCK, index_size)
    slots = torch.arange(requests, device=device) * blocks * BLOCK + context - 1
    index = IndexRows(
        random(requests, index_heads, index_size), keys[slots], torch.rand(requests, index_heads, device=device)
    )
    query, places = random(requests, heads, cached), TokenPlaces(parts, slots, BLOCK)
    prepared = prepare(parts, BLOCK)
    in_blocks = cache.view(total, BLOCK, 1, cached)
    found = choose_tokens(index, keys, places, chosen)

    def dense() -> torch.Tensor:
        new = cache[slots][:, None]
        return unified_attention(
            query,
            new,
            new[..., :latent],
            in_blocks,
            value_cache=in_blocks[..., :latent],
            parts=prepared,
            spec=AttentionSpec(SCALE, values_in_keys=True),
        )

    return {
        "choose": _milliseconds(lambda: choose_tokens(index, keys, places, chosen), device),
        "attend": _milliseconds(lambda: attend_tokens(query, cache, found, SCALE, latent), device),
        "dense": _milliseconds(dense, device),
    }


def _milliseconds(run: Callable[[], torch.Tensor], device: str, repeats: int = 5) -> float:
    """Returns the least time of some runs, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--chosen", type=int, default=2048)
    given = parser.parse_args()
    for context in given.contexts:
        for requests in given.requests:
            found = decode(
                requests, context, given.chosen, given.device, getattr(torch, given.dtype), heads=given.heads
            )
            print(f"{requests} x {context}: " + ", ".join(f"{name} {value:.2f} ms" for name, value in found.items()))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
