"""A model whose next token is known, and drafts of it that are right with a given probability.

Token t is followed by t + 1: the output head has the embedding of each token in the row of the next one, and what the
layers add to a hidden state is too small to change that. So attention and products are those of any such model, and how
many drafts are accepted is decided here alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig

    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.speculation.proposer import SampledStep

LOAD_FORMAT = "successors"
# Of the finalizer of splitmix64.
FACTORS = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


@register_model_loader(LOAD_FORMAT)
class SuccessorLoader(DummyModelLoader):
    """vLLM's small random weights, and the embeddings and norms by which a token is followed by the next number."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        super().load_weights(model, model_config)
        weights, vocabulary = dict(model.named_parameters()), model_config.get_vocab_size()
        for name, weight in weights.items():
            if "norm" in name:
                weight.data.fill_(1)
        embeddings = weights["model.embed_tokens.weight"].data
        generator = torch.Generator(embeddings.device).manual_seed(0)
        embeddings.normal_(generator=generator)
        weights["lm_head.weight"].data[:vocabulary] = embeddings[:vocabulary].roll(1, 0)


class KnownDrafts:
    """See DraftProposer. Each draft is right with probability `acceptance`, whatever the ones before it are.

    Args:
        table: the tokens.
        vocabulary: of the model.
        acceptance: of a draft that follows accepted ones.
    """

    def __init__(self, table: RequestTable, vocabulary: int, acceptance: float) -> None:
        self._table = table
        self._vocabulary = vocabulary
        self._acceptance = acceptance

    def propose(self, step: SampledStep) -> list[list[int]]:
        table = self._table
        rows = np.array([request.row for request in step.requests], np.int64)
        ends = table.num_tokens[rows].astype(np.int64)
        last = table.token_ids[rows, ends - 1].astype(np.int64)
        ahead = np.arange(1, int(step.wanted.max(initial=0)) + 1)
        drafts = (last[:, None] + ahead) % self._vocabulary
        # a function of the tokens alone: the same place after the same token has the same fate
        dice = drafts.astype(np.uint64) << np.uint64(32) ^ (ends[:, None] + ahead).astype(np.uint64)
        for factor, shift in zip(FACTORS, (30, 27), strict=True):
            dice = (dice ^ dice >> np.uint64(shift)) * factor
        drafts = np.where((dice >> np.uint64(11)) / 2.0**53 < self._acceptance, drafts, (drafts + 1) % self._vocabulary)
        return [found[:most] for found, most in zip(drafts.tolist(), step.wanted.tolist(), strict=True)]


def first_wrong(prompt: list[int], tokens: list[int], vocabulary: int) -> int | None:
    """Index of the first token that is not the successor of the one before it; None: all are."""
    expected = (prompt[-1] + 1 + np.arange(len(tokens))) % vocabulary
    (wrong,) = (np.array(tokens) != expected).nonzero()
    return int(wrong[0]) if len(wrong) else None


def propose_known_drafts(parts: Any, vocabulary: int, acceptance: float) -> None:
    """Gives a worker with speculative decoding this proposer. parts: of its model runner."""
    parts.steps.proposer = KnownDrafts(parts.steps.requests, vocabulary, acceptance)
