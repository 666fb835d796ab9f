"""`ucm.cpu.matrix_unit` decides before anything is packed or multiplied, also against an engine before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.layers.cpu import packed_weights
from vllm_gaudi_ucm.ops.cpu.native import matrix_unit
from vllm_gaudi_ucm.start import model_runner
from vllm_gaudi_ucm.start.model_runner import ModelRunner


class _Decoder:
    windows = ()
    shares_caches = False

    def connect(self, *_: object) -> None:
        """There is no stage beside it."""


@pytest.mark.parametrize("wanted", [True, False])
def test_the_option_has_its_effect(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(model_runner, "load_target_model", lambda *_, **__: nn.Module())
    monkeypatch.setattr(model_runner, "load_draft_model", lambda *_: None)
    monkeypatch.setattr(model_runner, "Decoder", lambda *_: _Decoder())
    monkeypatch.setattr(packed_weights, "pack_linear_layers", lambda *_: seen.append(matrix_unit.in_use()) or (0, 0))
    runner = object.__new__(ModelRunner)
    compilation = SimpleNamespace(static_forward_context={})
    text = SimpleNamespace(model_type="llama")
    model = SimpleNamespace(hf_text_config=text, runner_type="generate", is_hybrid=False)
    config = SimpleNamespace(compilation_config=compilation, model_config=model, lora_config=None)
    runner._vllm_config = config  # type: ignore[assignment]
    runner._config = resolve_config({"ucm": {"cpu": {"matrix_unit": wanted}}})
    runner._device = SimpleNamespace(kind="cpu")  # type: ignore[assignment]
    runner.kind = "off"
    runner._stage = runner._adapters = None
    runner._lockstep = None
    runner._tensors_on = torch.device("cpu")
    with matrix_unit.using(not wanted):
        runner.load_model()
        assert seen == [wanted and matrix_unit.available()]
