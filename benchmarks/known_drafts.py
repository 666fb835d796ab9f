"""A model whose next token is known, and drafts of it that are right with a given probability.

Token t is followed by t + 1: the output head has the embedding of each token in the row of the next one, and the layers
add too little to a hidden state to change that. So attention and products equal any such model's, and only this
module decides how many drafts are accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from vllm_gaudi_ucm.runner.drafts import ProposedDrafts
from vllm_gaudi_ucm.speculation.draft_model import DraftModelProposer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from vllm.config import ModelConfig

    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.speculation.drafts_ahead import DraftsAhead
    from vllm_gaudi_ucm.speculation.proposer import SampledStep

LOAD_FORMAT = "successors"
SOURCES = ("host", "device", "model")
"""Sources of known drafts: see propose_known_drafts."""
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
        if "lm_head.weight" in weights:
            weights["lm_head.weight"].data[:vocabulary] = embeddings[:vocabulary].roll(1, 0)
        if "model.fc.weight" in weights:
            # a head of EAGLE, which shares the output layer, reads the next token alone
            weights["model.fc.weight"].data.zero_().fill_diagonal_(1)


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


class Faults:
    """Decides on the device which drafts are wrong: each with the probability `1 - acceptance`, by noise that depends
    on `seed` and on earlier calls. Most calls cost no operation there.

    Args:
        device: of the tensors.
        acceptance: of each draft.
        seed: of the noise.
    """

    STEPS = 64

    def __init__(self, device: torch.device, acceptance: float, seed: int = 0) -> None:
        self._device = device
        self._acceptance = acceptance
        self._noise = torch.Generator(device).manual_seed(seed)
        self._ready: dict[torch.Size, list[torch.Tensor]] = {}

    def next(self, shape: torch.Size) -> torch.Tensor:
        """Returns int64 of this shape: 1 where a draft is wrong."""
        ready = self._ready.setdefault(shape, [])
        if not ready:
            dice = torch.rand((self.STEPS, *shape), device=self._device, generator=self._noise)
            ready += (dice >= self._acceptance).long().unbind()
        return ready.pop()


class Spoiled:
    """Likeliest tokens of a draft model, on the device; wrong ones are the next number. The host reads no tensor.

    Args:
        likeliest: gives the tokens of logits.
        vocabulary: of the model.
        acceptance: of each token.
    """

    def __init__(self, likeliest: Callable[[torch.Tensor], torch.Tensor], vocabulary: int, acceptance: float) -> None:
        self.likeliest = likeliest
        self._vocabulary = vocabulary
        self._acceptance = acceptance
        self._faults: Faults | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        tokens = self.likeliest(logits)
        if self._faults is None:
            self._faults = Faults(tokens.device, self._acceptance)
        return (tokens + self._faults.next(tokens.shape)) % self._vocabulary


class DeviceDrafts:
    """Drafts like a draft model's, but without its passes, see DraftProposer: numbers added on the device to the last
    tokens, which stay there if steps are scheduled ahead.

    Args:
        table: the tokens.
        device: of the model.
        vocabulary: of the model.
        acceptance: of a draft that follows accepted ones.
        ahead: takes the drafts with async scheduling. None: each step reads its own.
    """

    def __init__(
        self, table: RequestTable, device: torch.device, vocabulary: int, acceptance: float, ahead: DraftsAhead | None
    ) -> None:
        self._table = table
        self._device = device
        self._vocabulary = vocabulary
        self._faults = Faults(device, acceptance)
        self._steps: dict[int, torch.Tensor] = {}
        self._ahead = ahead

    def propose(self, step: SampledStep) -> list[list[int]]:
        table, most = self._table, int(step.wanted.max(initial=0))
        if self._ahead is not None:
            self._ahead.begin()
        if not most:
            return [[] for _ in step.requests]
        rows = np.array([request.row for request in step.requests], np.int64)
        last = torch.from_numpy(table.token_ids[rows, table.num_tokens[rows] - 1].astype(np.int64))
        if self._device.type == "cuda":
            last = last.pin_memory()
        last = last.to(self._device, non_blocking=True)
        steps = self._steps.get(most)
        if steps is None:
            steps = self._steps[most] = torch.arange(1, most + 1, device=self._device)
        wrong = self._faults.next(torch.Size((len(rows), most)))
        drafts = (last[:, None] + steps + wrong) % self._vocabulary
        if self._ahead is None:
            found = drafts.flatten().tolist()
        else:
            found = self._ahead.put(drafts.flatten())
            self._ahead.end()
        return [found[index * most :][:wanted] for index, wanted in enumerate(step.wanted.tolist())]


def first_wrong(prompt: list[int], tokens: list[int], vocabulary: int) -> int | None:
    """Index of the first token that is not the successor of the one before it; None: all are."""
    expected = (prompt[-1] + 1 + np.arange(len(tokens))) % vocabulary
    (wrong,) = (np.array(tokens) != expected).nonzero()
    return int(wrong[0]) if len(wrong) else None


def propose_known_drafts(parts: Any, vocabulary: int, acceptance: float, source: str = "host") -> None:
    """Gives a worker with a draft model drafts of which each is right with the probability `acceptance`.

    Args:
        parts: of its model runner.
        vocabulary: of the model.
        acceptance: of a draft that follows accepted ones.
        source: "host": numbers of the tokens that the host has read (KnownDrafts). "device": the same numbers, made and
            kept on the device (DeviceDrafts). "model": the passes of the engine's own draft model, whose weights also
            predict the next number; its drafts are spoiled on the device. They cost as much as such a draft model.
    """
    drafts = parts.drafts
    if source == "model":
        proposer = _draft_model(drafts)
        likeliest = proposer.choice.likeliest
        if isinstance(likeliest, Spoiled):
            likeliest = likeliest.likeliest
        proposer.choice.likeliest = Spoiled(likeliest, vocabulary, acceptance)
    elif source == "device":
        ahead = None if parts.ahead is None else parts.ahead.drafts
        (device,) = {tensor.device for pair in parts.kv_caches.values() for tensor in pair}
        drafts.proposer = DeviceDrafts(parts.requests, device, vocabulary, acceptance, ahead)
    else:
        drafts.proposer = KnownDrafts(parts.requests, vocabulary, acceptance)


def _draft_model(drafts: Any) -> DraftModelProposer:
    proposer = drafts.proposer if isinstance(drafts, ProposedDrafts) else None
    if not isinstance(proposer, DraftModelProposer):
        raise TypeError(f"found {type(proposer).__name__} as proposer, expected an engine with a draft model")
    return proposer
