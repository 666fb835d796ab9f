"""Probes 8, 16, 17 and 26: layers as regions: what compiles, how often, how long, and the host's cost of a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm_tools.first_hour.bench import Bench, attempt
from vllm_gaudi_ucm_tools.first_hour.nodes import CountedRegion
from vllm_gaudi_ucm_tools.first_hour.steps import Heads, bucket_inputs, bucket_region, bucket_tensors

IMPLEMENTATION = "hpu"
CALLS = 20
MOST_OPERATORS = 150  # of a layer's attention in any bucket


class DecoderLayer(nn.Module):
    """A decoder layer of Llama, in plain torch, over the tokens of one prompt.

    hidden, heads, kv_heads, inner: its sizes; a head has hidden / heads elements.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, hidden // heads
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: [tokens, hidden]; mask: [tokens, tokens], added to scores."""
        q, k, v = self.qkv(self.norms[0](x)).split([n * self.dim for n in (self.heads, *[self.kv_heads] * 2)], -1)
        q = q.unflatten(-1, (self.kv_heads, -1, self.dim)).permute(1, 2, 0, 3)
        k, v = (one.unflatten(-1, (self.kv_heads, self.dim)).transpose(0, 1).unsqueeze(1) for one in (k, v))
        scores = torch.matmul(q, k.transpose(-1, -2)).float() * self.dim**-0.5 + mask
        seen = torch.matmul(torch.softmax(scores, -1).to(v.dtype), v)
        x = x + self.out(seen.permute(2, 0, 1, 3).flatten(1))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


def two_layers(bench: Bench) -> None:
    """Probe 16: layers of an 8B model at the full size."""
    sizes = bench.pick((64, 4, 2, 128), (4096, 32, 8, 14336))
    layers = [DecoderLayer(*sizes).to(torch.bfloat16).to(bench.torch_device).eval() for _ in range(2)]
    for layer in layers:
        layer.requires_grad_(False)
    runs = [bench.region(layer) for layer in layers]
    recompiled = 0
    for place, tokens in enumerate(bench.pick((4, 8), (64, 1024))):
        x = bench.random(tokens, sizes[0], dtype=torch.bfloat16)
        mask = torch.full((tokens, tokens), float("-inf")).triu(1).to(bench.torch_device)
        found = [bench.compilations(lambda run=run: run(x, mask)) for run in runs]  # type: ignore[misc] # noqa: B023
        bench.claim(f"compilations of two layers, {tokens} tokens", found, [1, 0])
        error = _error(layers[0], runs[0], x, mask)
        bench.claim(f"{tokens} tokens, relative error to eager", f"{error:.1e}", "below 5e-2", error < 5e-2)
        again = bench.compilations(lambda: [run(x, mask) for run in runs])  # noqa: B023 - called at once
        bench.claim(f"compilations of a second pass, {tokens} tokens", again, 0)
        recompiled += again
        if place == 0:
            _host_cost(bench, lambda: runs[0](x, mask))  # noqa: B023 - called at once
    bench.answer("compilations after the first use of the weights", recompiled)


def _error(layer: Callable[..., Tensor], run: Callable[..., Tensor], x: Tensor, mask: Tensor) -> float:
    expected, found = layer(x, mask).cpu().float(), run(x, mask).cpu().float()
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max())


def _host_cost(bench: Bench, call: Callable[[], Any]) -> None:
    """Microseconds until a call returns, with guards and without; and until the device has finished."""

    def launched() -> float:
        bench.device.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        seconds = time.perf_counter() - begin
        bench.device.synchronize()
        return 1e6 * seconds / CALLS

    call()
    bench.answer("host, per call", f"{min(launched() for _ in range(3)):.0f} us")
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        bench.answer("host, per call, guards skipped", f"{min(launched() for _ in range(3)):.0f} us")
    bench.measure("until the device has finished, per call", 1e6 * bench.seconds(call), "us")
    seconds = bench.device_seconds(call)
    if seconds is not None:
        bench.measure("device, per call, by its events", 1e6 * seconds, "us")


def without_fallback(bench: Bench) -> None:
    """Probe 8: PT_HPU_USE_EAGER_FALLBACK=0 makes an error of whatever leaves the graph."""
    sizes = _Sizes(bench)
    for shape in (
        ForwardShape.from_sizes(False, sizes.rows, 0, sizes.unique),
        ForwardShape.from_sizes(True, sizes.rows, 0, 0),
    ):
        outcome = attempt(lambda: sizes.run(bench, shape, write=True))  # noqa: B023 - called at once
        bench.claim(f"layer in {shape.phase}", outcome.error or "nothing falls back", "nothing falls back")


def phases(bench: Bench) -> None:
    """Probe 17."""
    sizes = _Sizes(bench)
    memory = bench.used_memory()
    costs: list[_Cost] = []
    for scale in bench.pick((1,), (1, 4, 16)):
        for causal, shared, unique in ((c, s, u) for c in (0, 1) for s in (0, 1) for u in (0, 1)):
            counts = (count * scale for count in (shared * sizes.shared, unique * sizes.unique))
            shape = ForwardShape.from_sizes(bool(causal), sizes.rows * scale, *counts)
            costs += _compile_cost(bench, sizes, shape)
    bench.answer("memory that the device lost to all of them", f"{bench.used_memory() - memory} bytes")
    points = [(cost.nodes, cost.seconds) for cost in costs]
    bench.series("phases", "nodes", "compile seconds", points)
    if points:
        (few, first), (many, last) = min(points), max(points)
        bench.answer("compile seconds", f"{first:.2f} for {few:.0f} nodes, {last:.2f} for {many:.0f}")
    if peaks := [cost.peak for cost in costs if cost.peak is not None]:
        bench.answer("peak memory of compiling and running one", f"{max(peaks)} bytes beyond its inputs, at most")


def compile_seconds(bench: Bench) -> None:
    """Probe 26: the same operators, more and more of them; sizes of tensors stay."""
    points = []
    x = bench.random(64, 64)
    for length in bench.pick((8, 32), (8, 32, 128, 512, 2048)):

        def chain(x: Tensor, length: int = length) -> Tensor:
            for step in range(length):
                x = torch.matmul(x, x).tanh() if step % 4 == 0 else x * 0.5 + 0.1
            return x

        torch._dynamo.reset()
        run = CountedRegion(bench, chain)
        seconds = bench.timed(lambda: run(x)) - run.seconds  # noqa: B023 - called at once
        finite = bool(torch.isfinite(run(x).cpu()).all())
        bench.claim(f"chain of {length}", "finite" if finite else "not finite", "finite")
        bench.claim(
            f"operators of a chain of {length}", run.error or run.operators, f"at least {length}", _counts(run, length)
        )
        points.append((float(run.operators or length), seconds))
    bench.series("a chain of operators", "nodes", "compile seconds", points)
    (few, first), (many, last) = points[0], points[-1]
    slope = (last - first) / max(many - few, 1)
    bench.answer("compile seconds", f"{first:.2f} for {few:.0f} nodes, {1e3 * slope:.2f} ms for each more")


def _counts(run: CountedRegion, length: int) -> bool:
    return not run.error and run.operators >= length


class _Sizes:
    """Sizes of attention's layer in these probes."""

    def __init__(self, bench: Bench) -> None:
        self.heads = bench.pick(Heads(4, 2, 16, 16), Heads(32, 8, 128, 128))
        self.rows, self.shared, self.unique = bench.pick((8, 4, 12), (64, 32, 256))
        blocks = 16 * (self.shared + self.unique) + 1 if bench.full else self.shared + self.unique + 1
        most = 16 * self.rows if bench.full else self.rows
        longest = blocks * self.heads.block_size
        self.limits = Limits(most, most, longest, self.heads.block_size, blocks, contiguous=False)
        self.tensors = bucket_tensors(self.limits, bench)

    def inputs(self, bench: Bench, shape: ForwardShape) -> tuple[Any, ...]:
        """Returns the inputs of a bucket without a step: only pads, as in a warm-up."""
        heads, rows = self.heads, shape.query_len
        new = [bench.random(rows, n, heads.dim, dtype=torch.bfloat16) for n in (heads.heads, *[heads.kv_heads] * 2)]
        cache = (self.limits.num_blocks * heads.block_size, heads.kv_heads, heads.dim)
        caches = [torch.zeros(cache, dtype=torch.bfloat16, device=bench.torch_device) for _ in range(2)]
        return *bucket_inputs(self.tensors, self.tensors.fill_pads(shape), shape), *new, *caches

    def run(self, bench: Bench, shape: ForwardShape, write: bool) -> Tensor:
        region = bench.region(bucket_region(self.heads, IMPLEMENTATION, write))
        return region(*self.inputs(bench, shape)).cpu()


class _Cost(NamedTuple):
    """The cost of compiling one bucket and running it once. peak: bytes beyond those in use before, None if unknown."""

    nodes: float
    seconds: float
    peak: int | None


def _compile_cost(bench: Bench, sizes: _Sizes, shape: ForwardShape) -> list[_Cost]:
    """Returns nodes and seconds of one bucket; none if it does not compile."""
    name = f"{shape.phase} q{shape.query_len} s{shape.shared_blocks} u{shape.unique_blocks}"
    inputs = sizes.inputs(bench, shape)
    torch._dynamo.reset()
    run = CountedRegion(bench, bucket_region(sizes.heads, IMPLEMENTATION))
    before = bench.used_memory()
    begin = time.perf_counter()
    peak = attempt(lambda: bench.peak_memory(lambda: run(*inputs)))
    seconds = time.perf_counter() - begin - run.seconds
    outcome = attempt(lambda: run(*inputs).cpu()) if peak.ok else peak
    if not bench.claim(name, outcome.error or "compiles", "compiles"):
        return []
    finite = bool(torch.isfinite(outcome.value).all())
    bench.claim(f"{name}: values", "finite" if finite else "not finite", "finite")
    memory = bench.used_memory() - before
    found = {
        "operators": run.operators,
        "error": run.error,
        "seconds": seconds,
        "bytes kept": memory,
        "peak": peak.value,
    }
    bench.note(name, found)
    bench.claim(f"{name}: operators", run.error or run.operators, f"at most {MOST_OPERATORS}", _is_small(run))
    return [] if run.error else [_Cost(float(run.operators), seconds, peak.value)]


def _is_small(run: CountedRegion) -> bool:
    return not run.error and run.operators <= MOST_OPERATORS
