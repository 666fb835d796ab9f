"""A model in regions: as many graphs as buckets, whatever the number of layers, and the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from tests.engine.serving import Answer, Engine, assert_same
from tests.engine.tiny_models import make_config, make_model
from vllm_gaudi_ucm.execution import regions
from vllm_gaudi_ucm.execution.regions import layer_lists

PROMPTS = [list(range(3, 3 + length)) for length in (5, 40, 1, 150)]
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "max_num_batched_tokens": 128}
# A layer without metadata, whose cache is not there yet, and one in the cache of a measurement.
BEFORE_BUCKETS = 2
NUM_LAYERS = {"gpt2": "n_layer"}


def entries(region: Callable[..., Any]) -> int:
    code: CodeType = region.__code__
    return len(_debug_get_cache_entry_list(code))


def compiled(folder: Path, **graphs: Any) -> tuple[int, int, int, list[Answer]]:
    """Graphs of layers, of what stands beside them, forward buckets, and answers."""
    torch._dynamo.reset()
    options = {"mode": "compile", "backend": "eager", "warm_up": "full", "max_graphs": 4, **graphs}
    with Engine(folder, {"graphs": options}, **OPTIONS) as engine:
        assert engine.runner.static is not None
        buckets = len(engine.runner.static.execution.ready.buckets.forward)
        warm = entries(regions._run_layer), entries(regions._run_part)
        answers = engine.greedy(PROMPTS, 8)
        assert (entries(regions._run_layer), entries(regions._run_part)) == warm
    return (*warm, buckets, answers)


def true_shapes(folder: Path) -> list[Answer]:
    with Engine(folder, **OPTIONS) as engine:
        return engine.greedy(PROMPTS, 8)


def model(folder: Path, family: str, layers: int) -> Path:
    return make_model(folder, make_config(family, **{NUM_LAYERS.get(family, "num_hidden_layers"): layers}))


@pytest.mark.parametrize("family", ["llama", "qwen3", "granite", "gpt2"])
def test_one_graph_for_each_bucket_whatever_the_number_of_layers(family: str, tmp_path: Path, in_process: None) -> None:
    """The first layer is one with the others; names, numbers and None of a layer are in no graph."""
    folder = model(tmp_path, family, 3)
    layers, parts, buckets, answers = compiled(folder)
    assert layers <= buckets + BEFORE_BUCKETS
    # embeddings of tokens and of positions, and a norm
    assert parts <= 3 * (buckets + BEFORE_BUCKETS)
    assert_same(answers, true_shapes(folder), near_ties=0)


class OtherLayer(nn.Module):
    """Takes a number, which may differ between layers."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: torch.Tensor, depth: int) -> torch.Tensor:
        return hidden_states * depth


class Attending(nn.Module):
    pass


@pytest.fixture
def attending(monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    monkeypatch.setattr(regions, "AttentionLayerBase", Attending)
    return Attending


def test_layers_that_take_numbers_are_not_compiled_one_by_one(attending: type[nn.Module]) -> None:
    whole = nn.ModuleDict({"layers": nn.ModuleList([OtherLayer(attending())])})
    with pytest.raises(ValueError, match=r"OtherLayer\.forward takes depth, which may be no tensors"):
        layer_lists(whole)


def test_attention_outside_of_the_layers_is_named(attending: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match="attention outside of a list of layers: first"):
        layer_lists(nn.ModuleDict({"first": attending()}))
