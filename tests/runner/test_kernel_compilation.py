"""Which buckets are computed for their kernels before any graph is captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.ops.side_by_side import FoundKernels
from vllm_gaudi_ucm.runner import kernel_compilation
from vllm_gaudi_ucm.runner.kernel_compilation import KernelCompilation, compile_kernels

LARGEST, SMALL = ForwardShape.of(True, 2048, 8, 8), ForwardShape.of(False, 1, 0, 2)


class Execution:
    """Notes what is computed."""

    def __init__(self, compiles: bool = True) -> None:
        self.compiles_kernels = compiles
        self.computed: list[Any] = []

    def compute_pads(self, shape: ForwardShape) -> None:
        self.computed.append(shape)

    def compute_remainders(self) -> None:
        self.computed.append("remainders")


class Agreement:
    """Of two workers; the other one has found what it is told."""

    def __init__(self, other: bool) -> None:
        self.other = other

    def all_of(self, is_true: bool) -> bool:
        return is_true and self.other

    def most(self, value: int) -> int:
        return value


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many kernels of each computation are not on disk."""
    numbers: list[int] = []

    @contextmanager
    def found(progress: Any) -> Iterator[FoundKernels]:
        yield FoundKernels(dict.fromkeys("ab"), numbers.pop(0))  # type: ignore[arg-type]

    monkeypatch.setattr(kernel_compilation, "compiled_side_by_side", found)
    return numbers


def compiled(executions: list[Execution], agree: bool = True) -> KernelCompilation:
    return compile_kernels(executions, [LARGEST], lambda: [SMALL], Agreement(agree))  # type: ignore[arg-type]


def test_on_a_first_start_every_bucket_and_both_models(missing: list[int]) -> None:
    target, draft = Execution(), Execution()
    missing += [2, 1]
    found = compiled([target, draft])
    assert (found.found, found.compiled) == (4, 3)
    assert target.computed == [LARGEST, SMALL, "remainders"]
    assert draft.computed == [LARGEST, SMALL]


def test_on_a_second_start_the_largest_alone(missing: list[int]) -> None:
    target = Execution()
    missing += [0]
    found = compiled([target])
    assert (found.found, found.compiled) == (2, 0)
    assert target.computed == [LARGEST]


def test_workers_compute_the_same_buckets(missing: list[int]) -> None:
    """Where another one had to compile, this one takes part in what it computes."""
    target = Execution()
    missing += [0, 0]
    compiled([target], agree=False)
    assert target.computed == [LARGEST, SMALL, "remainders"]


def test_nothing_is_computed_where_kernels_are_not_compiled() -> None:
    target = Execution(compiles=False)
    assert compiled([target]) == KernelCompilation()
    assert not target.computed
