"""Wraps vLLM's model for a step: from token ids to hidden states to logits, with the context of attention layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import nn

from vllm_gaudi_ucm.attention.backend import UnifiedAttentionImpl
from vllm_gaudi_ucm.attention.groups import GroupedMetadata
from vllm_gaudi_ucm.attention.latent import LatentAttention, LatentSizes
from vllm_gaudi_ucm.batch.adapter_slots import AdapterSlots
from vllm_gaudi_ucm.batch.embedding_rows import EmbeddingRows
from vllm_gaudi_ucm.batch.hidden_places import HiddenPlaces
from vllm_gaudi_ucm.batch.picture_spans import SPANS
from vllm_gaudi_ucm.batch.row_input import inputs_of
from vllm_gaudi_ucm.execution.passed_states import passed_states_of
from vllm_gaudi_ucm.execution.regions import compile_regions
from vllm_gaudi_ucm.kv_cache.allocation import DUMMY_BLOCK
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.multimodal.embedding_table import embedding_table_of
from vllm_gaudi_ucm.vllm_api.deepstack import give_levels
from vllm_gaudi_ucm.vllm_api.distributed import IntermediateTensors
from vllm_gaudi_ucm.vllm_api.layer_embeddings import embed_tokens
from vllm_gaudi_ucm.vllm_api.model import AttentionLayerBase, has_attention, set_forward_context, text_model
from vllm_gaudi_ucm.vllm_api.moe import RoutedExperts
from vllm_gaudi_ucm.vllm_api.platforms import is_pooling

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.attention.spans import StepSpans
    from vllm_gaudi_ucm.batch.window import Window
    from vllm_gaudi_ucm.distributed.lockstep import Lockstep
    from vllm_gaudi_ucm.distributed.stage import Stage, StageTensors
    from vllm_gaudi_ucm.execution.attention_group import StepMetadata
    from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler
    from vllm_gaudi_ucm.lora.step_routes import StepRoutes
    from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec

logger = plugin_logger(__name__)

HIDDEN = "hidden_states"
"""The name of the last stage's result."""
PASSED = "passed_states"
"""The name of what a model passes to its draft head, or a head to its next pass, if that is not its result."""


ModelResult = torch.Tensor | IntermediateTensors | tuple[torch.Tensor, torch.Tensor | list[torch.Tensor]]


def _modules(model: DecoderModel) -> Iterator[nn.Module]:
    return model.modules() if isinstance(model, nn.Module) else iter(())


class DecoderModel(Protocol):
    """The interface of a vLLM model for a step: token ids to hidden states [rows, hidden size], and these to logits.

    It takes each row's inputs by name: `input_ids`, `positions`, and the arguments of registered `RowInput`s; a model
    with a table of embeddings takes `inputs_embeds` in place of `input_ids`. A model that is a stage of a pipeline
    takes and returns `IntermediateTensors`, unless it is the first or the last stage. A model with a draft head may
    return a second result, the hidden states of some layers; a head, what its next pass reads.
    """

    def __call__(self, **rows: torch.Tensor | None) -> ModelResult: ...

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor: ...

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors: ...

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None: ...


class DecoderStep(NamedTuple):
    """The arguments of one forward of a model, on its device.

    rows: tensors of the `RowInput`s that the model reads, by name; `token_ids` is among them.
    metadata: input of attention; if None, attention is skipped, as in a memory measurement or a step of other engines.
    received: tensors of the previous stage; the forward may write them.
    longest: rows of the longest step of all engines, if they share out experts; None if all have the same number.
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
        stage: the part of the model's layers on this worker; None for all layers.
        lockstep: the engines that share out its experts; None if this engine has all of them.
        adapters: what layers with adapters read of a step's rows; None if there are no such layers.

    inputs: the model's inputs for each row.
    embeddings: embeddings of rows that no token describes; None if the model takes only tokens.
    states: hidden states that the model passes to its draft head, or reads as one; None without a head.
    """

    def __init__(
        self,
        model: DecoderModel,
        vllm_config: VllmConfig,
        stage: Stage | None = None,
        lockstep: Lockstep | None = None,
        adapters: StepRoutes | None = None,
    ) -> None:
        self.model = model
        self.inputs = inputs_of(cast(nn.Module, model))
        self.stage = stage
        self.lockstep = lockstep
        self._forward: Callable[..., StageTensors] = self._run_model
        self._head: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] = self._logits
        self._vllm_config = vllm_config
        self._adapters = adapters
        self.embeddings = embedding_table_of(model)
        self._spans: StepSpans | None = vars(model).get(SPANS) if isinstance(model, nn.Module) else None
        if self._spans is not None:
            for impl in self._attention():
                if impl.window is not None or not self._spans.in_windows:
                    impl.see_spans(self._spans)
        self.states = passed_states_of(model)
        self._has_experts = any(isinstance(module, RoutedExperts) for module in _modules(model))

    @property
    def is_last(self) -> bool:
        """Returns whether the model's last layer is on this stage."""
        return self.stage is None or self.stage.is_last

    @property
    def has_logits(self) -> bool:
        """Returns whether this stage computes logits: it has the last layer, and the model does not pool."""
        return self.is_last and not is_pooling(self._vllm_config)

    @property
    def is_encoder(self) -> bool:
        """Returns whether rows see both ways."""
        return any(spec.both_ways for spec in self.specs)

    @property
    def num_layers(self) -> int:
        """Returns the number of attention layers on this stage."""
        return len(self._attention_layers())

    @cached_property
    def latent(self) -> LatentSizes | None:
        """Returns the sizes of latent attention if all layers have it with the same sizes; otherwise None."""
        sizes = {layer.sizes if isinstance(layer, LatentAttention) else None for layer in self._attention_layers()}
        return sizes.pop() if len(sizes) == 1 else None

    @cached_property
    def chosen(self) -> int:
        """Returns the most tokens that each row chooses by itself (DSA); 0 if it attends to all."""
        layers = self._attention_layers()
        return max((layer.sizes.chosen for layer in layers if isinstance(layer, LatentAttention)), default=0)

    @property
    def specs(self) -> list[AttentionSpec]:
        return [impl.spec for impl in self._attention()]

    @property
    def windows(self) -> list[Window | None]:
        """Returns the distinct windows of the layers on this stage: whole contexts (None) first, then the widest."""
        found = dict.fromkeys(impl.window for impl in self._attention())
        return sorted(found, key=lambda window: 0 if window is None else 1 / window.tokens)

    @property
    def window(self) -> Window | None:
        """Returns the window of the first KV-cache group."""
        return next(iter(self.windows), None)

    @property
    def shares_caches(self) -> bool:
        """Returns whether layers read the keys and values of others."""
        return any(impl.shares for impl in self._attention())

    def _attention(self) -> list[UnifiedAttentionImpl]:
        return [cast(UnifiedAttentionImpl, layer.impl) for layer in self._attention_layers()]

    def _attention_layers(self) -> list[AttentionLayerBase]:
        """Returns the attention layers; layers with a state have no attention implementation."""
        layers = cast(nn.Module, self.model).modules()
        return [layer for layer in layers if isinstance(layer, AttentionLayerBase) and has_attention(layer)]

    def compile(self, compiler: StaticCompiler) -> None:
        """Makes layers and output head run compiled from now on, once for each set of shapes.

        The model's own forward stays Python between its layers; if they cannot be compiled one by one, the whole
        forward is one region. The context that layers read is set outside: entering it is not part of a graph.
        """
        try:
            others = () if self._adapters is None else self._adapters.regions
            layers = compile_regions(text_model(cast(nn.Module, self.model)), compiler, others)
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
        if self._adapters is not None:
            self._adapters.compile(compiler)
        if self.embeddings is not None:
            self.embeddings.compile(compiler)
        if self.states is not None:
            self.states.compile(compiler)

    def hidden(self, step: DecoderStep) -> torch.Tensor:
        """Returns [rows, hidden size]; all layers must be on this stage."""
        return self.run_layers(step)[HIDDEN]

    def run_layers(self, step: DecoderStep) -> StageTensors:
        """Returns the tensors that the layers pass on, [rows, hidden size] each; `HIDDEN` on the last stage."""
        metadata, count = step.metadata, step.num_rows
        if isinstance(metadata, GroupedMetadata):
            metadata.begin()
        padded = self._padded_rows(step)
        if self._adapters is not None:
            # layers read it from outside of their regions, like the context
            self._adapters.begin(step.rows[AdapterSlots.name])
        if self._spans is not None:
            self._spans.begin(step.rows[SPANS])
        # otherwise vLLM would exchange these numbers with the other engines
        each = None if self.lockstep is None else torch.full((self.lockstep.size,), count, dtype=torch.int32)
        with set_forward_context(
            metadata,
            self._vllm_config,
            num_tokens=count,
            num_tokens_across_dp=each,
            slot_mapping={},
            is_padding=padded,
        ):
            found = self._forward(self._arguments(step.rows), step.received)
        if self.states is not None:
            self.states.keep(step.rows[HiddenPlaces.name], found.pop(PASSED, found[HIDDEN]))
        return found

    def unattended(self, rows: int, device: torch.device, longest: int | None = None) -> DecoderStep:
        """Returns a step of pads without attention. longest: see DecoderStep."""
        inputs = {
            kind.name: torch.full(kind.shape(rows), kind.pad, dtype=torch.int64, device=device) for kind in self.inputs
        }
        return DecoderStep(inputs, None, self.received(rows, device), longest)

    def _arguments(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the arguments of the model's forward that are made from rows."""
        found: dict[str, torch.Tensor] = {}
        for kind in self.inputs:
            found.update(kind.kwargs(rows[kind.name]))
        if self.embeddings is not None:
            chosen, tokens = rows[EmbeddingRows.name], found.pop("input_ids")
            of_tokens = embed_tokens(cast(nn.Module, self.model), self.embeddings.token_ids(tokens, chosen))
            found["inputs_embeds"], levels = self.embeddings.merged(of_tokens, chosen)
            if levels is not None:
                give_levels(cast(nn.Module, self.model), levels)
        if self.states is not None:
            found.update(self.states.arguments(rows[HiddenPlaces.name]))
        return found

    def _padded_rows(self, step: DecoderStep) -> torch.Tensor | None:
        """Returns bool, which rows of layers with experts are pads, in the dummy block's first slot; None: no mask."""
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
        """Returns zeros in the form of the previous stage's tensors; None on the first stage."""
        return None if self.stage is None or self.stage.is_first else self.between(rows, device)

    def between(self, rows: int, device: torch.device) -> StageTensors:
        """Returns zeros in the form of the tensors that one stage passes to the next."""
        dtype = cast(torch.dtype, self._vllm_config.model_config.dtype)
        return self.model.make_empty_intermediate_tensors(rows, dtype, device).tensors

    @torch.inference_mode()
    def connect(self, device: torch.device) -> None:
        """Makes the connections between stages if there are several; see Stage."""
        if self.stage is None:
            return
        found = self.run_layers(self.unattended(1, device))
        self.stage.connect(found, self.between(1, device))

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Returns float32 [rows, vocabulary] for some rows of the hidden states or for all; vLLM's sampler and grammar
        masks compute in float32.

        hidden: of the last forward, from its first row, for a model with adapters.
        """
        return self._scored(hidden, rows).float()

    def write_logits(self, out: torch.Tensor, hidden: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes logits to `out`; the copy casts them."""
        out.copy_(self._scored(hidden, rows))

    def _scored(self, hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        if self._adapters is not None:
            self._adapters.of_hidden(len(hidden), rows)
        return self._head(hidden, rows)

    def _run_model(self, rows: dict[str, torch.Tensor], received: StageTensors | None) -> StageTensors:
        others: dict[str, Any] = {name: None for name in ("input_ids", "inputs_embeds") if name not in rows}
        if self.states is None or not self.states.is_of_head:
            others["intermediate_tensors"] = None if received is None else IntermediateTensors(received)
        found = self.model(**rows, **others)
        if isinstance(found, IntermediateTensors):
            return found.tensors
        if isinstance(found, torch.Tensor):
            return {HIDDEN: found}
        hidden, passed = found
        return {HIDDEN: hidden, PASSED: passed if isinstance(passed, torch.Tensor) else torch.cat(passed, dim=-1)}

    def _logits(self, hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        logits = self.model.compute_logits(hidden if rows is None else hidden.index_select(0, rows))
        assert logits is not None, "logits are gathered on every worker that asks for them"
        return logits

    def _wide_logits(self, hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Returns float32 logits: a compiled region includes the cast."""
        return self._logits(hidden, rows).float()
