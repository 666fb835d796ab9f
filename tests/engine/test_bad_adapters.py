"""Adapters (LoRA) that cannot be used, or that come and go: a request or a call gets an error, and others go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.exceptions import LoRAAdapterNotFoundError

from tests.engine.adapters import ALL_LINEAR, make_adapter, merge_adapter, request_of
from tests.engine.connector import file_store, transfer
from tests.engine.lora_requests import ask
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Engine
from tests.engine.tiny_models import VOCAB, make_config, make_model

pytestmark = pytest.mark.slow  # starts engines

OPTIONS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
PROMPT = [7 * number % (VOCAB - 3) + 3 for number in range(40)]
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def _tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def _config(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (shutil.rmtree, "No adapter found"),
    "no tensors": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "doesn't contain tensors"),
    "cut": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\0" * 40), "LoRA adapter 'bad'"),
    "no config": (lambda folder: (folder / "adapter_config.json").write_text("{"), "LoRA adapter 'bad'"),
    "rank": (lambda folder: make_adapter(folder, folder.parent / "model", rank=16), "rank 16 is greater than"),
    "rank of tensors": (
        lambda folder: _tensors(
            make_adapter(folder, folder.parent / "model", rank=16),
            lambda _: _config(folder, r=8),
        ),
        "found rank 16 .* expected at most 8",
    ),
    "unknown module": (
        lambda folder: _tensors(folder, lambda t: t.update({f"{Q}x.lora_A.weight": torch.zeros(4, 64)})),
        "expected target modules",
    ),
    "layer that the model lacks": (
        lambda folder: _tensors(
            folder,
            lambda t: [t.update({k.replace("layers.0", "layers.9"): t[k].clone()}) for k in list(t) if "layers.0" in k],
        ),
        r"found matrices for model.layers.9.* expected layers of the model",
    ),
    "smaller": (
        lambda folder: _tensors(folder, lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 32)})),
        r"found lora_A \[4, 32\] .* expected \[rank, 64\]",
    ),
    "larger": (
        lambda folder: _tensors(folder, lambda t: t.update({f"{Q}.lora_B.weight": torch.zeros(128, 4)})),
        r"lora_B \[128, 4\] .* expected .*\[64, rank\]",
    ),
    "one matrix": (
        lambda folder: _tensors(folder, lambda t: t.pop(f"{Q}.lora_B.weight")),
        "expected lora_A and lora_B",
    ),
    "not finite": (
        lambda folder: _tensors(folder, lambda t: t[f"{Q}.lora_A.weight"].fill_(float("inf"))),
        "numbers that are not finite",
    ),
    "empty": (lambda folder: _tensors(folder, lambda t: t.clear()), "found no matrices"),
    "DoRA": (lambda folder: _config(folder, use_dora=True), "DoRA"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "model", make_config("llama"))


@pytest.fixture(scope="module")
def good(model: Path) -> Path:
    return make_adapter(model.parent / "good", model, seed=4)


@pytest.fixture(scope="module")
def merged(model: Path, good: Path) -> ReferenceModel:
    return ReferenceModel(merge_adapter(model.parent / "merged", model, good))


@pytest.fixture(scope="module", params=[False, True], ids=["", "asynchronous"])
def engine(request: pytest.FixtureRequest, model: Path) -> Any:
    with Engine(model, {}, **OPTIONS, async_scheduling=request.param) as engine:
        yield engine


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_adapter_ends_its_own_request(
    kind: str, engine: Engine, model: Path, good: Path, merged: ReferenceModel
) -> None:
    """A call to load it raises; a request that names it ends with the error, while others of the same batch go on."""
    spoil, says = BAD[kind]
    bad = make_adapter(model.parent / "bad", model, seed=5)
    spoil(bad)
    number = 10 + list(BAD).index(kind)
    with pytest.raises((ValueError, LoRAAdapterNotFoundError), match=says):
        engine.llm.llm_engine.add_lora(request_of(bad, number))
    assert number not in engine.llm.llm_engine.list_loras()
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    engine.llm.llm_engine.add_request("bad", {"prompt_token_ids": PROMPT}, params, lora_request=request_of(bad, number))
    engine.llm.llm_engine.add_request("good", {"prompt_token_ids": PROMPT}, params, lora_request=request_of(good, 1))
    finished = {}
    while engine.llm.llm_engine.has_unfinished_requests():
        finished.update({one.request_id: one for one in engine.step() if one.finished})
    assert finished["bad"].outputs[0].finish_reason == "error"
    assert finished["bad"].outputs[0].token_ids == []
    assert finished["good"].outputs[0].finish_reason == "length"
    # the blocks that the request had computed are in no cache: the repaired adapter computes its own
    shutil.rmtree(bad, ignore_errors=True)
    make_adapter(bad, model, seed=4)
    (answer,) = ask(engine, [(PROMPT, request_of(bad, number))], 6)
    merged.assert_greedy([PROMPT], [answer])
    assert answer.cached_tokens == 0
    engine.llm.llm_engine.remove_lora(number)
    engine.step()
    engine.check_idle()


def test_adapters_come_and_go(model: Path, good: Path, merged: ReferenceModel) -> None:
    other = make_adapter(model.parent / "other", model, modules=ALL_LINEAR[:2], seed=6)
    more = [make_adapter(model.parent / f"more{number}", model, seed=number) for number in (7, 8)]
    with Engine(model, {}, **OPTIONS) as engine:
        core = engine.llm.llm_engine
        assert core.list_loras() == set()
        assert core.add_lora(request_of(good, 1))
        assert core.pin_lora(1)
        for number, adapter in enumerate((other, *more), 2):
            ask(engine, [(PROMPT, request_of(adapter, number))], 3)
        # of the three others the last one is kept
        assert core.list_loras() == {1, 4}
        merged.assert_greedy([PROMPT], ask(engine, [(PROMPT, request_of(good, 1))], 6))
        assert core.remove_lora(1)
        assert core.list_loras() == {4}
        # it is read again
        merged.assert_greedy([PROMPT[:30]], ask(engine, [(PROMPT[:30], request_of(good, 1))], 6))


def test_an_adapter_is_loaded_again_in_its_place(model: Path, good: Path, merged: ReferenceModel) -> None:
    changing = make_adapter(model.parent / "changing", model, seed=9)
    with Engine(model, {}, **OPTIONS, enable_prefix_caching=False) as engine:
        first = ask(engine, [(PROMPT, request_of(changing, 1))], 6)
        make_adapter(changing, model, seed=4)
        assert ask(engine, [(PROMPT, request_of(changing, 1))], 6)[0].tokens == first[0].tokens
        again = request_of(changing, 1)
        again.load_inplace = True
        merged.assert_greedy([PROMPT], ask(engine, [(PROMPT, again)], 6))


def test_a_store_tells_adapters_apart_by_their_files(
    model: Path, good: Path, merged: ReferenceModel, tmp_path: Path
) -> None:
    """An adapter with the same name, number and path but other weights finds nothing of the first engine's."""
    changing = make_adapter(tmp_path / "changing", model, seed=11)
    options: dict[str, Any] = {**OPTIONS, "kv_transfer_config": transfer(file_store(tmp_path / "store"))}

    def cached(adapter: Path | None) -> int:
        with Engine(model, {}, **options) as engine:
            (answer,) = ask(engine, [(PROMPT, None if adapter is None else request_of(adapter, 1))], 6)
        if adapter is not None and adapter != changing:
            merged.assert_greedy([PROMPT], [answer])
        return answer.cached_tokens

    assert cached(changing) == 0
    assert cached(changing) == 32
    assert cached(None) == 0
    shutil.copytree(good, changing, dirs_exist_ok=True)
    assert cached(changing) == 0
    # the same files in another place are the same adapter
    copied = Path(shutil.copytree(good, tmp_path / "copied"))
    assert cached(copied) == 32
