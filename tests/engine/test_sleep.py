"""An engine that sleeps gives back its memory, and gives the same tokens when it is awake again."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.serving import Engine, greedy_params
from tests.engine.static_shapes import static
from tests.engine.tiny_models import make_config, make_model
from tests.import_heap import REAL
from tests.platform.features import NGRAM
from vllm_gaudi_ucm.platform.refused_calls import UnsupportedCallError

PROMPTS = [[5, 6, 7, 8] * 6, [9, 10, 11], list(range(20, 60))]
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "true shapes": ({}, {"async_scheduling": False}),
    "async": ({}, {"async_scheduling": True}),
    "buckets": (static(), {}),
}


@pytest.fixture(autouse=True)
def on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is tried here before a user's engine sleeps on one."""
    monkeypatch.setattr("vllm_gaudi_ucm.platform.reload.SLEPT_ON_A_GPU", True)


def tokens(engine: Engine, count: int) -> list[list[int]]:
    """Returns tokens of new requests, which may read other blocks than before: sums are rounded in another order."""
    answers = engine.greedy(PROMPTS, count)
    assert all(answer.cached_tokens == 0 for answer in answers), "the prefix cache was not reset"
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("way", WAYS)
def test_the_same_tokens_afterwards(tiny_llama: Path, way: str) -> None:
    ucm, options = WAYS[way]
    with Engine(tiny_llama, ucm, **options) as engine:
        expected = tokens(engine, 12)
        for level, tags in ((1, None), (2, None), (1, ["kv_cache"]), (2, ["weights"])):
            engine.llm.sleep(level)
            # a call that finds the engine asleep already
            engine.llm.collective_rpc("sleep")
            engine.llm.wake_up(tags)
            engine.llm.wake_up()
            assert tokens(engine, 12) == expected, (level, tags)
        # the worker learns that the last request has ended
        engine.step()
        engine.check_idle()


def held_bytes() -> int:
    """Returns the bytes that all processes hold of a GPU, graphs among them; on a CPU, of all tensors that Python
    objects hold, because the process gives back memory in its own time."""
    gc.collect()
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    # oneDNN's packed tensors have no storage of their own
    tensors = [found for found in tensors if found.layout == torch.strided]
    return sum({found.untyped_storage().data_ptr(): found.untyped_storage().nbytes() for found in tensors}.values())


def test_memory_is_given_back(tmp_path: Path) -> None:
    """About 200 MB of keys and values, and 80 MB of weights at level 2."""
    path = make_model(tmp_path, make_config("llama", hidden_size=512, intermediate_size=6144, vocab_size=4096))
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    cache = 200 << 20
    before = held_bytes()
    with Engine(path, kv_cache_memory_bytes=cache) as engine:
        expected = tokens(engine, 8)
        # memory is resident once it is written
        engine.poison()
        awake = held_bytes()
        engine.llm.sleep(1)
        assert awake - held_bytes() > 0.9 * cache
        engine.llm.wake_up()
        assert tokens(engine, 8) == expected
        engine.poison()
        awake = held_bytes()
        engine.llm.sleep(2)
        if torch.cuda.is_available():
            # kernels and libraries stay loaded
            assert awake - held_bytes() > 0.9 * (cache + weights)
        else:
            # packed weights, which are not counted, are gone with the others
            assert held_bytes() - before < 0.1 * weights
        engine.llm.wake_up()
        assert tokens(engine, 8) == expected


@pytest.mark.parametrize("way", WAYS)
def test_what_vllm_has_frozen_is_given_back(tiny_llama: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM hides from the collector what an engine has made at its start."""
    for name, function in REAL.items():
        monkeypatch.setattr(gc, name, function)
    ucm, options = WAYS[way]
    with Engine(tiny_llama, ucm, **options) as engine:
        expected = tokens(engine, 8)
        gc.freeze()
        caches = [weakref.ref(cache) for pair in engine.runner.parts.kv_caches.values() for cache in pair]
        assert caches
        engine.llm.sleep(1)
        assert [cache() for cache in caches] == [None] * len(caches)
        engine.llm.wake_up()
        assert tokens(engine, 8) == expected


def test_other_weights_on_waking(tiny_llama: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", make_config("llama"), seed=7)
    with Engine(other) as engine:
        expected = tokens(engine, 12)
    with Engine(tiny_llama) as engine:
        assert [one.tokens for one in engine.greedy(PROMPTS, 12)] != expected
        engine.llm.sleep(2)
        engine.llm.wake_up(["weights"])
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        engine.llm.wake_up(["kv_cache"])
        # the prefix cache was reset when the engine fell asleep
        assert tokens(engine, 12) == expected


def test_kept_requests_are_computed_again(tiny_llama: Path, contract: str) -> None:
    """With `mode="keep"` requests wait, and go on with the tokens that they have."""
    with Engine(tiny_llama) as engine:
        expected = engine.greedy([PROMPTS[1]], 20)[0].tokens
        engine.add(engine.new_id(), PROMPTS[1], greedy_params(20))
        for _ in range(6):
            engine.step()
        engine.core.sleep(1, mode="keep")
        engine.core.wake_up()
        found: list[int] = []
        for _ in range(40):
            for output in engine.step():
                found = list(output.outputs[0].token_ids)
        assert found == expected


def test_what_it_excludes(tiny_llama: Path) -> None:
    """covers: A18"""
    with Engine(tiny_llama, speculative_config=NGRAM) as engine:
        expected = tokens(engine, 4)
        for level in (1, 2):
            with pytest.raises(UnsupportedCallError, match="sleep mode above level 0 with speculative decoding"):
                engine.llm.sleep(level)
            assert engine.llm.wake_up()
            assert tokens(engine, 4) == expected
