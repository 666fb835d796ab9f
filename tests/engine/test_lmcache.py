"""vLLM's LMCacheConnectorV1 with copies of pairs: prompts come back from LMCache's memory and disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from tests.engine.any_connector import OPTIONS, PROMPTS, SHAPES, STATIC
from tests.engine.lmcache_engine import alone, forget_options, lmcache
from tests.engine.multi_connector import multi, ours
from tests.engine.serving import Answer, Engine, answer_of, assert_same, greedy_params
from tests.ports import free_port
from vllm_gaudi_ucm.options.errors import UcmConfigError

pytest.importorskip("lmcache", reason="the package lmcache is not installed")
pytestmark = pytest.mark.slow  # starts engines

OUTPUTS = 8
CHUNK = 32


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[Answer]:
    with Engine(tiny_llama, **OPTIONS) as engine:
        return engine.alone(PROMPTS, OUTPUTS)


@pytest.fixture(autouse=True)
def _own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_options(monkeypatch)


def wait_for_files(folder: Path, count: int) -> None:
    """LMCache writes to a disk in a thread of its own."""
    end = time.monotonic() + 20
    while len([*folder.rglob("*.pt")]) < count and time.monotonic() < end:
        time.sleep(0.02)


@SHAPES
def test_prompts_from_its_memory(tiny_llama: Path, expected: list[Answer], ucm: dict[str, Any]) -> None:
    with Engine(tiny_llama, ucm, kv_transfer_config=alone(), **OPTIONS) as engine:
        assert_same(engine.alone(PROMPTS, OUTPUTS), expected)
        engine.poison()
        engine.llm.reset_prefix_cache()
        again = engine.alone(PROMPTS, OUTPUTS)
        engine.check_idle()
    assert_same(again, expected)
    assert [answer.cached_tokens for answer in again] == [len(prompt) // CHUNK * CHUNK for prompt in PROMPTS]


def test_prompts_from_its_disk(tiny_llama: Path, expected: list[Answer], tmp_path: Path) -> None:
    """Its memory has room for two chunks, and the disk has the rest."""
    disk = {"local_disk": f"file://{tmp_path}/", "max_local_disk_size": 0.0625, "local_cpu": False}
    with Engine(tiny_llama, kv_transfer_config=alone(**disk), **OPTIONS) as engine:
        engine.alone(PROMPTS, OUTPUTS)
        wait_for_files(tmp_path, sum(len(prompt) // CHUNK for prompt in PROMPTS))
        engine.poison()
        engine.llm.reset_prefix_cache()
        again = engine.alone(PROMPTS, OUTPUTS)
    assert_same(again, expected)
    assert [answer.cached_tokens for answer in again] == [len(prompt) // CHUNK * CHUNK for prompt in PROMPTS]


def test_other_cache_salts_find_nothing(tiny_llama: Path, expected: list[Answer]) -> None:
    """LMCache's own keys do not contain the salt."""
    prompt, found = PROMPTS[3], []
    with Engine(tiny_llama, kv_transfer_config=alone(), **OPTIONS) as engine:
        for salt in ("one", "one", "two", None, None):
            salted = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
            (output,) = engine.llm.generate([salted], greedy_params(OUTPUTS), use_tqdm=False)
            found.append(answer_of(output))
            engine.llm.reset_prefix_cache()
    assert_same(found, expected[3:4] * 5)
    assert [answer.cached_tokens for answer in found] == [0, 160, 0, 0, 160]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_chunks_that_are_lost(tiny_llama: Path, expected: list[Answer], tmp_path: Path, policy: str) -> None:
    """Files vanish after the look-up has found them: the prompt is computed, or its request fails; others go on."""
    disk = {"local_disk": f"file://{tmp_path}/", "max_local_disk_size": 0.0625, "local_cpu": False}
    config = KVTransferConfig(**lmcache(**disk), kv_load_failure_policy=policy)
    with Engine(tiny_llama, kv_transfer_config=config, **OPTIONS) as engine:
        engine.alone(PROMPTS[3:4], OUTPUTS)
        wait_for_files(tmp_path, 5)
        for file in tmp_path.rglob("*.pt"):
            file.unlink()
        engine.poison()
        engine.llm.reset_prefix_cache()
        (found,) = engine.generate(PROMPTS[3:4], greedy_params(OUTPUTS))
        if policy == "recompute":
            assert_same([answer_of(found)], expected[3:4])
        else:
            assert found.outputs[0].finish_reason == "error"
        assert_same(engine.alone(PROMPTS[2:3], OUTPUTS), expected[2:3])
        engine.check_idle()


def test_a_server_that_is_not_there(tiny_llama: Path, expected: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are computed, and the engine ends although LMCache's client of the server does not."""
    monkeypatch.setattr("vllm_gaudi_ucm.connector.lmcache_connector.CLOSING_SECONDS", 1)
    remote = {"remote_url": f"redis://127.0.0.1:{free_port()}", "blocking_timeout_secs": 1, "local_cpu": False}
    with Engine(tiny_llama, kv_transfer_config=alone(**remote), **OPTIONS) as engine:
        for _ in range(2):
            assert_same(engine.alone(PROMPTS[2:4], OUTPUTS), expected[2:4])
            engine.llm.reset_prefix_cache()
        engine.check_idle()


def test_as_a_child_of_multi_connector(tiny_llama: Path, expected: list[Answer], tmp_path: Path) -> None:
    """Both keep every prompt; the first one loads."""
    with Engine(tiny_llama, STATIC, kv_transfer_config=multi(lmcache(), ours(tmp_path)), **OPTIONS) as engine:
        engine.alone(PROMPTS, OUTPUTS)
        engine.poison()
        engine.llm.reset_prefix_cache()
        again = engine.alone(PROMPTS, OUTPUTS)
        engine.check_idle()
    assert_same(again, expected)
    assert [answer.cached_tokens for answer in again] == [len(prompt) // CHUNK * CHUNK for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [("chunk_size", 24, "multiple of the block size, 16"), ("use_layerwise", True, "use_layerwise")],
)
def test_refused_options(tiny_llama: Path, option: str, value: Any, words: str) -> None:
    with pytest.raises(UcmConfigError, match=words):
        Engine(tiny_llama, kv_transfer_config=alone(**{option: value}), **OPTIONS)
