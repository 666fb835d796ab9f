"""Calls of kernels that were recorded run again with what their tensors hold then."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from vllm_gaudi_ucm.ops.cpu.native import library
from vllm_gaudi_ucm.ops.cpu.native.call_list import KERNELS, CallList, record_call

pytestmark = pytest.mark.skipif(library.native() is None, reason=library.why_not_native())


def recorded(name: str, *arguments: Any) -> tuple[CallList, int | None]:
    """The call as it was made, and what it returned."""
    kernels = library.native()
    assert kernels is not None
    returned = getattr(kernels, name)(*arguments)
    call, kept = record_call(name, arguments, {})
    return CallList([call], kept), returned


def test_every_kernel_that_is_numbered_has_room_for_its_arguments() -> None:
    assert sorted(kernel.number for kernel in KERNELS.values()) == list(range(len(KERNELS)))
    assert all(len(library.argument_types(name)) <= 13 for name in KERNELS)


def test_addresses_integers_and_floats_arrive() -> None:
    """The norm depends on all three: with a large epsilon on its bits, too."""
    torch.manual_seed(0)
    x, weight, out = torch.randn(3, 67), torch.randn(67), torch.full((3, 67), torch.nan)
    calls, _ = recorded("ucm_rms_norm", x.data_ptr(), 67, None, 0, weight.data_ptr(), out.data_ptr(), 3, 67, 0.37)
    for _ in range(2):
        x.normal_()
        out.fill_(torch.nan)
        assert calls.run_calls()
        expected = torch.rms_norm(x.double(), (67,), weight.double(), 0.37)
        torch.testing.assert_close(out.double(), expected, rtol=40 * torch.finfo(torch.float32).eps, atol=1e-12)


def test_a_call_that_returns_something_else_stops_the_rest() -> None:
    """A position without angles: the rotation says which row, and what follows does not run."""
    query, key, angles = torch.randn(2, 8), torch.randn(2, 8), torch.randn(5, 8)
    positions = torch.tensor([1, 4])
    arguments = (query.data_ptr(), 8, 1, key.data_ptr(), 8, 1, positions.data_ptr(), 2, angles.data_ptr(), 5, 8, 8)
    rotation, returned = recorded("ucm_rotary", *arguments)
    assert returned == -1
    assert rotation.run_calls()
    x, out = torch.randn(1, 8), torch.zeros(1, 4)
    gate = (x.data_ptr(), 8, out.data_ptr(), 1, 4)
    both = CallList([record_call("ucm_rotary", arguments, {})[0], record_call("ucm_silu_and_mul", gate, {})[0]])
    positions[1] = 5
    assert not rotation.run_calls()
    assert not both.run_calls()
    assert not out.any()
    positions[1] = 0
    assert both.run_calls()
    assert out.any()


def test_structures_are_copied_unless_something_stands_in_for_them() -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("first", ctypes.c_int64), ("second", ctypes.c_int64))

    copied, replaced, stand_in = Pair(1, 2), Pair(3, 4), Pair(5, 6)
    arguments = (ctypes.byref(replaced), ctypes.byref(copied), ctypes.byref(copied))
    call, kept = record_call("ucm_attend", arguments, {id(replaced): stand_in})
    copied.first = 9
    passed = [Pair.from_address(address) for address in call.arguments[:3]]
    assert [(pair.first, pair.second) for pair in passed] == [(5, 6), (1, 2), (1, 2)]
    stand_in.first = 7
    assert passed[0].first == 7
    assert len(kept) == 3
