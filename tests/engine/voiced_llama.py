"""A package from outside: a model whose forward reads one number more of each row, and the input that gives it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import NewRequestData

from tests.engine.reference_model import ReferenceModel
from vllm_gaudi_ucm.batch.row_input import ROW_INPUTS, RowInput

ARCHITECTURE = "VoicedLlamaForCausalLM"
NUM_VOICES = 4


def voices(hidden_size: int) -> torch.Tensor:
    """float32 [voices, hidden size], as large as what they are added to."""
    return torch.randn(NUM_VOICES, hidden_size, generator=torch.Generator().manual_seed(3))


class VoicedLlama(LlamaForCausalLM):  # type: ignore[misc]  # vLLM's class is not typed
    """Adds the embedding of its request's voice to that of each token."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **others: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **others)
        self.register_buffer("voices", voices(self.config.hidden_size), persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        voice: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        if get_pp_group().is_first_rank:
            inputs_embeds = self.embed_input_ids(input_ids) + self.voices.index_select(0, voice)
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)


class Voice(RowInput):
    """The voice that a request asks for, by `extra_args`."""

    name = "voice"

    @classmethod
    def is_read_by(cls, model: nn.Module) -> bool:
        return isinstance(model, VoicedLlama)

    def add(self, row: int, new: NewRequestData) -> None:
        assert new.sampling_params is not None
        self.kept[row] = (new.sampling_params.extra_args or {}).get("voice", 0)


def register() -> None:
    """In every process of an engine; vLLM calls it as a general plugin."""
    ModelRegistry.register_model(ARCHITECTURE, VoicedLlama)
    ROW_INPUTS.register("voice", Voice)


def install(folder: Path) -> None:
    """Writes what pip leaves of an installed package, into a folder that is on the path."""
    metadata = folder / "voices-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: voices\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nvoices = {__name__}:register\n\n"
        f"[vllm_gaudi_ucm.row_inputs]\nvoice = {__name__}:Voice\n"
    )


class VoicedReference(ReferenceModel):
    """Transformers' Llama with the same embeddings added. voice: of the prompts to compare."""

    voice = 0

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        embedded = self.model.get_input_embeddings()(torch.tensor([list(tokens)]))
        embedded = embedded + voices(embedded.shape[-1])[self.voice]
        logits = self.model(inputs_embeds=embedded, logits_to_keep=keep).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)
