"""What attention layers find while the model runs: the parts of their KV-cache group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.attention import get_attention_context

from tests.batch.batches import Request, lay_out
from vllm_gaudi_ucm.attention.backend import UnifiedAttentionMetadata
from vllm_gaudi_ucm.batch.batch_plan import plan_batch
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.execution.attention_group import StepMetadata, step_metadata
from vllm_gaudi_ucm.execution.decoder import Decoder, DecoderStep
from vllm_gaudi_ucm.execution.true_shape_tensors import TrueShapeTensors

ROWS = torch.zeros(2, dtype=torch.int64)


class OperatorNames(TorchDispatchMode):
    """Names of torch's operators, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def metadata_of(computed: int) -> UnifiedAttentionMetadata:
    """Of two decodes behind so many tokens."""
    plan = plan_batch(lay_out([Request(computed, 1)] * 2, 4, 0).batch_input(), 4)
    inputs, _ = TrueShapeTensors(torch.device("cpu")).stage(PlannedStep.of_tokens(plan, np.zeros(2, np.int64)))
    return step_metadata(inputs.slots, inputs.parts, 4, "reference", None)


def found_by_layers(metadata: StepMetadata, names: list[str]) -> list[UnifiedAttentionMetadata]:
    config = VllmConfig()
    config.compilation_config.static_forward_context = {name: SimpleNamespace(kv_cache=None) for name in names}
    found: list[UnifiedAttentionMetadata] = []

    def model(**inputs: Any) -> torch.Tensor:
        found.extend(cast(Any, get_attention_context(name)[0]) for name in names)
        return torch.zeros(2, 4)

    model.forward = model  # type: ignore[attr-defined]
    model.compute_logits = lambda hidden: hidden  # type: ignore[attr-defined]
    Decoder(cast(Any, model), config).hidden(DecoderStep({"token_ids": ROWS, "positions": ROWS}, metadata))
    return found


def test_logits_are_cast_where_they_are_written() -> None:
    """The same float32 bits as logits that are returned; between the product and the buffer there is one copy."""
    hidden, weight = torch.randn(3, 8).bfloat16(), torch.randn(8, 5).bfloat16()
    model = SimpleNamespace(forward=lambda **rows: hidden, compute_logits=lambda rows: rows @ weight)
    decoder = Decoder(cast(Any, model), VllmConfig())
    out, rows = torch.full((2, 5), torch.nan), torch.tensor([2, 0])
    with OperatorNames() as seen:
        decoder.write_logits(out, hidden, rows)
    assert seen.names == ["aten.index_select.default", "aten.mm.default", "aten.copy_.default"]
    assert torch.equal(out, (hidden[rows] @ weight).float())
    assert torch.equal(decoder.logits(hidden, rows), out)


def test_layers_of_one_group_find_the_same() -> None:
    metadata = metadata_of(5)
    assert all(found is metadata for found in found_by_layers(metadata, ["a", "b"]))


def test_each_layer_finds_the_parts_of_its_group() -> None:
    """Two groups: full attention, and one whose requests have fewer blocks."""
    whole, window = metadata_of(9), metadata_of(3)
    found = found_by_layers({"a": whole, "b": window, "c": whole}, ["a", "b", "c"])
    assert [one is whole for one in found] == [True, False, True]
    assert found[1].parts is window.parts
