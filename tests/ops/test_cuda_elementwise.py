"""The CUDA kernels of norms, rotary embedding, gates and noise against float64, with budgets from their roundings.

Runs on a GPU, there at the shapes of a served model as well, or on a CPU in the process of test_interpreter.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import layers_cuda
from tests.ops.oracle import CUDA_RUNS
from vllm_gaudi_ucm.ops.rms_norm.impl.cuda.norm import LARGEST, can_norm, cuda_rms_norm
from vllm_gaudi_ucm.ops.rotary.impl.cuda.rotary import can_rotate, cuda_rotate
from vllm_gaudi_ucm.ops.row_noise.api import exponential_noise_double, row_keys, token_mixes
from vllm_gaudi_ucm.ops.row_noise.impl.cuda.noise import cuda_noise
from vllm_gaudi_ucm.ops.silu_and_mul.impl.cuda.gate import MANY, Form, can_gate, cuda_gate

pytestmark = [
    pytest.mark.skipif(not CUDA_RUNS, reason="no GPU, and not under Triton's interpreter"),
    # of the interpreter, where a GPU has infinity
    pytest.mark.filterwarnings("ignore:overflow encountered"),
]
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# rows and their size: also one row, more than a program has, sizes that are no power of two
NORMS = [(1, 8), (3, 20), (2, 1030)] + ([(1, 4096), (64, 4096), (8192, 4096), (2048, 5120), (7, 16384)] if GPU else [])
HEADS = [(5, 3, 20), (2, 9, 128)] + ([(1, 32, 128), (2048, 32, 128), (64, 8, 96)] if GPU else [])
EPSILON = 1e-5
SINGLE = torch.finfo(torch.float32).eps


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def gapped(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Random, as a part of a larger tensor whose rest is NaN."""
    whole = poisoned(*shape[:-1], shape[-1] + 16, dtype=dtype)
    part = whole[..., : shape[-1]]
    part.copy_(scale * torch.randn(shape, device=DEVICE))
    return part


def assert_near(found: Tensor, exact: Tensor, single: Tensor | float) -> None:
    """single: what float32 arithmetic may be off by; then there is one rounding to the dtype of the result.

    Triton's interpreter (3.9) cuts bf16 off where a GPU rounds, which is twice the error.
    """
    assert found.isfinite().all()
    limits = torch.finfo(found.dtype)
    half = limits.eps if found.dtype == torch.bfloat16 and not GPU else limits.eps / 2
    last = exact.abs() * half * (1 + 1e-3) + limits.smallest_normal * limits.eps
    error = (found.double() - exact).abs()
    assert bool((error <= last + single).all()), f"off by {float((error - last - single).max()):.3g} more"


def exact_norm(value: Tensor, weight: Tensor | None, variance: int | None, plus_one: bool) -> Tensor:
    norm = value / (value[..., :variance].pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()
    return norm if weight is None else norm * (weight.double() + plus_one)


def sum_error(size: int) -> float:
    """Of a norm, relative to it: half the error of a sum of `size` squares by pairs, and a few operations."""
    return SINGLE * (math.log2(size) / 2 + 6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*NORMS, *HEADS])
@pytest.mark.parametrize("in_place", [None, False, True], ids=["alone", "residual", "in place"])
def test_cuda_norm(dtype: torch.dtype, shape: tuple[int, ...], in_place: bool | None) -> None:
    """With gaps between rows, and heads; what is not written in place stays, and so do the gaps."""
    torch.manual_seed(0)
    x, residual = gapped(*shape, dtype=dtype, scale=3), gapped(*shape, dtype=dtype)
    weight = torch.randn(shape[-1], device=DEVICE).to(dtype)
    before = x.clone(), residual.clone()
    value = x.double() if in_place is None else x.double() + residual.double()
    exact = exact_norm(value, weight, None, plus_one=False)
    other = None if in_place is None else residual
    assert can_norm(x, weight, other)
    norm, total = cuda_rms_norm(x, weight, EPSILON, other, in_place=bool(in_place))
    assert (norm.dtype, norm.shape) == (dtype, x.shape)
    assert_near(norm, exact, exact.abs() * sum_error(shape[-1]))
    assert (norm.data_ptr() == x.data_ptr()) == bool(in_place)
    if total is not None:
        assert_near(total, value, value.abs() * SINGLE)
        assert (total.data_ptr() == residual.data_ptr()) == bool(in_place)
    if not in_place:
        assert torch.equal(x, before[0])
        assert torch.equal(residual, before[1])
    for part in (x, residual):
        gap = torch.as_strided(part, (*shape[:-1], 16), part.stride(), part.storage_offset() + shape[-1])
        assert gap.isnan().all()


@pytest.mark.parametrize("options", [{"plus_one": True}, {"variance_size": 12}, {"weight": None}])
def test_cuda_norm_in_other_forms(options: dict) -> None:
    """Gemma's weights, a part of a row, no weights; a weight of another dtype than the rows."""
    torch.manual_seed(0)
    x = gapped(4, 20, dtype=torch.bfloat16)
    weight = torch.randn(20, device=DEVICE) if "weight" not in options else None
    rest = {name: value for name, value in options.items() if name != "weight"}
    assert can_norm(x, weight)
    norm, total = cuda_rms_norm(x, weight, EPSILON, **rest)
    exact = exact_norm(x.double(), weight, rest.get("variance_size"), rest.get("plus_one", False))
    # 1 + weight is rounded once more
    added = 0.0 if weight is None else (exact / (weight.double() + 1)).abs() * (1 + weight.abs()) * SINGLE
    assert total is None
    assert_near(norm, exact, exact.abs() * sum_error(20) + added)


def test_cuda_norm_of_no_rows() -> None:
    x = torch.empty(0, 20, device=DEVICE)
    norm, total = cuda_rms_norm(x, None, EPSILON, x.clone())
    assert total is not None
    assert norm.shape == total.shape == x.shape


def test_what_cuda_norms_do_not_cover() -> None:
    x = torch.zeros(2, 8, device=DEVICE)
    assert can_norm(x, None)
    assert not can_norm(x.T, None), "rows that are strided in memory"
    assert not can_norm(x.double(), None)
    assert not can_norm(x, torch.ones(4, device=DEVICE))
    assert not can_norm(x, None, x[:1])
    assert not can_norm(x, None, x.bfloat16())
    assert not can_norm(x[:1, :1].expand(1, LARGEST + 1).contiguous(), None)


def exact_rotation(x: Tensor, angles: Tensor, is_neox: bool) -> tuple[Tensor, Tensor]:
    """x: [rows, heads, size]; angles: [rows, width]. The result, and the sum of what each element is the sum of."""
    width = angles.shape[-1]
    cos, sin = angles.double()[:, None].chunk(2, -1)
    pairs = x.double()[..., :width].unflatten(-1, (2, -1) if is_neox else (-1, 2))
    axis = -2 if is_neox else -1
    a, b = pairs.unbind(axis)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), axis).flatten(-2)
    terms = torch.stack(((a * cos).abs() + (b * sin).abs(), (b * cos).abs() + (a * sin).abs()), axis).flatten(-2)
    rest = x.double()[..., width:]
    return torch.cat((turned, rest), -1), torch.cat((terms, rest.abs()), -1)


# rows, query heads, KV heads, elements of a head, of which rotated
ROTARY = [(1, 3, 1, 16, 16), (3, 5, 2, 20, 12), (2, 9, 9, 128, 128)] + (
    [(1, 32, 8, 128, 128), (64, 32, 8, 128, 64), (2048, 32, 8, 128, 128), (8192, 28, 4, 128, 128)] if GPU else []
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROTARY)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
def test_cuda_rotary(dtype: torch.dtype, shape: tuple[int, ...], is_neox: bool) -> None:
    """Query and key where they lie in one product; its values, and what is not rotated, stay bit for bit."""
    torch.manual_seed(0)
    rows, heads, kv_heads, size, width = shape
    joined = torch.randn(rows, (heads + 2 * kv_heads) * size, device=DEVICE).to(dtype)
    before = joined.clone()
    query, key, value = joined.split([heads * size, kv_heads * size, kv_heads * size], -1)
    table = torch.randn(50, width, device=DEVICE).to(dtype)
    positions = torch.randint(0, 50, (rows,), device=DEVICE)
    assert can_rotate(query, key, positions, table, size)
    cuda_rotate(query, key, positions, table, size, is_neox)
    old = before.split([heads * size, kv_heads * size, kv_heads * size], -1)
    for found, was in zip((query, key), old[:2], strict=True):
        turned, was = (x.unflatten(-1, (-1, size)) for x in (found, was))
        exact, terms = exact_rotation(was, table[positions], is_neox)
        assert_near(turned, exact, terms * 2 * SINGLE)
        assert torch.equal(turned[..., width:], was[..., width:])
    assert torch.equal(value, old[2])


def test_cuda_rotary_of_heads_and_of_a_query_alone() -> None:
    """As [rows, heads, size], with gaps between heads; the same bits."""
    torch.manual_seed(0)
    query, table = gapped(3, 4, 16, dtype=torch.bfloat16), torch.randn(8, 16, device=DEVICE)
    flat = query.flatten(1).clone()
    positions = torch.tensor([7, 0, 3], device=DEVICE)
    assert can_rotate(query, None, positions, table, 16)
    cuda_rotate(query, None, positions, table, 16, True)
    cuda_rotate(flat, None, positions, table, 16, True)
    assert flat.isfinite().all()
    assert torch.equal(query.flatten(1), flat)


def test_a_position_without_angles_is_a_row_of_nan() -> None:
    """Nothing is read on the host, and nothing outside of the table on the device."""
    whole = torch.ones(12, 8, device=DEVICE)
    table = whole[4:8]
    query = torch.ones(4, 8, device=DEVICE)
    cuda_rotate(query, None, torch.tensor([4, 3, -1, 0], device=DEVICE), table, 8, True)
    assert query.isnan().all(1).tolist() == [True, False, True, False]
    assert query[[1, 3]].isfinite().all()


def test_what_cuda_rotary_does_not_cover() -> None:
    query, table = torch.zeros(2, 32, device=DEVICE), torch.zeros(8, 16, device=DEVICE)
    positions = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    assert can_rotate(query, query, positions, table, 16)
    assert not can_rotate(query, query[:1], positions, table, 16)
    assert not can_rotate(query, None, positions, table, 12), "no whole heads"
    assert not can_rotate(query, None, positions.view(1, 2), table, 16)
    assert not can_rotate(query, None, positions.int(), table, 16)
    assert not can_rotate(query.double(), None, positions, table, 16)
    assert not can_rotate(query[:, ::2], None, positions, table, 16)


def exact_gate(gate: Tensor, form: Form) -> Tensor:
    if form == "silu":
        return gate * torch.sigmoid(gate)
    if form == "gelu":
        return gate * torch.special.ndtr(gate)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate * torch.sigmoid(2 * inner)


def gate_error(gate: Tensor, value: Tensor, form: Form, exact: Tensor) -> Tensor:
    """Of float32: an exponential of y is off by some |y| roundings, relative to the result, as far as there is one; the
    error function by a few, absolutely, which its sum with 1 makes one of the gate."""
    if form == "gelu":
        return (gate * value).abs() * 4 * SINGLE
    argument = gate if form == "silu" else 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    # below exp(-87) float32 has no more than zeros
    least = (gate * value).abs() * torch.finfo(torch.float32).smallest_normal
    return exact.abs() * (4 * argument.abs().clamp(max=100) + 8) * SINGLE + least


GATES = [(1, 8), (3, 20), (2, 1030)] + ([(1, 14336), (64, 14336), (2048, 14336), (8192, 3072)] if GPU else [])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GATES)
@pytest.mark.parametrize("form", ["silu", "gelu", "gelu_tanh"])
def test_cuda_gate(dtype: torch.dtype, shape: tuple[int, int], form: Form) -> None:
    """With gaps between rows; gates far from zero on both sides."""
    torch.manual_seed(0)
    x = gapped(shape[0], 2 * shape[1], dtype=dtype, scale=8)
    x[0, :2] = torch.tensor([-60.0, 60.0])
    gate, value = x.double().chunk(2, -1)
    assert can_gate(x)
    found = cuda_gate(x, form)
    assert (found.dtype, tuple(found.shape)) == (dtype, shape)
    exact = exact_gate(gate, form) * value
    assert_near(found, exact, gate_error(gate, value, form, exact))


def test_large_programs_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a program is chosen by the work, and no value depends on it."""
    from vllm_gaudi_ucm.ops.silu_and_mul.impl.cuda import gate as cuda

    x = gapped(3, 2 * 1030, dtype=torch.bfloat16)
    assert MANY > 3 * 1030
    small = cuda_gate(x)
    monkeypatch.setattr(cuda, "MANY", 1)
    assert torch.equal(cuda_gate(x), small)


def test_gates_of_any_number_of_dimensions() -> None:
    x = torch.randn(2, 3, 8, device=DEVICE)
    assert torch.equal(cuda_gate(x), cuda_gate(x.flatten(0, 1)).unflatten(0, (2, 3)))
    assert torch.equal(cuda_gate(x[0, 0]), cuda_gate(x)[0, 0])
    assert cuda_gate(x[:, :0]).shape == (2, 0, 4)
    assert not can_gate(x.transpose(0, 1))
    assert not can_gate(x[0, :, ::2])
    assert not can_gate(x.double())


def test_the_kernels_that_are_measured() -> None:
    """Both sides of the benchmark compute, at the sizes of an 8B shape: what they return is finite."""
    names = []
    for name, ours, by_torch, moved in layers_cuda.kernels(2, DEVICE):
        names.append(name)
        for call in (ours, by_torch):
            found = call()
            results = [found] if isinstance(found, Tensor) else [x for x in found or () if x is not None]
            assert all(bool(x.isfinite().all()) for x in results)
        assert moved > 0
    assert len(set(names)) == 6


@pytest.mark.parametrize(("rows", "vocab_size"), [(3, 5), (2, 5000)] + ([(64, 151936)] if GPU else []))
def test_noise_of_rows(rows: int, vocab_size: int) -> None:
    """Of the same hash: the float64 noise has its upper 32 bits from the keys that it is given second."""
    keys = torch.from_numpy(row_keys(np.arange(rows) - 1, np.arange(rows) * 7)).to(DEVICE)
    mixes = torch.from_numpy(token_mixes(vocab_size)).to(DEVICE)
    exact = exponential_noise_double(keys, keys, mixes)
    found = cuda_noise(keys, mixes)
    # the numbers are rounded to float32 before the logarithm, which matters where they are close to 1
    uniform = -torch.expm1(-exact)
    rounding = 2.0**-24 / (1 - uniform).clamp(min=2.0**-24) + 2.0**-32 / (1 - uniform)
    assert_near(found, exact, rounding + 4 * SINGLE * exact + 2.0**-32)
