"""Models that pool with adapters (LoRA): each request has its own, and one that cannot be used fails alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import PoolingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.engine.adapters import make_adapter, merge_adapter, request_of
from tests.engine.pooling_models import Reference, cosine, make_prompts, write_tokenizer
from tests.engine.serving import Engine
from tests.engine.tiny_models import make_config, make_model
from vllm_gaudi_ucm.vllm_api.blocks import pool_nothing, tells_clients_of_errors

PROMPTS = make_prompts((5, 33, 100))
OPTIONS: dict[str, Any] = {
    "runner": "pooling",
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "skip_tokenizer_init": False,
}
BUCKETS = {"graphs": {"mode": "eager", "recipe_check": "fail", "max_graphs": 10, "warm_up": "full"}}
EXACT = 0.99999


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("models") / "model", make_config("llama"))
    write_tokenizer(folder)
    return folder


@pytest.mark.slow  # starts engines
@pytest.mark.skipif(not tells_clients_of_errors(), reason="refused with this vLLM")
@pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
def test_adapters_of_one_batch_and_one_that_is_missing(model: Path, ucm: dict[str, Any]) -> None:
    good = make_adapter(model.parent / "good", model, seed=4)
    merged = Reference(merge_adapter(model.parent / "merged", model, good))
    base = Reference(model)
    missing = request_of(model.parent / "missing", 9)
    with Engine(model, ucm, **OPTIONS) as engine:
        core, params = engine.llm.llm_engine, PoolingParams(task="embed")
        # blocks of a prompt without an adapter, which no other one may find
        for number in range(2):
            for index, prompt in enumerate(PROMPTS):
                for kind, adapter in (("base", None), ("good", request_of(good, 1)), ("bad", missing)):
                    prompt_ids: Any = {"prompt_token_ids": prompt}
                    core.add_request(f"{kind} {index} {number}", prompt_ids, params.clone(), lora_request=adapter)
            found = {}
            while core.has_unfinished_requests():
                found |= {one.request_id: one.outputs.data for one in core.step() if one.finished}
            assert len(found) == 3 * len(PROMPTS)
            for name, vector in found.items():
                kind, index, _ = name.split()
                if kind == "bad":
                    assert not len(vector), "an aborted or failed request has no vector"
                else:
                    reference = merged if kind == "good" else base
                    assert cosine(vector, reference.embedding(PROMPTS[int(index)], "last")) > EXACT, name
        engine.step()
        engine.check_idle()


def test_a_failed_request_gets_an_empty_vector_and_others_keep_theirs() -> None:
    failed, other = (EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR) for name in ("failed", "other"))
    outputs = {0: EngineCoreOutputs(outputs=[failed]), 3: EngineCoreOutputs(outputs=[other])}
    pool_nothing(outputs, {"failed", "aborted"})
    assert other.pooling_output is None
    # the engine's process sends it
    sent = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs[0]))
    assert sent.outputs[0].pooling_output.shape == (0,)
    assert sent.outputs[0].finish_reason is FinishReason.ERROR
