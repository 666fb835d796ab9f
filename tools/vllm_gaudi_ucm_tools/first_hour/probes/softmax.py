"""Probes 9 and 13: softmax statistics of attention, and which fused kernels there are."""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Any

import torch
from torch import Tensor

from vllm_gaudi_ucm_tools.first_hour.bench import Bench, attempt, relative_error

MERGE_ERROR = 2e-2  # of bf16 results: a few of its steps of 2**-8
ROUNDING = 1 / 128


def statistics(bench: Bench) -> None:
    """Probe 9."""
    batch, heads, rows, keys, dim = bench.pick((1, 2, 16, 64, 32), (2, 8, 128, 1024, 128))
    q, k, v = (bench.random(batch, heads, n, dim, dtype=torch.bfloat16) for n in (rows, keys, keys))
    _ours(bench, q, k, v)
    if bench.kind != "hpu":
        return
    has = attempt(lambda: torch.ops.hpu.sdpa_recomp_fwd)
    if bench.claim("hpu.sdpa_recomp_fwd", "there" if has.ok else "absent", "there"):
        bench.note("schema", [str(one) for one in torch._C._jit_get_schemas_for_operator("hpu::sdpa_recomp_fwd")])
        for mode in ("fast", "fp32"):
            _fused(bench, mode, q, k, v)
    _window_and_sinks(bench, q, k, v)


def _partial(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Our form: scores in f32 from an explicit product, maximum, exponentials, sum."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    return torch.matmul(weights, v.float()), top, weights.sum(-1, keepdim=True)


def _merge(a: tuple[Tensor, Tensor, Tensor], b: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Normalised, from (un-normalised out, max, sum) of each."""
    top = torch.maximum(a[1], b[1])
    left, right = torch.exp(a[1] - top), torch.exp(b[1] - top)
    return (a[0] * left + b[0] * right) / (a[2] * left + b[2] * right)


def _exact(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """float64 on the host: normalised out, max, sum. window: causal, and this many keys before a row's own."""
    q, k, v = (tensor.cpu().double() for tensor in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if window is not None:
        behind = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
        scores = scores.masked_fill((behind < 0) | (behind > window), -math.inf)
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.cpu().double()[:, None, None]
        top = torch.maximum(top, sinks)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else torch.exp(sinks - top))
    return weights @ v / total, top, total


def _ours(bench: Bench, q: Tensor, k: Tensor, v: Tensor) -> None:
    half = k.shape[-2] // 2

    def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = _partial(q, k[..., :half, :], v[..., :half, :])
        return _merge(first, _partial(q, k[..., half:, :], v[..., half:, :]))

    error = relative_error(bench.region(merged)(q, k, v), _exact(q, k, v)[0])
    bench.claim("our partials, halves merged: relative error", f"{error:.1e}", f"below {ROUNDING}", error < ROUNDING)


def _fused(bench: Bench, mode: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Checks the results of the fused kernel, and whether its halves may be merged."""
    call = bench.region(lambda q, k, v: torch.ops.hpu.sdpa_recomp_fwd(q, k, v, None, 0.0, q.shape[-1] ** -0.5, *flags))
    flags: tuple[Any, ...] = (False, True, mode, None, "left")
    found = attempt(lambda: call(q, k, v))
    if not bench.claim(f"{mode}: call", found.error or "works", "works"):
        return
    outputs = [f"{one.dtype} {list(one.shape)}" for one in found.value if isinstance(one, Tensor)]
    bench.note(f"{mode}: outputs", outputs)
    bench.claim(f"{mode}: number of outputs", len(found.value), 4)
    out, top, inverse = found.value[:3]
    exact_out, exact_top, exact_sum = _exact(q, k, v)
    bench.claim(f"{mode}: dtype of m", top.dtype, q.dtype)
    bench.claim(f"{mode}: dtype of linv", inverse.dtype, torch.bfloat16 if mode == "fast" else torch.float32)
    bench.claim(f"{mode}: shape of m", list(top.shape), list(exact_top.shape))
    error = relative_error(out, exact_out)
    bench.claim(f"{mode}: relative error of out", f"{error:.1e}", f"below {MERGE_ERROR}", error < MERGE_ERROR)
    _which_maximum(bench, mode, top, inverse, exact_top, exact_sum)
    _merged_halves(bench, mode, call, (q, k, v), exact_out)
    _edges(bench, mode, q, k, v)


def _which_maximum(bench: Bench, mode: str, top: Tensor, inverse: Tensor, exact_top: Tensor, exact_sum: Tensor) -> None:
    """Finds out whether the sum refers to the rounded maximum that is returned, or to the exact one."""
    total, rounded = 1 / inverse.cpu().double(), top.cpu().double()
    about_rounded = relative_error(total, exact_sum * torch.exp(exact_top - rounded))
    about_exact = relative_error(total, exact_sum)
    verdict = "the returned maximum" if about_rounded < about_exact else "the exact maximum"
    bench.answer(f"{mode}: the sum is about", f"{verdict} (errors {about_rounded:.1e} and {about_exact:.1e})")


def _merged_halves(bench: Bench, mode: str, call: Any, qkv: tuple[Tensor, ...], exact: Tensor) -> None:
    q, k, v = qkv
    half = k.shape[-2] // 2
    parts = []
    for span in (slice(0, half), slice(half, None)):
        out, top, inverse = (one.float() for one in call(q, k[..., span, :].clone(), v[..., span, :].clone())[:3])
        total = 1 / inverse
        parts.append((out * total, top, total))
    error = relative_error(_merge(parts[0], parts[1]), exact)
    bench.answer(f"{mode}: two halves merged, relative error", f"{error:.1e} (one call: see the claim on out)")


def _edges(bench: Bench, mode: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """A row that sees nothing; grouped queries in five dimensions."""
    flags: tuple[Any, ...] = (0.0, q.shape[-1] ** -0.5, False, True, mode, None, "left")
    run = bench.region(lambda q, k, v, mask: torch.ops.hpu.sdpa_recomp_fwd(q, k, v, mask, *flags)[0])
    mask = torch.zeros(1, 1, q.shape[-2], k.shape[-2], dtype=q.dtype)
    mask[:, :, 0] = -math.inf
    masked = attempt(lambda: run(q, k, v, mask.to(bench.torch_device)).cpu())
    row = masked.error if not masked.ok else _kind_of(masked.value[:, :, 0])
    bench.answer(f"{mode}: a row that sees nothing", row)
    if masked.ok:
        error = relative_error(masked.value[:, :, 1:], _exact(q, k, v)[0][:, :, 1:])
        bench.claim(f"{mode}: the other rows", f"error {error:.1e}", f"below {MERGE_ERROR}", error < MERGE_ERROR)
    grouped = q.unflatten(1, (-1, 2)), k[:, ::2].unsqueeze(2), v[:, ::2].unsqueeze(2)
    found = attempt(lambda: run(*grouped, None).cpu())
    if found.ok:
        k, v = (one[:, ::2].repeat_interleave(2, 1) for one in (k, v))
        repeated = _exact(q, k, v)[0]
        error = relative_error(found.value.flatten(1, 2), repeated)
        bench.answer(f"{mode}: grouped queries in 5-d, relative error", f"{error:.1e}")
    else:
        bench.answer(f"{mode}: grouped queries in 5-d", found.error)


def _window_and_sinks(bench: Bench, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Checks additions of newer builds to FusedSDPA, by the names of its arguments: `window_size` and `sinks`."""
    rows = q.shape[-2]
    k, v = k[..., :rows, :].clone(), v[..., :rows, :].clone()
    window = rows // 4
    sinks = bench.random(q.shape[1], dtype=q.dtype)
    fused = importlib.import_module("habana_frameworks.torch.hpex.kernels").FusedSDPA
    # mask, dropout, causal, scale, mode, recompute, valid_len, padding, two that return more, window, sinks
    middle = (None, 0.0, True, None, "None", True, None, "left", False, False)
    calls: dict[str, tuple[Any, Tensor]] = {
        "a window": (((window, 0), None), _exact(q, k, v, window)[0]),
        "sinks": (((-1, -1), sinks), _exact(q, k, v, rows, sinks)[0]),
        "a window and sinks": (((window, 0), sinks), _exact(q, k, v, window, sinks)[0]),
    }
    for name, (last, expected) in calls.items():
        run = bench.region(lambda q, k, v, last=last: fused.apply(q, k, v, *middle, *last))
        found = attempt(lambda: run(q, k, v).cpu())  # noqa: B023 - called at once
        error = found.error if not found.ok else f"relative error {relative_error(found.value, expected):.1e}"
        bench.answer(f"FusedSDPA with {name}", error)


def _kind_of(row: Tensor) -> str:
    if torch.isnan(row).any():
        return "NaN"
    return "zeros" if not row.any() else "finite, not zero"


def kernels(bench: Bench) -> None:
    """Probe 13."""
    name = bench.device.name()
    newest = name == "GAUDI3"
    here = vars(torch.ops.hpu)
    for kernel in ("softmax_fa2", "block_softmax_adjustment"):
        there = attempt(lambda kernel=kernel: torch._C._jit_get_schemas_for_operator(f"hpu::{kernel}"))  # type: ignore[misc]
        found = "there" if there.ok and there.value else "absent"
        bench.claim(f"{kernel} on {name}", found, "there" if newest else "absent")
    for kernel in ("block_softmax", "custom_softmax", "ragged_softmax", "scaled_masked_softmax", "sdpa_fwd"):
        bench.note(kernel, bool(torch._C._jit_get_schemas_for_operator(f"hpu::{kernel}")) or kernel in here)
    for reduce, include in itertools.product(("amax", "amin"), (True, False)):
        x = bench.random(4, 8)
        index = bench.integers(6, high=4)
        source = bench.random(6, 8)
        expected = x.cpu().index_reduce_(0, index.cpu(), source.cpu(), reduce, include_self=include)
        done = attempt(lambda: x.index_reduce_(0, index, source, reduce, include_self=include).cpu())  # noqa: B023
        outcome = done.error if not done.ok else "right" if torch.equal(done.value, expected) else "wrong"
        if (reduce, include) == ("amax", True):
            bench.claim("index_reduce_ amax", outcome, "right")
        else:
            bench.note(f"index_reduce_ {reduce}, include_self={include}", outcome)
