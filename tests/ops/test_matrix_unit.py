"""The switch of the CPU's matrix unit: off and on where there is one, a reason where there is none."""

from __future__ import annotations

import pytest

from vllm_gaudi_ucm.ops.cpu.native import matrix_unit
from vllm_gaudi_ucm.ops.cpu.native.library import native, why_not_native


def test_it_is_used_unless_switched_off() -> None:
    assert matrix_unit.in_use() == matrix_unit.available()
    with matrix_unit.using(False):
        assert not matrix_unit.in_use()
        with matrix_unit.using(True):
            assert matrix_unit.in_use() == matrix_unit.available()
        assert not matrix_unit.in_use()
    assert matrix_unit.in_use() == matrix_unit.available()


def test_a_missing_one_has_a_reason() -> None:
    assert bool(matrix_unit.why_not()) != matrix_unit.available()


def test_without_kernels_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_unit, "native", lambda: None)
    monkeypatch.setattr(matrix_unit, "why_not_native", lambda: "no C++ compiler")
    matrix_unit.use(True)
    assert not matrix_unit.in_use()
    assert matrix_unit.why_not() == "no C++ compiler"


@pytest.mark.skipif(native() is None, reason=why_not_native())
@pytest.mark.parametrize(("answer", "words"), [(0, "the CPU has no matrix unit"), (1, "does not let this process")])
def test_reasons_say_who_refuses(monkeypatch: pytest.MonkeyPatch, answer: int, words: str) -> None:
    class Library:
        def ucm_matrix_tiles(self) -> int:
            return answer

    monkeypatch.setattr(matrix_unit, "native", Library)
    assert words in matrix_unit.why_not()
    assert not matrix_unit.available()
