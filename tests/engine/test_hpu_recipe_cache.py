"""Recipe cache on the simulated card: a second start takes every recipe from the folder and compiles nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.engine.contracts import v2_without_driver
from tests.engine.hpu_process import run_on_card
from tests.engine.serving import TINY_OPTIONS, greedy_params

# starts engines on the simulated card
pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64}
PROMPTS = [list(range(3, 3 + length)) for length in (5, 40, 1, 100)]
GRAPHS = 2
# The engine in a process of its own, as it is served: only there nobody has started the card before the worker.
SERVED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def start(model: str, recipes: str) -> list[list[int]] | str:
    """Tokens of a few requests, or the error that a caller of `LLM` gets."""
    from vllm import LLM

    graphs = {"warm_up": "full", "max_graphs": GRAPHS, "recipe_cache": recipes}
    try:
        with v2_without_driver():
            llm = LLM(**{**TINY_OPTIONS, **OPTIONS, "model": model, "additional_config": {"ucm": {"graphs": graphs}}})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(inputs, greedy_params(4), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


def start_several(model: str, recipes: str, file: str) -> list[list[Any]]:
    """Result of each of two starts, with the files that are then in the folder; and of one with a file for a folder."""
    found = []
    for _ in range(2):
        result = start(model, recipes)
        found.append([result, sorted(path.name for path in Path(recipes).glob("*"))])
    # it ends before anything is compiled: a process of its own would only import vLLM
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return [*found, [start(model, file), []]]


def test_a_second_start_compiles_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    """And one with a folder that cannot be used fails, with an error that says which option and why. covers: B6"""
    folder, file = tmp_path / "recipes", tmp_path / "file"
    file.touch()
    run = run_on_card(start_several, tmp_path, SERVED, model=str(tiny_llama), recipes=str(folder), file=str(file))
    (tokens, files), again, (error, _) = run.result
    assert [len(entry) for entry in tokens] == [4] * len(PROMPTS)
    assert again == [tokens, files]
    pattern = rf"Recipe cache {re.escape(str(folder))}: (\d+) recipes were compiled until (\d+) graphs were warm"
    (compiled, graphs), second = (tuple(map(int, counts)) for counts in re.findall(pattern, run.log))
    assert 1 < graphs <= GRAPHS
    assert 2 * graphs < compiled <= len(files)
    assert second == (0, graphs)
    assert error == (
        f"RecipeCacheError: ucm.graphs.recipe_cache: cannot use {file}: File exists; expected a folder, "
        "or a path where one can be made"
    )
