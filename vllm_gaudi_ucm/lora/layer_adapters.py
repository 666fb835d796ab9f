"""The products of a layer's adapters, for vLLM's layers, by the operation `ops/lora`."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from vllm_gaudi_ucm.lora.step_routes import StepRoutes
from vllm_gaudi_ucm.ops.lora.api import Begun, add_adapters, add_up, begin_adapters
from vllm_gaudi_ucm.ops.lora.weights import AdapterWeights
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.lora import PunicaWrapperBase

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import LoRAConfig


class LayerAdapters(PunicaWrapperBase):
    """The adapters of one layer. vLLM makes one object for a model, and `of_layer` makes the others of it.

    Every call returns its result, as for platforms on which tensors cannot be updated in place.

    step: routes of the rows that are computed, the same object in all layers.
    """

    step: StepRoutes

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        *,
        lora_config: LoRAConfig,
        **others: Any,
    ) -> None:
        # without vLLM's own, which allocates index tensors of a step
        self.device = device  # type: ignore[assignment]  # vLLM's class takes a name as it is, too
        self._weights: AdapterWeights | None = None
        self._begun: Begun | None = None

    def of_layer(self, weights: AdapterWeights, step: StepRoutes) -> LayerAdapters:
        """Returns the adapters of a layer with these weights."""
        found = copy(self)
        found._weights, found.step = weights, step
        return found

    @property
    def weights(self) -> AdapterWeights:
        assert self._weights is not None, "of_layer gives a layer its weights"
        return self._weights

    # vLLM's class assigns the tensor in each step; its layers only read it
    @property
    def _embeddings_indices(self) -> torch.Tensor:  # type: ignore[override]  # layers only read it
        """Returns int64 [rows], where the rows of each row's adapter begin in the first matrices of an embedding. A row
        without an adapter reads the rows of slot 0, and `add_lora_embedding` discards them.
        """
        weights = self.weights
        tokens = weights.down.shape[0] // weights.slots
        return self.step.current.rows.clamp(min=0) * tokens

    def begin(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Starts products before the layer computes its own one; a hook of torch ahead of its forward."""
        if not torch.compiler.is_compiling() and inputs and isinstance(inputs[0], torch.Tensor):
            self._begun = begin_adapters(inputs[0], self.step.current, self.weights)

    def own_product(self, x: torch.Tensor) -> torch.Tensor | None:
        """Returns the layer's own product of x, without a bias, if `begin` computed it."""
        return None if self._begun is None or not self._begun.is_of(x) else self._begun.own

    def update_metadata(self, *_: Any, **others: Any) -> None:
        """Does nothing: a row input of the step has each row's adapter, in place of vLLM's index tensors."""

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **others: Any,
    ) -> torch.Tensor:
        """Returns y + the products of the rows' adapters. The scale is in the matrices, and these are `weights`."""
        begun, self._begun = self._begun, None
        return add_adapters(y, x, self.step.current, self.weights, begun)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **others: Any,
    ) -> torch.Tensor:
        """Returns the logits y + the products of the rows' adapters."""
        # a padded vocabulary has more columns, which vLLM cuts off next
        return add_adapters(y[:, : len(self.weights.up)], x, self.step.current, self.weights)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, *_: Any, **others: Any
    ) -> torch.Tensor:
        """Returns the embeddings y + the second products. x: [rows, rank], of the tokens in each row's adapter."""
        return add_up(y, x, self.step.current, self.weights)

    def add_shrink(self, *_: Any, **others: Any) -> NoReturn:
        """Refused: layers call one product alone if ranks share out the matrices."""
        raise UnsupportedFeatureError("adapters whose matrices ranks share out", "--fully-sharded-loras")

    def add_expand(self, *_: Any, **others: Any) -> NoReturn:
        """Raises UnsupportedFeatureError, as `add_shrink` does."""
        raise UnsupportedFeatureError("adapters whose matrices ranks share out", "--fully-sharded-loras")

    def apply_lora_full_linear(self, *_: Any, **others: Any) -> NoReturn:
        """Refused: no model with such a head is served."""
        raise UnsupportedFeatureError("heads for classification in an adapter", "an adapter's modules_to_save")
