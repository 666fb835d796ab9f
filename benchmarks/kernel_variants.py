"""Which variants of each Triton kernel the graphs of a bucket set launch, counted without a GPU.

A variant is what Triton compiles separately: another tile, another multiple of 16, another pointer that is not aligned.
Each is compiled once, the first time that an engine starts. The attention of a layer, its cache write, norms, rotary
embedding and gate are launched for each bucket over pads, under a driver of a Hopper that launches nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
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
from vllm_gaudi_ucm.graphs.warm_up.extremes import largest_of_phases
from vllm_gaudi_ucm_tools.output import report_console

BLOCK, CAUSAL_SLICE = 128, 512
MULTIPROCESSORS = 132

Variants = dict[str, set[str]]
"""The variants of each kernel, by the values that Triton distinguishes."""


class Hopper:
    """A driver that reports a GPU but cannot launch kernels."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextmanager
def noted() -> Iterator[Variants]:
    """A context in which launches are recorded instead of compiled, and a CPU passes for a Hopper. For a process of its
    own.
    """
    from triton import knobs
    from triton.runtime import driver

    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import layer as cuda_layer
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import parts as cuda_parts
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import plan as cuda_plan
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import short as cuda_short

    found: Variants = {}

    def note(*, key: str, fn: Any, **others: Any) -> bool:  # Triton's names
        found.setdefault(fn.name.rsplit(".", 1)[-1], set()).add(key)
        return True

    driver.set_active(Hopper())
    for module in (cuda_layer, cuda_plan, cuda_short):
        module.multiprocessors = lambda device: MULTIPROCESSORS  # type: ignore[attr-defined]
    for module in (cuda_plan, cuda_parts):
        module.starts_early = lambda device: True  # type: ignore[attr-defined]
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        yield found
    finally:
        knobs.runtime.jit_cache_hook = before


def server_buckets(limits: Limits, most: int, model: ModelSpec) -> BucketSet:
    """Returns the buckets that a server chooses without tuning."""
    cost = CostModel(device_spec("h200"), model, BLOCK)
    return STRATEGIES.get(automatic_strategy([]))().choose(BucketRequest(limits, cost, most))


class Layer:
    """Launches the kernels of a decoder layer in a bucket, except products, which are not ours: there are no
    weights.
    """

    def __init__(self, limits: Limits, model: ModelSpec) -> None:
        self._model = model
        self._inputs = BucketTensors(limits, CAUSAL_SLICE, torch.device("cpu"))
        cache = (2, BLOCK, model.kv_heads, model.head_dim)
        self._key_cache, self._value_cache = (torch.zeros(cache, dtype=torch.bfloat16) for _ in range(2))

    def launch(self, shape: ForwardShape) -> None:
        from vllm_gaudi_ucm.ops.kv_cache.impl.cuda.cache import write
        from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION
        from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec

        model, rows = self._model, shape.query_len
        inputs = self._inputs.split(self._inputs.fill_pads(shape), shape)
        sizes = [size * model.head_dim for size in (model.heads, model.kv_heads, model.kv_heads)]
        # side by side, as the product for all three leaves them
        parts = torch.empty(rows, sum(sizes), dtype=torch.bfloat16).split(sizes, 1)
        self._around(rows, parts[0], parts[1], inputs.positions)
        query, key, value = (part.view(rows, -1, model.head_dim) for part in parts)
        caches = self._key_cache, self._value_cache
        write(key, value, caches[0].flatten(0, 1), caches[1].flatten(0, 1), inputs.slots)
        attention = ATTENTION.make("cuda")
        plan = attention.plan(inputs.parts, BLOCK)
        out = torch.empty(rows, model.heads, model.head_dim, dtype=torch.bfloat16)
        spec = AttentionSpec(scale=model.head_dim**-0.5)
        if not attention.attend(query, key, value, *caches, plan, spec, out):
            raise RuntimeError(f"bucket {list(shape)}: the kernels do not cover it")

    def _around(self, rows: int, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor) -> None:
        from vllm_gaudi_ucm.ops.rms_norm.impl.cuda.norm import cuda_rms_norm
        from vllm_gaudi_ucm.ops.rotary.impl.cuda.rotary import cuda_rotate
        from vllm_gaudi_ucm.ops.silu_and_mul.impl.cuda.gate import cuda_gate

        hidden = torch.empty(rows, self._model.hidden, dtype=torch.bfloat16)
        weight = hidden.new_empty(self._model.hidden)
        cuda_rms_norm(hidden, weight, 1e-5)
        cuda_rms_norm(hidden, weight, 1e-5, hidden.clone(), in_place=True)
        table = hidden.new_empty(8192, self._model.head_dim)
        cuda_rotate(query, key, positions, table, self._model.head_dim, True)
        cuda_gate(hidden.new_empty(rows, 2 * self._model.intermediate))


@torch.inference_mode()
def count(limits: Limits, shapes: Iterable[ForwardShape], model: ModelSpec) -> Variants:
    """Counts what graphs of these shapes launch."""
    with noted() as found:
        layer = Layer(limits, model)
        for shape in shapes:
            layer.launch(shape)
    return found


def number(variants: Variants) -> int:
    """The number of all kernels together."""
    return sum(map(len, variants.values()))


def table(every: Variants, largest: Variants) -> Table:
    """Returns one line for each kernel. largest: variants that the largest bucket of each phase launches."""
    found = Table("kernel", "variants", "of the largest buckets")
    for kernel, variants in sorted(every.items()):
        found.add_row(kernel, str(len(variants)), str(len(variants & largest.get(kernel, set()))))
    known = sum(len(variants & largest.get(kernel, set())) for kernel, variants in every.items())
    found.add_row("all", str(number(every)), str(known))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Counts and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_variants", description=__doc__)
    parser.add_argument("--shape", default="8b", help="of the model (default: %(default)s)")
    parser.add_argument("--max-graphs", type=positive, default=48, help="graphs of the set (default: %(default)s)")
    parser.add_argument("--rows", type=positive, default=2048, help="tokens of a step (default: %(default)s)")
    parser.add_argument("--requests", type=positive, default=64, help="requests of a step (default: %(default)s)")
    parser.add_argument("--length", type=positive, default=4096, help="tokens of a request (default: %(default)s)")
    parser.add_argument("--blocks", type=positive, default=6000, help="of the KV cache (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="list what Triton tells the variants apart by")
    options = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is 1: an interpreted kernel has no variants; expected it unset or 0")
    model = ModelSpec.from_hf_config(config_of(options.shape))
    limits = Limits(options.rows, options.requests, options.length, BLOCK, options.blocks, False)
    buckets = server_buckets(limits, options.max_graphs, model)
    every, largest = (count(limits, shapes, model) for shapes in (buckets.forward, largest_of_phases(limits)))
    console = report_console(least_width=120)
    console.print(f"{len(buckets.forward)} forward graphs of {buckets.num_graphs}, {options.shape}")
    console.print(table(every, largest))
    for kernel, variants in sorted(every.items()) if options.verbose else ():
        for variant in sorted(variants):
            console.print(f"{kernel} {variant}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
