"""Mixture of experts against float64: every implementation, every gate, garbage, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.moe import GPT_OSS, GPU, Case, assert_near, make_case
from tests.ops.oracle import CUDA_RUNS, examples
from vllm_gaudi_ucm.ops.cpu.native.call_graph.call_graph import capture
from vllm_gaudi_ucm.ops.cpu.native.call_graph.memory import MemoryPool
from vllm_gaudi_ucm.ops.cpu.packed_linear.api import can_pack
from vllm_gaudi_ucm.ops.moe.api import Experts, mixture_of_experts, pack_experts, prepare_experts
from vllm_gaudi_ucm.ops.moe.implementation import MOE, ExpertWeights
from vllm_gaudi_ucm.ops.moe.spec import MoeSpec

SPECS = (
    MoeSpec(),
    MoeSpec("gelu"),
    MoeSpec("gelu_tanh", interleaved=True),
    MoeSpec(limit=0.5, bias=True),
    GPT_OSS,
)
OTHERS = ("reference", "cpu", "packed", "grouped")
# under Triton's interpreter its kernels alone
IMPLEMENTATIONS = (*(() if CUDA_RUNS and not GPU else OTHERS), *(("cuda",) if CUDA_RUNS else ()))


def prepared(case: Case, implementation: str) -> Experts:
    if implementation == "packed":
        packed = pack_experts(case.weights, case.spec)
        assert packed is not None, "the caller asks `can_pack`"
        return packed
    on_gpu = GPU and implementation in ("cuda", "grouped")
    weights = ExpertWeights(*(each.cuda() if on_gpu and each is not None else each for each in case.weights))
    return prepare_experts(weights, case.spec, implementation=implementation)


def run(case: Case, implementation: str, experts: Experts | None = None) -> Tensor:
    experts = experts or prepared(case, implementation)
    given = (each.to(experts.device) for each in (case.x, case.ids, case.shares))
    found = mixture_of_experts(*given, experts)
    assert (found.dtype, found.shape) == (case.x.dtype, case.x.shape)
    return found.cpu()


def supported(spec: MoeSpec, implementation: str) -> bool:
    return implementation == "packed" or MOE.make(implementation).supports(spec)


CASES = [(spec, name) for spec in SPECS for name in IMPLEMENTATIONS if supported(spec, name)]


@pytest.mark.parametrize(("spec", "implementation"), CASES, ids=lambda value: str(value))
def test_experts_cuda_and_others(spec: MoeSpec, implementation: str) -> None:
    """covers: A1"""
    for rows, absent in ((1, 0.0), (5, 0.0), (7, 0.4), (3, 1.0)):
        case = make_case(spec, rows, absent=absent, seed=rows)
        assert_near(case, run(case, implementation))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_half_precision_cuda_and_others(dtype: torch.dtype, implementation: str) -> None:
    case = make_case(MoeSpec(), 6, dtype=dtype)
    if implementation == "packed" and not can_pack(case.weights.w13):
        pytest.skip("this CPU packs no weights of the dtype")
    assert_near(case, run(case, implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_any_sizes_cuda_and_others(implementation: str, data: st.DataObject) -> None:
    """Sizes that no tile divides, one expert, all experts, more rows than a tile has."""
    experts = data.draw(st.integers(1, 9))
    case = make_case(
        MoeSpec(),
        data.draw(st.integers(0, 70)),
        experts,
        data.draw(st.integers(1, experts)),
        # torch's grouped product wants strides of 16 bytes
        4 * data.draw(st.integers(1, 20)),
        4 * data.draw(st.integers(1, 20)),
        seed=data.draw(st.integers(0, 9)),
        absent=data.draw(st.sampled_from([0.0, 0.3])),
    )
    found = run(case, implementation)
    if len(found):
        assert_near(case, found)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_garbage_stays_where_it_is_cuda_and_others(implementation: str) -> None:
    """NaN in a padded row, in a row with experts, and in an expert that nobody chose. covers: A9"""
    case = make_case(GPT_OSS if implementation != "grouped" else MoeSpec(), 6)
    case.ids[case.ids == 3] = 0
    case.ids[4] = 4  # of no expert
    clean = run(case, implementation)
    assert not clean[4].any()
    for each in case.weights:
        if each is not None:
            each[3] = float("nan")
    case.x[4], case.shares[4], case.x[2] = float("nan"), float("nan"), float("nan")
    found = run(case, implementation)
    assert found[2].isnan().all()
    rest = [0, 1, 3, 4, 5]
    torch.testing.assert_close(found[rest], clean[rest], rtol=1e-5, atol=1e-5)
    assert not found[4].any()


def test_a_row_is_the_same_whatever_stands_beside_it() -> None:
    """On a CPU to the last bit where products are: sums go over experts in the order of their numbers."""
    case = make_case(MoeSpec(), 9, experts=3)
    both = run(case, "reference")
    torch.testing.assert_close(run(case._replace(ids=case.ids.flip(1), shares=case.shares.flip(1)), "cpu"), both)


def test_what_is_chosen() -> None:
    assert MOE.choose("auto", "cpu", MoeSpec()).name == "cpu"
    assert MOE.choose("auto", "cpu", MoeSpec(), captured=True).name == "reference"
    assert MOE.choose("auto", "meta", GPT_OSS).name == "reference"
    with pytest.raises(ValueError, match=r"no implementation of weights=fp8 on cpu"):
        MOE.choose("auto", "cpu", MoeSpec(weights="fp8"))
    with pytest.raises(ValueError, match="form is 'relu'"):
        MoeSpec("relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="limit is -1"):
        MoeSpec(limit=-1)
    with pytest.raises(ValueError, match="belong to the form silu"):
        MoeSpec("gelu", alpha=2.0)


def test_experts_are_in_no_native_graph() -> None:
    """Which rows an expert gets differs from step to step."""
    case = make_case(MoeSpec())
    experts = prepared(case, "cpu")
    found = capture(lambda: mixture_of_experts(case.x, case.ids, case.shares, experts), MemoryPool(), {})
    assert found.graph is None


def test_a_compiled_layer_has_the_reference() -> None:
    case = make_case(MoeSpec())
    experts = prepared(case, "cpu")
    compiled = torch.compile(lambda *rows: mixture_of_experts(*rows, experts), backend="eager", fullgraph=True)
    assert_near(case, compiled(case.x, case.ids, case.shares))


CHANGES: list[tuple[Callable[[Case], Any], str]] = [
    (lambda c: c._replace(x=c.x[:, :8]), "x is torch.float32 (5, 8) on cpu, expected torch.float32 [rows, 16]"),
    (lambda c: c._replace(x=c.x.double()), "expected torch.float32 [rows, 16]"),
    (lambda c: c._replace(ids=c.ids.float()), "ids are torch.float32 (5, 2) on cpu, expected integers [5, chosen]"),
    (lambda c: c._replace(shares=c.shares[:3]), "shares are torch.float32 (3, 2) on cpu, expected floats (5, 2)"),
    (lambda c: c._replace(ids=c.ids.to("meta")), "ids on meta"),
]


@pytest.mark.parametrize(("change", "says"), CHANGES)
def test_rows_that_do_not_fit(change: Callable[[Case], Case], says: str) -> None:
    case = make_case(MoeSpec())
    experts = prepared(case, "cpu")
    x, ids, shares, *_ = change(case)
    with pytest.raises(ValueError, match="mixture_of_experts") as error:
        mixture_of_experts(x, ids, shares, experts)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"w2": torch.zeros(4, 16, 25)}, r"w2 torch.float32 \(4, 16, 25\) on cpu; expected \[experts, 2 \* inner"),
        ({"w2": torch.zeros(4, 16, 24).half()}, "expected one dtype"),
        ({"w13": torch.zeros(4, 48)}, "three dimensions"),
        ({"w13_bias": torch.zeros(4, 48)}, "w13_bias is there, spec.bias False"),
        ({"w13": torch.zeros(0, 48, 16), "w2": torch.zeros(0, 16, 24)}, "at least one expert"),
    ],
)
def test_weights_that_do_not_fit(change: dict[str, Tensor], says: str) -> None:
    case = make_case(MoeSpec())
    with pytest.raises(ValueError, match=says):
        prepare_experts(case.weights._replace(**change), case.spec)
    with pytest.raises(ValueError, match="w13_bias is missing"):
        prepare_experts(case.weights, MoeSpec(bias=True))
    biased = make_case(MoeSpec(bias=True))
    with pytest.raises(ValueError, match=r"w2_bias is .*expected \[4, 16\]"):
        prepare_experts(biased.weights._replace(w2_bias=torch.zeros(4, 3)), biased.spec)
