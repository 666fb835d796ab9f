"""What Hugging Face Transformers computes for the same weights, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engine.serving import NEAR_TIE, Answer


class ReferenceModel:
    """Teacher-forced: token i is the greedy one exactly if it is the argmax after the prompt and the tokens before it.

    One forward per prompt gives the check for all its tokens, and their logprobs.
    """

    def __init__(self, folder: Path, attention: str | None = None, kind: Any = AutoModelForCausalLM) -> None:
        """attention: one of the kernels of Transformers; None: its choice. kind: the class that loads the model."""
        self.model: PreTrainedModel = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
        self.model.eval()

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        """float32 [keep, vocabulary]: after each of the last `keep` tokens."""
        logits = self.model(torch.tensor([list(tokens)]), logits_to_keep=keep).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    def after(self, prompt: Any, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [tokens, vocabulary]: after the prompt and each of the tokens but the last."""
        return self.logprobs([*prompt, *tokens[:-1]], keep=len(tokens))

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Transformers' own greedy loop, with its KV cache."""
        tokens = torch.tensor([list(prompt)])
        found = self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return found[0, len(prompt) :].tolist()

    def assert_greedy(
        self,
        prompts: Sequence[Any],
        answers: Sequence[Answer],
        near_ties: int = 1,
        near: float = NEAR_TIE,
    ) -> None:
        """Every token is ours and theirs; at most `near_ties` prompts may part, where their two best are that close.

        near: what logprobs may differ by.
        """
        parted = 0
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            count = len(answer.tokens)
            expected = self.after(prompt, answer.tokens)
            best = expected.argmax(dim=-1).tolist()
            end = next((i for i in range(count) if best[i] != answer.tokens[i]), count)
            if end < count:
                first, second = expected[end].topk(2).values.tolist()
                assert first - second < near, f"prompt {index} parts at token {end}: {answer.tokens}, {best}"
                parted += 1
            chosen = expected[torch.arange(end), answer.tokens[:end]]
            assert torch.isfinite(torch.tensor(answer.logprobs)).all()
            torch.testing.assert_close(torch.tensor(answer.logprobs[:end]), chosen, atol=near, rtol=0)
        assert parted <= near_ties
