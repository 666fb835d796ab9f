"""Which graphs are executed after a warm-up that only compiled."""

from __future__ import annotations

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShape
from vllm_gaudi_ucm.graphs.warm_up.extremes import extremes


def shape(phase: str, rows: int, shared: int = 0, unique: int = 0) -> ForwardShape:
    return ForwardShape(phase, rows, shared, unique)


def test_the_ends_of_each_phase_in_order() -> None:
    small, middle, large = (shape("--u", rows, unique=rows) for rows in (1, 4, 16))
    only = shape("c--", 128)
    remainders = [RemainderShape(shape("cs-", 16, shared)) for shared in (1, 2, 8)]
    keys = [large, 8, middle, only, *remainders, small, 1, 64]
    assert extremes(keys) == [large, only, remainders[0], remainders[2], small, 1, 64]


def test_a_prompt_remainder_is_no_bucket_of_its_size() -> None:
    one = shape("cs-", 16, 2)
    assert extremes([one, RemainderShape(one)]) == [one, RemainderShape(one)]


def test_nothing_is_warm() -> None:
    assert extremes([]) == []
