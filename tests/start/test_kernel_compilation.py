"""Which buckets are computed for their kernels before any graph is captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.ops.cuda import side_by_side
from vllm_gaudi_ucm.ops.cuda.side_by_side import FoundKernels
from vllm_gaudi_ucm.start.kernel_compilation import KernelCompilation, compile_kernels

LARGEST, SMALL = ForwardShape.from_sizes(True, 2048, 8, 8), ForwardShape.from_sizes(False, 1, 0, 2)


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


class Starts:
    """How many kernels of each computation are not on disk, and what earlier starts have marked."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark
        self.missing: list[int] = []
        self.kernels = dict.fromkeys("ab")

    @contextmanager
    def found(self, progress: Any) -> Iterator[FoundKernels]:
        found = FoundKernels(self.kernels, self.missing.pop(0))  # type: ignore[arg-type]
        found.mark = lambda: self.mark  # type: ignore[method-assign]
        yield found


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Starts:
    made = Starts(tmp_path / "kernels/mark")
    monkeypatch.setattr(side_by_side, "compiled_side_by_side", made.found)
    return made


def compiled(executions: list[Execution], agree: bool = True) -> KernelCompilation:
    return compile_kernels(executions, [LARGEST], lambda: [SMALL], Agreement(agree))  # type: ignore[arg-type]


def test_on_a_first_start_every_bucket_and_both_models_at_once(starts: Starts) -> None:
    target, draft = Execution(), Execution()
    starts.missing = [2]
    found = compiled([target, draft])
    assert (found.found, found.compiled) == (2, 2)
    assert target.computed == [LARGEST, SMALL, "remainders"]
    assert draft.computed == [LARGEST, SMALL]
    assert starts.mark.exists()


def test_on_a_second_start_the_largest_alone(starts: Starts) -> None:
    starts.missing = [2, 0]
    compiled([Execution()])
    target = Execution()
    found = compiled([target])
    assert (found.found, found.compiled) == (2, 0)
    assert target.computed == [LARGEST]


def test_kernels_that_were_deleted_beside_the_mark(starts: Starts) -> None:
    target = Execution()
    starts.missing = [2, 1, 1]
    compiled([Execution()])
    found = compiled([target])
    assert (found.found, found.compiled) == (4, 2)
    assert target.computed == [LARGEST, SMALL, "remainders"]


def test_a_process_that_has_all_kernels_computes_the_largest_alone(starts: Starts) -> None:
    target = Execution()
    starts.missing, starts.kernels = [0], {}
    compiled([target])
    assert target.computed == [LARGEST]
    assert not starts.mark.exists()


@pytest.mark.parametrize("is_marked", [True, False])
def test_workers_compute_the_same_buckets(starts: Starts, is_marked: bool) -> None:
    """Where another one looks for more or had to compile, this one takes part in what it computes."""
    target = Execution()
    starts.missing = [0, 0]
    if is_marked:
        starts.mark.parent.mkdir()
        starts.mark.touch()
    compiled([target], agree=False)
    assert target.computed == [LARGEST, SMALL, "remainders"]


def test_a_folder_that_nobody_may_write_to(starts: Starts) -> None:
    starts.missing = [2, 2]
    starts.mark.parent.write_text("a file")
    for _ in range(2):
        target = Execution()
        compiled([target])
        assert target.computed == [LARGEST, SMALL, "remainders"]


def test_nothing_is_computed_where_kernels_are_not_compiled() -> None:
    target = Execution(compiles=False)
    assert compiled([target]) == KernelCompilation()
    assert not target.computed
