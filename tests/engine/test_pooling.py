"""Decoders that pool: embeddings, classes, scores and token vectors are Transformers', however prompts are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import PoolingParams
from vllm.config import PoolerConfig
from vllm.exceptions import VLLMValidationError

from tests.engine import tiny_models
from tests.engine.pooling_models import Reference, cosine, make_prompts, text_of, write_model
from tests.engine.serving import Engine
from tests.engine.worker_processes import EngineOfWorkers

pytestmark = pytest.mark.slow  # starts engines

# around the block size, and longer than a step
PROMPTS = make_prompts((1, 5, 16, 17, 33, 100, 130))
BUCKETS = {"graphs": {"mode": "eager", "recipe_check": "fail", "max_graphs": 14, "warm_up": "full"}}
EXECUTIONS = pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
OPTIONS: dict[str, Any] = {
    "runner": "pooling",
    "max_model_len": 192,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "skip_tokenizer_init": False,
}
EXACT = 0.99999


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_models.make_config("llama")
    return write_model(tmp_path_factory.mktemp("models") / "llama", config, classifies=False)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_models.make_config("qwen2", num_labels=3)
    return write_model(tmp_path_factory.mktemp("models") / "classes", config, classifies=True)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_models.make_config("qwen2", num_labels=1)
    return write_model(tmp_path_factory.mktemp("models") / "scores", config, classifies=True)


def ids(prompts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def check_embeddings(engine: Engine, folder: Path, pooling: str = "last") -> None:
    reference = Reference(folder)
    for prompt, output in zip(PROMPTS, engine.llm.embed(ids(PROMPTS), use_tqdm=False), strict=True):
        assert cosine(output.outputs.embedding, reference.embedding(prompt, pooling)) > EXACT, len(prompt)
        assert torch.tensor(output.outputs.embedding).norm().item() == pytest.approx(1, abs=1e-4)


@EXECUTIONS
def test_embeddings_of_the_last_token(decoder: Path, ucm: dict[str, Any]) -> None:
    """Prompts are divided over steps, and computed again after a preemption."""
    with Engine(decoder, ucm, **OPTIONS) as engine:
        assert engine.core.vllm_config.scheduler_config.enable_chunked_prefill
        check_embeddings(engine, decoder)
        engine.step()
        engine.check_idle()


@EXECUTIONS
def test_embeddings_after_preemptions(decoder: Path, ucm: dict[str, Any]) -> None:
    options = {**OPTIONS, "enable_prefix_caching": False, "num_gpu_blocks_override": 14}
    with Engine(decoder, ucm, **options) as engine:
        check_embeddings(engine, decoder)
        engine.step()
        engine.check_idle()


@EXECUTIONS
def test_mean_embeddings(decoder: Path, ucm: dict[str, Any]) -> None:
    """vLLM computes such prompts as a whole."""
    pooler = PoolerConfig(seq_pooling_type="MEAN")
    with Engine(decoder, ucm, **{**OPTIONS, "max_num_batched_tokens": 256}, pooler_config=pooler) as engine:
        assert not engine.core.vllm_config.scheduler_config.enable_chunked_prefill
        check_embeddings(engine, decoder, "mean")


@EXECUTIONS
def test_vectors_of_all_tokens(decoder: Path, ucm: dict[str, Any]) -> None:
    """The chunks of a prompt are joined."""
    reference = Reference(decoder)
    with Engine(decoder, ucm, **OPTIONS, pooler_config=PoolerConfig(task="token_embed")) as engine:
        found = engine.llm.encode(ids(PROMPTS), pooling_task="token_embed", use_tqdm=False)
        again = engine.llm.encode(ids(PROMPTS), pooling_task="token_embed", use_tqdm=False)
    for prompt, one, other in zip(PROMPTS, found, again, strict=True):
        assert one.outputs.data.shape == (len(prompt), 64)
        assert cosine(one.outputs.data, reference.hidden(prompt)) > EXACT, len(prompt)
        # an output is the request's own: later steps leave it as it is
        assert torch.equal(one.outputs.data, other.outputs.data)


def test_a_repeated_prefix_is_not_computed_again(decoder: Path) -> None:
    with Engine(decoder, {}, **OPTIONS) as engine:
        check_embeddings(engine, decoder)
        again = engine.llm.embed(ids(PROMPTS), use_tqdm=False)
        assert again[-1].num_cached_tokens == 128
        check_embeddings(engine, decoder)


@EXECUTIONS
def test_classes(classifier: Path, ucm: dict[str, Any]) -> None:
    reference = Reference(classifier, classifies=True)
    with Engine(classifier, ucm, **OPTIONS) as engine:
        found = engine.llm.classify(ids(PROMPTS), use_tqdm=False)
        raw = engine.llm.classify(ids(PROMPTS), pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    for prompt, one, other in zip(PROMPTS, found, raw, strict=True):
        logits = reference.logits(prompt)
        assert one.outputs.probs == pytest.approx(logits.softmax(-1).tolist(), abs=1e-4)
        assert other.outputs.probs == pytest.approx(logits.tolist(), abs=1e-3)


def test_scores_of_pairs_by_embeddings(decoder: Path) -> None:
    reference = Reference(decoder)
    query, *documents = ([1, *prompt, 2] for prompt in make_prompts((5, 7, 30)))
    with Engine(decoder, {}, **OPTIONS) as engine:
        found = engine.llm.score(text_of(query[1:-1]), [text_of(one[1:-1]) for one in documents], use_tqdm=False)
    for document, output in zip(documents, found, strict=True):
        one, other = (reference.embedding(tokens, "last") for tokens in (query, document))
        assert output.outputs.score == pytest.approx(float(one @ other), abs=1e-4)


@EXECUTIONS
def test_dimensions_and_mixed_requests(decoder: Path, ucm: dict[str, Any]) -> None:
    """Requests with their own parameters share steps; one is aborted in the middle of its prompt."""
    reference = Reference(decoder)
    options = {"hf_overrides": {"is_matryoshka": True}}
    with Engine(decoder, ucm, **OPTIONS, **options) as engine:
        given = [PoolingParams(task="embed", dimensions=dimensions) for dimensions in (None, 8, 32)]
        for index, params in enumerate(given):
            engine.llm.llm_engine.add_request(f"r{index}", {"prompt_token_ids": PROMPTS[index + 3]}, params)
        engine.llm.llm_engine.add_request("gone", {"prompt_token_ids": PROMPTS[-1]}, PoolingParams(task="embed"))
        engine.llm.llm_engine.step()
        engine.llm.llm_engine.abort_request(["gone"])
        found: dict[str, Any] = {}
        while engine.core.scheduler.has_unfinished_requests():
            found |= {one.request_id: one for one in engine.llm.llm_engine.step() if one.finished}
        engine.llm.llm_engine.step()
        engine.check_idle()
    found = {name: one for name, one in found.items() if name != "gone"}
    for index, dimensions in enumerate((None, 8, 32)):
        if f"r{index}" in found:
            embedding = found[f"r{index}"].outputs.data
            whole = reference.hidden(PROMPTS[index + 3])[-1][:dimensions]
            assert len(embedding) == (dimensions or 64)
            assert cosine(embedding, whole) > EXACT
    assert found, "requests end after the first step"


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([5] * 193, {}, "maximum context length is 192 tokens"),
        ([], {}, "prompt cannot be empty"),
        ([5, 999], {}, "Token id 999 is out of vocabulary"),
        ([5, 6], {"dimensions": 4000}, "does not support Matryoshka embeddings"),
    ],
    ids=["too long", "empty", "no such token", "dimensions"],
)
def test_bad_inputs_leave_the_engine_alive(
    decoder: Path, prompt: list[int], params: dict[str, Any], message: str
) -> None:
    with Engine(decoder, {}, **OPTIONS) as engine:
        with pytest.raises((ValueError, VLLMValidationError), match=message):
            engine.llm.embed({"prompt_token_ids": prompt}, pooling_params=PoolingParams(**params), use_tqdm=False)
        check_embeddings(engine, decoder)


def test_columns_of_steps_that_there_are_not(decoder: Path, classifier: Path) -> None:
    """A request that asks for them gets an error, and the engine goes on; a configuration is refused at start."""
    steps: dict[str, Any] = {**OPTIONS, "enable_prefix_caching": False, "enable_chunked_prefill": False}
    steps |= {"max_num_batched_tokens": 192}
    with Engine(
        decoder, {}, **steps, pooler_config=PoolerConfig(task="token_embed", tok_pooling_type="STEP")
    ) as engine:
        for wrong in (64, -1):
            params = PoolingParams(returned_token_ids=[3, wrong])
            with pytest.raises(VLLMValidationError, match=f"returned_token_ids: found {wrong}, expected 0 to 63"):
                engine.llm.encode(ids(PROMPTS[:1]), params, pooling_task="token_embed", use_tqdm=False)
        params = PoolingParams(returned_token_ids=[3, 63], use_activation=False)
        (found,) = engine.llm.encode(ids(PROMPTS[3:4]), params, pooling_task="token_embed", use_tqdm=False)
        expected = Reference(decoder).hidden(PROMPTS[3])[:, [3, 63]]
        torch.testing.assert_close(found.outputs.data.float(), expected, atol=1e-4, rtol=1e-4)
    for model, expected_ids in ((decoder, "0 to 63"), (classifier, "none")):
        wrong_config = PoolerConfig(tok_pooling_type="STEP", returned_token_ids=[64])
        with pytest.raises(ValueError, match=f"--pooler-config: returned_token_ids: found 64, expected {expected_ids}"):
            Engine(model, {}, **steps, pooler_config=wrong_config)


@EXECUTIONS
@pytest.mark.parametrize("size", ["tensor", "pipeline"])
def test_several_workers(decoder: Path, ucm: dict[str, Any], size: str) -> None:
    reference = Reference(decoder)
    with EngineOfWorkers(decoder, ucm, **OPTIONS, **{f"{size}_parallel_size": 2}) as engine:
        found = engine.llm.embed(ids(PROMPTS), use_tqdm=False)
    for prompt, output in zip(PROMPTS, found, strict=True):
        assert cosine(output.outputs.embedding, reference.embedding(prompt, "last")) > EXACT, len(prompt)
