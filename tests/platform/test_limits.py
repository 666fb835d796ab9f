"""A step's limits: what vLLM takes where the user gives none, and what the memory of a step allows."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from tests.engine.tiny_models import make_config
from vllm_gaudi_ucm.platform.platform import UcmPlatform, logger


@pytest.fixture
def on_hpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UcmPlatform, "device_type", "hpu")


def test_a_gaudi_gets_the_limits_of_no_h100(on_hpu: None) -> None:
    """A step of 8,192 tokens and 1,024 requests would be the largest bucket."""
    tokens, requests = EngineArgs.get_batch_defaults(1)
    assert (tokens[UsageContext.OPENAI_API_SERVER], requests[UsageContext.OPENAI_API_SERVER]) == (2048, 256)
    assert (tokens[UsageContext.LLM_CLASS], requests[UsageContext.LLM_CLASS]) == (8192, 256)


def test_a_gaudi_pins_no_memory_of_the_host(on_hpu: None) -> None:
    assert not UcmPlatform.is_pin_memory_available()


def test_a_server_lowers_its_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only with the implementation that needs it; the scheduler has both numbers."""

    config = make_config("llama", max_position_embeddings=4096)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)

    def scheduler(**ucm: object) -> tuple[int, int | None]:
        options = {"ucm": {"attention": {"implementation": "hpu"}, **ucm}}
        args = EngineArgs(
            str(tmp_path),
            skip_tokenizer_init=True,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            additional_config=options,
        )
        found = args.create_engine_config().scheduler_config
        return found.max_num_batched_tokens, found.max_num_scheduled_tokens

    assert scheduler()[0] == 512
    logger.addHandler(caplog.handler)
    try:
        lowered, scheduled = scheduler(graphs={"step_memory": 0.004})
    finally:
        logger.removeHandler(caplog.handler)
    assert 8 <= lowered < 512
    assert scheduled is None or scheduled <= lowered
    assert "ucm.graphs.step_memory" in caplog.text
    assert scheduler(attention={"implementation": "reference"}, graphs={"step_memory": 0.004})[0] == 512
