"""The demo's load: the same for the same seed, and the mix that the command promises."""

from __future__ import annotations

from collections import Counter

import pytest

from vllm_gaudi_ucm_tools.demo.load import GUIDE, LONG, MIN_REQUESTS, MUSEUM, SAMPLED, SHORT, build_load


def test_the_same_seed_gives_the_same_load() -> None:
    assert build_load(24, seed=3) == build_load(24, seed=3)
    assert build_load(24, seed=3) != build_load(24, seed=4)


@pytest.mark.parametrize("requests", [MIN_REQUESTS, 5, 24, 100])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_kind_is_in_the_load(requests: int, seed: int) -> None:
    load = build_load(requests, seed)
    kinds = Counter(request.kind for request in load)
    assert len(load) == requests
    assert set(kinds) == {LONG, SAMPLED, GUIDE, SHORT}
    assert kinds[SAMPLED] == 1


def test_the_default_load_shares_a_system_prompt_among_many() -> None:
    guides = [request for request in build_load(24, 0) if request.kind == GUIDE]
    assert len(guides) >= 10
    assert {request.messages[0] for request in guides} == {("system", MUSEUM)}
    assert len(MUSEUM.split()) > 250
    assert len({request.question for request in guides}) >= 8


def test_long_prompts_are_long_and_differ() -> None:
    long = [request for request in build_load(24, 0) if request.kind == LONG]
    assert len(long) >= 2
    assert len({request.question for request in long}) == len(long)
    # A tokenizer yields at least one token per word and one per comma or full stop: more than 2000 tokens are certain.
    for request in long:
        assert len(request.question.replace(",", " ,").replace(".", " .").split()) > 1400


def test_several_samples_are_drawn_and_the_rest_is_greedy() -> None:
    load = build_load(24, 0)
    assert [request.n for request in load if request.kind == SAMPLED] == [3]
    assert all(request.temperature > 0 for request in load if request.n > 1)
    assert all(request.temperature == 0 for request in load if request.n == 1)


def test_arrivals_are_spread_and_in_order() -> None:
    arrivals = [request.arrival_s for request in build_load(24, 0)]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
    assert 3 < arrivals[-1] < 30
    assert len(set(arrivals)) == len(arrivals)


def test_too_few_requests_name_the_option() -> None:
    with pytest.raises(ValueError, match="--requests: found 3, expected a number >= 4"):
        build_load(3, 0)
