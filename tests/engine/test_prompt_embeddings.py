"""Prompts of embeddings give the tokens that Transformers computes of them, and mix with prompts of tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.connector import file_store, transfer
from tests.engine.families import prompts
from tests.engine.hpu_counts import broken_duties
from tests.engine.hpu_process import run_on_card
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer, Engine, answer_of, greedy_params
from tests.engine.static_shapes import static

pytestmark = pytest.mark.slow  # starts engines

PROMPTS = prompts()
HALF, LONGEST = len(PROMPTS) // 2, max(PROMPTS, key=len)
LENGTH = 32
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
BUCKETS = static(max_graphs=8)
# chunks, and preempted requests
TIGHT: dict[str, Any] = {
    "enable_prompt_embeds": True,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "max_model_len": 256,
    "num_gpu_blocks_override": 20,
}


class EmbeddingReference(ReferenceModel):
    """Computes prompts of embeddings: token -1 - i stands for row i of `embeddings`."""

    embeddings: torch.Tensor

    @torch.inference_mode()
    def logprobs(self, tokens: Any, keep: int) -> torch.Tensor:
        ids = torch.tensor(list(tokens))
        of_tokens = self.model.get_input_embeddings()(ids.clamp(min=0))
        given = self.embeddings[(-1 - ids).clamp(min=0)]
        whole = torch.where((ids < 0).unsqueeze(1), given, of_tokens)
        logits = self.model(inputs_embeds=whole[None], logits_to_keep=keep).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


def embeddings(prompt: list[int]) -> torch.Tensor:
    """Returns random embeddings, as many as the prompt has tokens."""
    return torch.randn((len(prompt), 64), generator=torch.Generator().manual_seed(len(prompt)))


def asked() -> list[Any]:
    """Prompts of embeddings, of tokens, and of tokens but for every third place."""
    first = [{"prompt_embeds": embeddings(prompt)} for prompt in PROMPTS[:HALF]]
    mixed = {
        "prompt_embeds": embeddings(LONGEST),
        "prompt_token_ids": LONGEST,
        "prompt_is_token_ids": [place % 3 != 0 for place in range(len(LONGEST))],
    }
    return [*first, *({"prompt_token_ids": prompt} for prompt in PROMPTS[HALF:]), mixed]


def check(model: Path, answers: list[Answer]) -> None:
    reference = EmbeddingReference(model)
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        reference.embeddings = embeddings(prompt)
        of_reference = [-1 - place for place in range(len(prompt))] if prompt in PROMPTS[:HALF] else prompt
        reference.assert_greedy([of_reference], [answer])
    reference.embeddings = embeddings(LONGEST)
    mixed = [token if place % 3 else -1 - place for place, token in enumerate(LONGEST)]
    reference.assert_greedy([mixed], [answers[-1]])


def generate(engine: Engine, wanted: list[Any], length: int = LENGTH) -> list[Answer]:
    return [answer_of(output) for output in engine.llm.generate(wanted, greedy_params(length), use_tqdm=False)]


@pytest.mark.parametrize(
    ("ucm", "options"),
    [({}, {}), (BUCKETS, {}), (BUCKETS, {"speculative_config": NGRAM}), ({}, {"async_scheduling": True})],
    ids=["true shapes", "buckets", "buckets and drafts", "asynchronous"],
)
def test_chunks_and_preemptions(tiny_llama: Path, ucm: dict[str, Any], options: dict[str, Any]) -> None:
    with Engine(tiny_llama, ucm, **TIGHT, **options) as engine:
        found = generate(engine, asked())
        assert options or engine.preemptions
        engine.step()
        engine.check_idle()
    check(tiny_llama, found)


def test_both_contracts_send_preempted_embeddings_again(tiny_llama: Path, contract: str) -> None:
    with Engine(tiny_llama, **TIGHT) as engine:
        found = generate(engine, asked())
        assert engine.preemptions
    check(tiny_llama, found)


def test_cached_blocks_are_of_their_own_embeddings(tiny_llama: Path) -> None:
    """All placeholders are token 0: only the embeddings tell two prompts apart."""
    one, other = embeddings(LONGEST), embeddings(LONGEST) + 1
    with Engine(tiny_llama, **{**TIGHT, "num_gpu_blocks_override": 100}) as engine:
        first, again, differs = (generate(engine, [{"prompt_embeds": rows}])[0] for rows in (one, one.clone(), other))
    assert (first.cached_tokens, differs.cached_tokens) == (0, 0)
    assert again.cached_tokens > 0
    assert again.tokens == first.tokens


def test_stored_blocks_are_of_their_own_embeddings(tiny_llama: Path, tmp_path: Path) -> None:
    one, other = embeddings(LONGEST), embeddings(LONGEST) + 1
    found = []
    for rows in (one, one, other):
        store = transfer(file_store(tmp_path))
        with Engine(tiny_llama, **{**TIGHT, "num_gpu_blocks_override": 100}, kv_transfer_config=store) as engine:
            found += generate(engine, [{"prompt_embeds": rows}], 8)
            engine.step()
            loaded = engine.runner.parts.transfer._ours.worker_side.loads.counts.loaded_blocks
        assert bool(loaded) == (rows is one and len(found) == 2)
    assert found[0].tokens == found[1].tokens != found[2].tokens


@pytest.mark.parametrize(
    ("prompt", "params", "reason"),
    [
        ({"prompt_embeds": torch.zeros(4, 32)}, {}, r"found \[4, 32\]"),
        ({"prompt_embeds": torch.zeros(4, 64, dtype=torch.int32)}, {}, "int32"),
        ({"prompt_embeds": torch.zeros(4, 64)}, {"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
    ids=["width", "dtype", "prompt logprobs"],
)
def test_a_bad_prompt_is_refused_and_the_next_one_served(
    tiny_llama: Path, prompt: Any, params: dict[str, Any], reason: str
) -> None:
    with Engine(tiny_llama, **TIGHT) as engine:
        with pytest.raises(VLLMValidationError, match=reason):
            engine.llm.generate([prompt], SamplingParams(max_tokens=2, **params), use_tqdm=False)
        found = generate(engine, asked())
    check(tiny_llama, found)


def serve(model: str) -> dict[str, Any]:
    """Answers of an engine on the simulated card, and what it compiled once it was warm."""
    from habana_frameworks.torch.simulator import card

    options = {key: value for key, value in TIGHT.items() if key != "num_gpu_blocks_override"}
    with Engine(Path(model), {"graphs": {"warm_up": "full", "max_graphs": 4}}, **options) as engine:
        before = card.compilations
        answers = generate(engine, asked(), 8)
        return {
            "answers": [dataclasses.asdict(answer) for answer in answers],
            "compiled": card.compilations - before,
            "broken": broken_duties(),
        }


def test_on_the_simulated_card(tiny_llama: Path, tmp_path: Path) -> None:
    found = run_on_card(serve, tmp_path, model=str(tiny_llama)).result
    check(tiny_llama, [Answer(**answer) for answer in found["answers"]])
    assert found["compiled"] == 0
    assert found["broken"] == {}
