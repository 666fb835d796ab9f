"""vLLM's model as a step uses it: token ids to hidden states, these to logits, and what its attention layers read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import nn

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionImpl
from vllm_gaudi_ucm.attention.groups import GroupedMetadata
from vllm_gaudi_ucm.attention.latent import LatentAttention, LatentSizes
from vllm_gaudi_ucm.batch.row_input import inputs_of
from vllm_gaudi_ucm.execution.regions import compile_regions
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.vllm_api.distributed import IntermediateTensors
from vllm_gaudi_ucm.vllm_api.model import AttentionLayerBase, has_attention, set_forward_context
from vllm_gaudi_ucm.vllm_api.moe import RoutedExperts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.batch.row_input import RowInput
    from vllm_gaudi_ucm.batch.window import Window
    from vllm_gaudi_ucm.distributed.lockstep import Lockstep
    from vllm_gaudi_ucm.distributed.stage import Stage, StageTensors
    from vllm_gaudi_ucm.execution.attention_group import StepMetadata
    from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler
    from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec

logger = plugin_logger(__name__)

HIDDEN = "hidden_states"
"""The name of what the last stage has."""


def _modules(model: DecoderModel) -> Iterator[nn.Module]:
    return model.modules() if isinstance(model, nn.Module) else iter(())


class DecoderModel(Protocol):
    """What a step needs of a vLLM model: token ids to hidden states [rows, hidden size], and these to logits.

    It takes each row's inputs by name: `input_ids`, `positions`, and what registered `RowInput`s give.
    One that is a stage of a pipeline takes and returns `IntermediateTensors`, unless it is the first or the last.
    """

    def __call__(
        self, *, intermediate_tensors: IntermediateTensors | None, inputs_embeds: None, **rows: torch.Tensor
    ) -> torch.Tensor | IntermediateTensors: ...

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors: ...

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None: ...


class DecoderStep(NamedTuple):
    """The arguments of one forward of a model, on its device.

    rows: tensors of the `RowInput`s that the model reads, by name; `token_ids` is among them.
    metadata: what attention reads; None: nothing is attended, in a memory measurement or a step of other engines.
    received: of the stage before; maybe written.
    longest: rows of the longest step of all engines, where they share out experts; None: all have as many.
    """

    rows: Mapping[str, torch.Tensor]
    metadata: StepMetadata | None
    received: StageTensors | None = None
    longest: int | None = None

    @property
    def num_rows(self) -> int:
        return len(self.rows["token_ids"])


class Decoder:
    """A model with the context that its attention layers read.

    Args:
        model: vLLM's.
        vllm_config: the engine's.
        stage: which of the model's layers are here; None: all.
        lockstep: the engines that share out its experts; None: this one has them.

    inputs: what the model reads of each row.
    """

    def __init__(
        self,
        model: DecoderModel,
        vllm_config: VllmConfig,
        stage: Stage | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        self.model = model
        self.inputs = inputs_of(cast(nn.Module, model))
        self.stage = stage
        self.lockstep = lockstep
        self._forward: Callable[..., StageTensors] = self._run_model
        self._head: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] = self._logits
        self._vllm_config = vllm_config
        self._has_experts = any(isinstance(module, RoutedExperts) for module in _modules(model))

    @property
    def has_logits(self) -> bool:
        """Whether the model's last layer is here."""
        return self.stage is None or self.stage.is_last

    @property
    def num_layers(self) -> int:
        """Layers with attention that are here."""
        return len(self._attention_layers())

    @cached_property
    def latent(self) -> LatentSizes | None:
        """Where all layers are of latent attention, alike."""
        sizes = {layer.sizes if isinstance(layer, LatentAttention) else None for layer in self._attention_layers()}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def specs(self) -> list[AttentionSpec]:
        """What the layers with attention that are here compute."""
        return [impl.spec for impl in self._attention()]

    @property
    def windows(self) -> list[Window | None]:
        """How far back rows see in the layers that are here, each once: whole contexts (None), then the widest."""
        found = dict.fromkeys(impl.window for impl in self._attention())
        return sorted(found, key=lambda window: 0 if window is None else 1 / window.tokens)

    @property
    def window(self) -> Window | None:
        """How far back rows see in the first KV-cache group."""
        return next(iter(self.windows), None)

    @property
    def shares_caches(self) -> bool:
        """Whether layers read the keys and values of others."""
        return any(impl.shares for impl in self._attention())

    def _attention(self) -> list[UnifiedAttentionImpl]:
        return [cast(UnifiedAttentionImpl, layer.impl) for layer in self._attention_layers()]

    def _attention_layers(self) -> list[AttentionLayerBase]:
        """Returns the layers with attention; layers with a state have no implementation of it."""
        layers = cast(nn.Module, self.model).modules()
        return [layer for layer in layers if isinstance(layer, AttentionLayerBase) and has_attention(layer)]

    def compile(self, compiler: StaticCompiler) -> None:
        """From now on layers and output head run compiled, once for each set of shapes.

        The model's own forward stays Python between its layers; where these cannot be compiled one by one, it is a
        region as a whole. The context that layers read is set outside: entering it is no part of a graph.
        """
        try:
            layers = compile_regions(cast(nn.Module, self.model), compiler)
        except ValueError as error:
            logger.warning(
                "%s is compiled as a whole, which takes longer the more layers it has: %s",
                type(self.model).__name__,
                error,
            )
            self._forward = compiler.region(self._run_model)
        else:
            logger.info("%d layers of %s are one compiled region", layers, type(self.model).__name__)
        self._head = compiler.region(self._wide_logits)

    def hidden(self, step: DecoderStep) -> torch.Tensor:
        """[rows, hidden size], where all layers are here."""
        return self.run(step)[HIDDEN]

    def run(self, step: DecoderStep) -> StageTensors:
        """What the layers that are here hand on, [rows, hidden size] each; `HIDDEN` of the last stage."""
        metadata, count = step.metadata, step.num_rows
        if isinstance(metadata, GroupedMetadata):
            metadata.begin()
        padded = self._padded_rows(step)
        # vLLM would ask the other engines
        each = None if self.lockstep is None else torch.full((self.lockstep.size,), count, dtype=torch.int32)
        with set_forward_context(
            metadata,
            self._vllm_config,
            num_tokens=count,
            num_tokens_across_dp=each,
            slot_mapping={},
            is_padding=padded,
        ):
            return self._forward(self._arguments(step.rows), step.received)

    def unattended(self, rows: int, device: torch.device, longest: int | None = None) -> DecoderStep:
        """A step of pads, which attends to nothing. longest: see DecoderStep."""

        def pads(kind: type[RowInput]) -> torch.Tensor:
            shape = (rows,) if kind.columns is None else (kind.columns, rows)
            return torch.full(shape, kind.pad, dtype=torch.int64, device=device)

        inputs = {kind.name: pads(kind) for kind in self.inputs}
        return DecoderStep(inputs, None, self.received(rows, device), longest)

    def _arguments(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the arguments of the model's forward that are made of rows."""
        found: dict[str, torch.Tensor] = {}
        for kind in self.inputs:
            found.update(kind.kwargs(rows[kind.name]))
        return found

    def _padded_rows(self, step: DecoderStep) -> torch.Tensor | None:
        """bool, for layers with experts, of the rows that they get: what fills a bucket up writes to the first slot of
        the dummy block."""
        metadata, longest = step.metadata, step.longest
        if not self._has_experts or (metadata is None and longest is None):
            return None
        if metadata is None:
            own = torch.ones_like(step.rows["token_ids"], dtype=torch.bool)
        else:
            first = metadata.groups[0] if isinstance(metadata, GroupedMetadata) else metadata
            own = first.slots == DUMMY_BLOCK
        return own if self.lockstep is None else self.lockstep.padded_rows(own, longest or len(own))

    def received(self, rows: int, device: torch.device) -> StageTensors | None:
        """Zeros in place of what the stage before hands on; None on the first stage."""
        return None if self.stage is None or self.stage.is_first else self.between(rows, device)

    def between(self, rows: int, device: torch.device) -> StageTensors:
        """Zeros as one stage hands them to the next."""
        dtype = cast(torch.dtype, self._vllm_config.model_config.dtype)
        return self.model.make_empty_intermediate_tensors(rows, dtype, device).tensors

    @torch.inference_mode()
    def connect(self, device: torch.device) -> None:
        """Makes the connections between the stages, where there are several; see Stage."""
        if self.stage is None:
            return
        found = self.run(self.unattended(1, device))
        self.stage.connect(found, self.between(1, device))

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [rows, vocabulary], of some rows of the hidden states or of all: what vLLM's sampler and grammar
        masks compute in."""
        return self._head(hidden, rows).float()

    def write_logits(self, out: torch.Tensor, hidden: torch.Tensor, rows: torch.Tensor) -> None:
        """The same, written to `out`: what casts them is the copy."""
        out.copy_(self._head(hidden, rows))

    def _run_model(self, rows: dict[str, torch.Tensor], received: StageTensors | None) -> StageTensors:
        given = None if received is None else IntermediateTensors(received)
        found = self.model(**rows, intermediate_tensors=given, inputs_embeds=None)
        return found.tensors if isinstance(found, IntermediateTensors) else {HIDDEN: found}

    def _logits(self, hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        logits = self.model.compute_logits(hidden if rows is None else hidden.index_select(0, rows))
        assert logits is not None, "logits are gathered on every worker that asks for them"
        return logits

    def _wide_logits(self, hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """A compiled region casts what it computes."""
        return self._logits(hidden, rows).float()
