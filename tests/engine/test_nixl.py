"""vLLM's NixlConnector with keys and values in two regions: prompts of one engine, decoded by another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.any_connector import OPTIONS, PROMPTS, SHAPES, STATIC
from tests.engine.multi_connector import multi, ours
from tests.engine.nixl_pair import decode, finish_steps, new_side_channel, nixl, prefill
from tests.engine.serving import Answer, Engine, assert_same
from tests.ports import free_port

pytest.importorskip("nixl", reason="the package nixl is not installed")
pytestmark = pytest.mark.slow  # starts engines

OUTPUTS = 8


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[Answer]:
    with Engine(tiny_llama, **OPTIONS) as engine:
        return engine.alone(PROMPTS, OUTPUTS)


@SHAPES
def test_tokens_after_blocks_of_another_engine(
    tiny_llama: Path, expected: list[Answer], monkeypatch: pytest.MonkeyPatch, ucm: dict[str, Any]
) -> None:
    """The second engine computes the last token of a prompt alone, and the first one gets its blocks back."""
    new_side_channel(monkeypatch)
    with Engine(tiny_llama, ucm, kv_transfer_config=nixl("kv_producer"), **OPTIONS) as first:
        new_side_channel(monkeypatch)
        with Engine(tiny_llama, ucm, kv_transfer_config=nixl("kv_consumer"), **OPTIONS) as second:
            found = []
            for prompt in PROMPTS:
                # other bytes than zeros where blocks are to arrive
                second.poison()
                second.llm.reset_prefix_cache()
                found.append(decode(second, prompt, prefill(first, prompt), OUTPUTS, first))
            second.check_idle()
            finish_steps(first)
    assert_same([one.answer for one in found], expected)
    assert [one.computed for one in found] == [OUTPUTS] * len(PROMPTS)


def test_blocks_that_do_not_fit_and_an_engine_that_ends(
    tiny_llama: Path, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends other blocks than the first engine named loses its blocks, not the engine; and so does one
    whose first engine has ended before its blocks are read.
    """
    new_side_channel(monkeypatch)
    config = nixl("kv_consumer", kv_load_failure_policy="recompute")
    with Engine(tiny_llama, kv_transfer_config=config, **OPTIONS) as second:
        new_side_channel(monkeypatch)
        with Engine(tiny_llama, kv_transfer_config=nixl("kv_producer"), **OPTIONS) as first:
            right = prefill(first, PROMPTS[3])
            for wrong in ([[1]], [[1], [2]], [[10**6 + number for number in range(11)]]):
                found = decode(second, PROMPTS[3], {**right, "remote_block_ids": wrong}, OUTPUTS, first)
                assert_same([found.answer], expected[3:4])
                second.llm.reset_prefix_cache()
            found = decode(second, PROMPTS[3], prefill(first, PROMPTS[3]), OUTPUTS, first)
            assert_same([found.answer], expected[3:4])
            assert found.computed == OUTPUTS
            lost = prefill(first, PROMPTS[2])
        found = decode(second, PROMPTS[2], lost, OUTPUTS)
        assert_same([found.answer], expected[2:3])
        assert_same(second.alone(PROMPTS[1:2], OUTPUTS), expected[1:2])
        second.check_idle()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_an_engine_that_is_gone(
    tiny_llama: Path, expected: list[Answer], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """The request is computed, or it ends with an error; either way the engine answers the next one."""
    transfer = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "gone",
        "remote_request_id": "gone-1",
        "remote_host": "127.0.0.1",
        "remote_port": free_port(),
        "tp_size": 1,
    }
    new_side_channel(monkeypatch)
    config = nixl("kv_consumer", kv_load_failure_policy=policy)
    with Engine(tiny_llama, kv_transfer_config=config, **OPTIONS) as engine:
        found = decode(engine, PROMPTS[1], transfer, OUTPUTS).answer
        if policy == "recompute":
            assert_same([found], expected[1:2])
        else:
            assert found.tokens == []
        assert_same(engine.alone(PROMPTS[2:], OUTPUTS), expected[2:])
        engine.check_idle()


def test_as_a_child_of_multi_connector(
    tiny_llama: Path, expected: list[Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prompts come from the other engine first, then from our store, in which they were kept on arrival."""
    child = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    new_side_channel(monkeypatch)
    with Engine(tiny_llama, kv_transfer_config=nixl("kv_producer"), **OPTIONS) as first:
        new_side_channel(monkeypatch)
        with Engine(tiny_llama, STATIC, kv_transfer_config=multi(child, ours(tmp_path)), **OPTIONS) as second:
            found = [decode(second, prompt, prefill(first, prompt), OUTPUTS, first) for prompt in PROMPTS]
            assert_same([one.answer for one in found], expected)
            assert [one.computed for one in found] == [OUTPUTS] * len(PROMPTS)
            second.llm.reset_prefix_cache()
            again = second.alone(PROMPTS, OUTPUTS)
    assert_same(again, expected)
    assert [answer.cached_tokens for answer in again] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
