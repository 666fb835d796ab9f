"""A tiny model with adapters (LoRA), and what Hugging Face computes with each of them merged into its weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from vllm.lora.request import LoRARequest

from tests.engine.adapters import ALL_LINEAR, EMBEDDINGS, make_adapter, merge_adapter, request_of
from tests.engine.lora_requests import ask
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Answer, Engine
from tests.engine.tiny_models import VOCAB, make_config, make_model

RNG = random.Random(41)
PROMPTS = [[RNG.randrange(3, VOCAB) for _ in range(count)] for count in (1, 15, 16, 33, 70)]
MAX_TOKENS = 12
OPTIONS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 3,
    "max_lora_rank": 8,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
BUCKETS = {"graphs": {"mode": "eager", "recipe_check": "fail", "max_graphs": 14, "warm_up": "full"}}


class Family:
    """A tiny model, its adapters, and what Hugging Face computes with each of them merged; None for the model alone."""

    def __init__(
        self, folder: Path, config: str | PreTrainedConfig, modules: Sequence[str] = (*ALL_LINEAR, *EMBEDDINGS)
    ) -> None:
        """config: of the model, or a model type with the common configuration."""
        self.model = make_model(folder / "model", make_config(config) if isinstance(config, str) else config)
        every, some = tuple(modules), tuple(name for name in modules if name not in EMBEDDINGS)
        self.adapters = [
            make_adapter(folder / "every", self.model, rank=4, modules=every, seed=1),
            make_adapter(folder / "few", self.model, rank=8, alpha=4.0, modules=some[:3], seed=2),
            make_adapter(folder / "third", self.model, rank=1, alpha=2.0, modules=some, seed=3),
        ]
        self.requests: list[LoRARequest | None] = [
            None,
            *(request_of(adapter, number) for number, adapter in enumerate(self.adapters, 1)),
        ]
        self.references = [ReferenceModel(self.model)]
        for adapter in self.adapters:
            self.references.append(
                ReferenceModel(merge_adapter(folder / f"merged {adapter.name}", self.model, adapter))
            )

    def ask(
        self, engine: Engine, prompts: Sequence[Sequence[int]] = PROMPTS, max_tokens: int = MAX_TOKENS
    ) -> list[Answer]:
        """Every prompt with every adapter and with none, all at once; checks the tokens."""
        asked = [(prompt, number) for prompt in prompts for number in range(len(self.requests))]
        answers = ask(engine, [(prompt, self.requests[number]) for prompt, number in asked], max_tokens)
        for number, reference in enumerate(self.references):
            mine = [answer for answer, (_, other) in zip(answers, asked, strict=True) if other == number]
            reference.assert_greedy(prompts, mine)
        # an adapter that made no difference would not be noticed if it were left out
        last = answers[-len(self.requests) :]
        assert len({tuple(answer.tokens) for answer in last}) == len(self.requests)
        return answers
