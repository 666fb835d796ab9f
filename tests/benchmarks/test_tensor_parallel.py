"""The limit of a decode step that several devices share, and the table."""

from __future__ import annotations

import pytest

from benchmarks.tensor_parallel import SHAPES, DecodeTime, config_of, limit_ms, show
from vllm_gaudi_ucm.graphs.cost.specs import LLAMA_8B, ModelSpec


def test_the_limit_of_an_8b_model() -> None:
    """15.0 GB of weights, and 128 KiB of KV for each token; nothing is sent by one device."""
    assert ModelSpec.from_hf_config(config_of("8b")) == LLAMA_8B
    read = LLAMA_8B.weight_bytes + 64 * 1024 * 131072
    assert limit_ms("8b", 1, 64, 1024, 4e12, 1e9) == pytest.approx(1e3 * read / 4e12)
    # four devices read a quarter, and send 1.5 times the hidden states twice a layer
    sent = 64 * 1.5 * 64 * 4096 * 2
    assert limit_ms("8b", 4, 64, 1024, 4e12, 1e11) == pytest.approx(1e3 * (read / 4 / 4e12 + sent / 1e11), rel=0.01)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_can_be_shared(shape: str) -> None:
    for devices in (1, 2, 4, 8):
        assert limit_ms(shape, devices, 1, 1024, 4e12, 4e11) > 0


def test_ratios_are_to_the_first_size_and_to_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    show([DecodeTime(1, 16, 9.0, 10.0, 4.0), DecodeTime(2, 16, 4.5, 5.0, 4.0), DecodeTime(2, 1, 1.0, 2.0, None)])
    shown = capsys.readouterr().out
    assert "2.00" in shown
    assert "1.25" in shown
