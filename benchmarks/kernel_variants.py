"""Which variants of each Triton kernel the graphs of a bucket set launch, counted without a GPU.

A variant is what Triton compiles by itself: another tile, another multiple of 16, another pointer that is not aligned.
Each is compiled once, the first time that an engine starts. The attention of a layer, its cache write, norms, rotary
embedding and gate are launched for each bucket over pads, under a driver of a Hopper that launches nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine_shapes import config_of
from benchmarks.positive import positive
from vllm_gaudi_ucm.execution.graph_manager import BucketTensors
from vllm_gaudi_ucm.graphs.cost.specs import ModelSpec, device_spec
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.strategies import STRATEGIES, automatic_strategy
from vllm_gaudi_ucm.graphs.strategies.base import BucketRequest

BLOCK, CAUSAL_SLICE = 128, 512
MULTIPROCESSORS = 132
GATE = 14336

Variants = dict[str, dict[str, str]]
"""By kernel: each variant's key, and Triton's words for it."""


class Hopper:
    """A driver that says what it drives and can launch nothing."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextmanager
def noted() -> Iterator[Variants]:
    """Within, launches are noted, nothing is compiled, and a CPU passes for a Hopper."""
    from triton import knobs
    from triton.runtime import driver

    from vllm_gaudi_ucm.ops.unified_attention.impl import cuda_layer, cuda_parts, cuda_plan, cuda_short

    found: Variants = {}

    def note(*, key: str, repr: str, fn: Any, **others: Any) -> bool:  # Triton's names
        found.setdefault(fn.name.rsplit(".", 1)[-1], {})[key] = repr
        return True

    driver.set_active(Hopper())  # type: ignore[arg-type]
    for module in (cuda_layer, cuda_plan, cuda_short):
        module.multiprocessors = lambda device: MULTIPROCESSORS  # type: ignore[attr-defined]
    for module in (cuda_layer, cuda_plan, cuda_parts):
        module.starts_early = lambda device: True  # type: ignore[attr-defined]
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        yield found
    finally:
        knobs.runtime.jit_cache_hook = before


def server_buckets(limits: Limits, most: int, model: ModelSpec) -> BucketSet:
    """Those that a server chooses by itself."""
    cost = CostModel(device_spec("h200"), model, BLOCK)
    return STRATEGIES.get(automatic_strategy([]))().choose(BucketRequest(limits, cost, most))


class Layer:
    """Launches what a decoder layer launches in a bucket, over pads.

    Weights are not read: products are no kernels of ours.
    """

    def __init__(self, limits: Limits, model: ModelSpec) -> None:
        self._model = model
        self._inputs = BucketTensors(limits, CAUSAL_SLICE, torch.device("cpu"))
        heads = (2, BLOCK, model.kv_heads, model.head_dim)
        self._key_cache, self._value_cache = (torch.zeros(heads, dtype=torch.bfloat16) for _ in range(2))

    def launch(self, shape: ForwardShape) -> None:
        from vllm_gaudi_ucm.ops.kv_cache.impl.cuda import write
        from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION
        from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec

        model, rows = self._model, shape.query_len
        inputs = self._inputs.split(self._inputs.fill_pads(shape), shape)
        sizes = [model.heads * model.head_dim, model.kv_heads * model.head_dim]
        # as the product of all three leaves them
        both = torch.empty(rows, sizes[0] + 2 * sizes[1], dtype=torch.bfloat16)
        split = both.split([sizes[0], sizes[1], sizes[1]], 1)
        query, key, value = (part.view(rows, -1, model.head_dim) for part in split)
        self._around(rows, split[0], split[1], inputs.positions)
        caches = self._key_cache, self._value_cache
        write(key, value, caches[0].flatten(0, 1), caches[1].flatten(0, 1), inputs.slots)
        attention = ATTENTION.make("cuda")
        plan = attention.plan(inputs.parts, BLOCK)
        out = torch.empty(rows, model.heads, model.head_dim, dtype=torch.bfloat16)
        spec = AttentionSpec(scale=model.head_dim**-0.5)
        if not attention.attend(query, key, value, *caches, plan, spec, out):
            raise RuntimeError(f"bucket {list(shape)}: the kernels do not cover it")

    def _around(self, rows: int, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor) -> None:
        from vllm_gaudi_ucm.ops.rms_norm.cuda import cuda_rms_norm
        from vllm_gaudi_ucm.ops.rotary.cuda import cuda_rotate
        from vllm_gaudi_ucm.ops.silu_and_mul.cuda import cuda_gate

        hidden = torch.empty(rows, self._model.hidden, dtype=torch.bfloat16)
        weight = hidden.new_empty(self._model.hidden)
        cuda_rms_norm(hidden, weight, 1e-5)
        cuda_rms_norm(hidden, weight, 1e-5, hidden.clone(), in_place=True)
        table = hidden.new_empty(8192, self._model.head_dim)
        cuda_rotate(query, key, positions, table, self._model.head_dim, True)
        cuda_gate(hidden.new_empty(rows, 2 * self._model.intermediate))


def count(limits: Limits, shapes: Sequence[ForwardShape], model: ModelSpec) -> Variants:
    """What graphs of these shapes launch."""
    with noted() as found, torch.inference_mode():
        layer = Layer(limits, model)
        for shape in shapes:
            layer.launch(shape)
    return found


def differences(variants: dict[str, str]) -> list[str]:
    """Which arguments differ between the variants of a kernel, and how."""
    from ast import literal_eval

    def parse(key: str) -> Any:
        return key

    return [f"{parse(key)}" for key in variants]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_variants", description=__doc__)
    parser.add_argument("--shape", default="8b", help="of the model (default: %(default)s)")
    parser.add_argument("--max-graphs", type=positive, default=48, help="graphs of the set (default: %(default)s)")
    parser.add_argument("--rows", type=positive, default=2048, help="tokens of a step (default: %(default)s)")
    parser.add_argument("--requests", type=positive, default=64, help="requests of a step (default: %(default)s)")
    parser.add_argument("--length", type=positive, default=4096, help="tokens of a request (default: %(default)s)")
    parser.add_argument("--blocks", type=positive, default=6000, help="of the KV cache (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="list the variants")
    options = parser.parse_args(argv)
    model = ModelSpec.from_hf_config(config_of(options.shape))
    limits = Limits(options.rows, options.requests, options.length, BLOCK, options.blocks, False)
    buckets = server_buckets(limits, options.max_graphs, model)
    print(len(buckets.forward), "forward", [str(list(s)) for s in buckets.forward])
    found = count(limits, buckets.forward, model)
    from vllm_gaudi_ucm.runner.graph_measurement import _largest_of_phases
    large = count(limits, _largest_of_phases(limits), model)
    print("largest", {k: len(v) for k, v in large.items()}, "missed", sum(len(set(v) - set(large.get(k, ()))) for k, v in found.items()))
    for kernel, variants in sorted(found.items()):
        print(kernel, len(variants))
        if options.verbose:
            for key, words in variants.items():
                print("   ", key)
    print("all", sum(map(len, found.values())))


if __name__ == "__main__":
    main()
