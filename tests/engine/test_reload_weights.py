"""An engine that takes other weights gives the tokens of one that was started with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from vllm import SamplingParams

from tests.engine.serving import Answer, Engine, greedy_params
from tests.engine.static_shapes import static
from tests.engine.tiny_models import make_config, make_model
from tests.platform.features import NGRAM
from vllm_gaudi_ucm.platform.refused_calls import UnsupportedCallError

PROMPTS = [[5, 6, 7, 8] * 6, [9, 10, 11], list(range(20, 60))]
FAMILIES = ("llama", "qwen3", "mixtral", "deepseek_v3", "gpt2")
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "true shapes": ({}, {}),
    "without native graphs": ({"cpu": {"native_graphs": False, "packed_weights": False}}, {"async_scheduling": False}),
    "buckets": (static(), {"async_scheduling": True}),
    "slots for tokens": ({"kv_cache": {"granularity": "token"}}, {}),
}


def model(folder: Path, family: str, seed: int) -> Path:
    return make_model(folder / f"{family}-{seed}", make_config(family), seed=seed)


def answers(engine: Engine) -> list[Answer]:
    # a second round replays the graphs of the first
    engine.greedy(PROMPTS, 12)
    return engine.greedy(PROMPTS, 12)


def fresh(path: Path, ucm: dict[str, Any], options: dict[str, Any]) -> list[Answer]:
    with Engine(path, ucm, **options) as engine:
        return answers(engine)


def tokens(found: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in found]


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory, in_process: None) -> Iterator[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("llamas")
    return model(folder, "llama", 1), model(folder, "llama", 2)


@pytest.mark.parametrize("way", WAYS)
def test_from_a_checkpoint(llamas: tuple[Path, Path], way: str) -> None:
    ucm, options = WAYS[way]
    first, second = llamas
    expected = [fresh(path, ucm, options) for path in llamas]
    assert tokens(expected[0]) != tokens(expected[1])
    with Engine(first, ucm, **options) as engine:
        assert answers(engine) == expected[0]
        for path, wanted in ((second, expected[1]), (first, expected[0]), (second, expected[1])):
            engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
            assert engine.llm.reset_prefix_cache()
            assert answers(engine) == wanted
        engine.llm.collective_rpc("reload_weights")
        assert engine.llm.reset_prefix_cache()
        assert answers(engine) == expected[1]
        # the worker learns that the last request has ended
        engine.step()
        engine.check_idle()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, family: str) -> None:
    first, second = model(tmp_path, family, 1), model(tmp_path, family, 2)
    expected = fresh(second, {}, {})
    with Engine(first) as engine:
        answers(engine)
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        assert engine.llm.reset_prefix_cache()
        assert answers(engine) == expected


def test_from_tensors(llamas: tuple[Path, Path]) -> None:
    first, second = llamas
    expected = fresh(second, {}, {})
    weights = [item for file in sorted(second.glob("*.safetensors")) for item in load_file(file).items()]
    with Engine(first) as engine:
        answers(engine)
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        assert engine.llm.reset_prefix_cache()
        assert answers(engine) == expected


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_requests_go_on(llamas: tuple[Path, Path], async_scheduling: bool) -> None:
    """A request that runs meanwhile keeps its tokens and its keys and values."""
    first, _ = llamas
    with Engine(first, async_scheduling=async_scheduling) as engine:
        expected = engine.greedy([PROMPTS[1]], 20)[0].tokens
        engine.llm.reset_prefix_cache()
        engine.add(engine.new_id(), PROMPTS[1], greedy_params(20))
        found: list[int] = []
        for step in range(60):
            if step in (4, 9):
                # the same weights, so the tokens equal an undisturbed engine's
                engine.llm.collective_rpc("reload_weights")
            for output in engine.step():
                found = list(output.outputs[0].token_ids)
        assert found == expected


def test_a_failure_leaves_the_weights(llamas: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = llamas
    wider = make_model(tmp_path / "wider", make_config("llama", hidden_size=128), seed=1)
    partial = dict(list(load_file(next(second.glob("*.safetensors"))).items())[:3])
    with Engine(first) as engine:
        expected = answers(engine)
        for wrong in ({"weights_path": str(tmp_path / "missing")}, {"weights_path": str(wider)}):
            with pytest.raises(Exception, match=r".+"):
                engine.llm.collective_rpc("reload_weights", kwargs=wrong)
            assert answers(engine) == expected
        with pytest.raises(ValueError, match="lacks tensors that the model needs"):
            engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": partial.items()})
        assert answers(engine) == expected
        # of the first checkpoint, whatever was tried in between
        engine.llm.collective_rpc("reload_weights")
        assert answers(engine) == expected


def test_what_it_excludes(llamas: tuple[Path, Path]) -> None:
    """covers: A18"""
    first, _ = llamas
    with Engine(first, speculative_config=NGRAM) as engine:
        with pytest.raises(UnsupportedCallError, match="other weights with speculative decoding"):
            engine.llm.collective_rpc("reload_weights")
        outputs = engine.generate([PROMPTS[1]], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
        assert len(outputs[0].outputs[0].token_ids) == 3
    with Engine(first) as engine, pytest.raises(UnsupportedCallError, match="pass the tensors of a checkpoint"):
        engine.llm.collective_rpc("reload_weights", kwargs={"is_checkpoint_format": False})
