"""Adapters (LoRA) whose first products are computed before a layer's own one, as on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.engine.lora_family import BUCKETS, OPTIONS, Family
from tests.engine.serving import Engine
from vllm_gaudi_ucm.ops.lora.impl.stacked import StackedLora
from vllm_gaudi_ucm.ops.lora.implementation import LORA
from vllm_gaudi_ucm.ops.lora.weights import AdapterWeights

pytestmark = pytest.mark.slow  # starts engines


class AheadLora(StackedLora):
    """Products over all slots, the first one when the layer begins."""

    priority: ClassVar[int] = 100
    begins: ClassVar[bool] = True
    measured: ClassVar[list[tuple[int, ...]]] = []
    # layers that were begun and not finished, and those that were finished
    open: ClassVar[list[int]] = []
    finished: ClassVar[list[int]] = []

    def measure(self, weights: AdapterWeights) -> None:
        self.measured.append(weights.outputs)

    def begin(self, x: Tensor, routes: Tensor, weights: AdapterWeights) -> Tensor:
        self.open.append(id(weights))
        return functional.linear(x, weights.down).view(len(x), len(weights.outputs), -1)

    def finish(self, y: Tensor, begun: Tensor, routes: Tensor, weights: AdapterWeights) -> Tensor:
        self.open.remove(id(weights))
        self.finished.append(id(weights))
        narrow = begun.masked_fill(routes.unsqueeze(1), 0)
        parts = zip(narrow.unbind(1), weights.up.split(weights.outputs), strict=True)
        return y + torch.cat([functional.linear(part, up) for part, up in parts], -1)


@pytest.mark.parametrize("ucm", [{}, BUCKETS], ids=["true shapes", "buckets"])
def test_layers_begin_in_static_shapes_alone(tmp_path: Path, ucm: dict[str, Any]) -> None:
    """Tokens equal a model with merged weights, and every layer that begins products ends them."""
    family = Family(tmp_path, "llama")
    AheadLora.measured.clear()
    AheadLora.finished.clear()
    with LORA.scope():
        LORA.register("ahead", AheadLora)
        with Engine(family.model, ucm, **OPTIONS) as engine:
            family.ask(engine)
            engine.check_idle()
    assert not AheadLora.open
    # qkv, o, gate and up, down of each layer
    layers = 4 * family.references[0].model.config.num_hidden_layers
    assert len(set(AheadLora.finished)) == (layers if ucm else 0)
    # the smallest one
    assert len(AheadLora.measured) == (1 if ucm else 0)
