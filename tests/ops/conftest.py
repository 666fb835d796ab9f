"""Fixtures of all tests of the operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_gaudi_ucm.registry import is_installed


@pytest.fixture(autouse=True)
def unmeasured_products() -> Iterator[None]:
    """The rule chooses the way of a product: times that an engine measured in this process differ by machine."""
    if not is_installed("vllm_gaudi_ucm.ops.cpu.packed_linear.way"):
        yield
        return
    from vllm_gaudi_ucm.ops.cpu.packed_linear.way import set_times

    set_times({})
    yield
    set_times({})
