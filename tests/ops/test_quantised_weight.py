"""What a quantised weight means, and how codes are unpacked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.quantised import exact, random_weight
from vllm_gaudi_ucm.ops.quantised_linear import weight as module
from vllm_gaudi_ucm.ops.quantised_linear.weight import (
    E2M1,
    QuantisedWeight,
    dequantise,
    scales_of_exponents,
    unpack_e2m1,
    unpack_integers,
)

CODES = (torch.float8_e4m3fn, torch.int8, torch.uint8)


@settings(max_examples=60, deadline=None)
@given(
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 40),
    block=st.tuples(st.sampled_from((1, 3, 8, 64)), st.sampled_from((1, 5, 16, 64))),
    codes=st.sampled_from(CODES),
    chunk=st.sampled_from((1, 7, 2048)),
)
def test_each_element_is_rounded_once(
    outputs: int, inputs: int, block: tuple[int, int], codes: torch.dtype, chunk: int
) -> None:
    """Blocks that end within the weight, and weights that are written in parts, included."""
    weight = random_weight(outputs, inputs, block, codes)
    weight.check()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_ROWS", chunk)
        for dtype in (torch.float32, torch.bfloat16):
            found = dequantise(weight, dtype)
            assert found.isfinite().all()
            # float64 to float32 to bfloat16 is what the definition says, too
            assert torch.equal(found, exact(weight).float().to(dtype))


def test_scales_of_another_weight() -> None:
    weight = random_weight(8, 16, (1, 8), torch.int8)
    with pytest.raises(ValueError, match=r"scales of \(8, 2\), expected \(8, 4\)"):
        weight._replace(block=(1, 4)).check()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_integers_in_words(bits: int, dim: int) -> None:
    """The highest bit of a word is its sign, and none of its neighbours'."""
    codes = torch.randint(1 << bits, (32, 64))
    shifts = torch.arange(0, 32, bits)
    words = (codes.movedim(dim, -1).unflatten(-1, (-1, 32 // bits)) << shifts).sum(-1)
    packed = words.to(torch.uint32).view(torch.int32).movedim(-1, dim)
    assert bool((packed < 0).any())
    assert torch.equal(unpack_integers(packed, bits, dim).long(), codes)


def test_integers_that_are_not_packed_evenly() -> None:
    with pytest.raises(ValueError, match="3 bits"):
        unpack_integers(torch.zeros(1, 1, dtype=torch.int32), 3, 0)


def test_floats_of_four_bits() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    found = unpack_e2m1((codes[::2] | codes[1::2] << 4).reshape(1, 8))
    assert found.float().flatten().tolist() == [*E2M1, *(-value for value in E2M1)]


def test_exponents() -> None:
    found = scales_of_exponents(torch.tensor([0, 126, 127, 254, 255], dtype=torch.uint8))
    assert found[:4].tolist() == [2.0**-127, 0.5, 1.0, 2.0**127]
    assert found[4].isnan()


def test_zeros_of_a_weight_are_its_own() -> None:
    codes = torch.full((2, 4), 5, dtype=torch.uint8)
    weight = QuantisedWeight(codes, torch.ones(2, 1), (1, 4), torch.tensor([[5], [3]]))
    assert dequantise(weight, torch.float32).tolist() == [[0.0] * 4, [2.0] * 4]
