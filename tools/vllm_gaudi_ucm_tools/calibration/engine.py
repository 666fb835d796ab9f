"""The engine of `gaudi-ucm calibrate`: steps at their true shapes, in this process, whose layers can be observed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vllm_gaudi_ucm_tools.observed_engine import ObservedEngine

if TYPE_CHECKING:
    from torch import nn

    from vllm_gaudi_ucm.vllm_api.engine import EngineArgs

AT_ONCE = 8
"""Prompts that are answered at a time."""
BLOCK_SIZE = 128
_CALLED = {"graphs": {"mode": "off"}, "cpu": {"native_graphs": False, "packed_weights": False}}
"""Options by which a step calls every layer, and layers keep their weights."""


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of a calibration. max_model_len: tokens of a prompt and its answer."""

    model: Path
    dtype: str
    max_model_len: int
    log_level: str = "ERROR"


class CalibrationEngine(ObservedEngine):
    """An engine that calls every layer in each step."""

    def __init__(self, settings: CalibrationSettings) -> None:
        super().__init__(settings.model, partial(_engine_args, settings))

    @property
    def model(self) -> nn.Module:
        return cast("nn.Module", self.runner.decoder.model)

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int, on_answer: Callable[[], None]) -> None:
        """Answers prompts of token ids greedily; calls `on_answer` after each answer."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        for number, prompt in enumerate(prompts):
            self._engine.add_request(f"calibration-{number}", {"prompt_token_ids": list(prompt)}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    on_answer()


def _engine_args(settings: CalibrationSettings) -> EngineArgs:
    from vllm_gaudi_ucm.vllm_api.engine import EngineArgs, LoggingConfig, configure_logging

    logging_config = LoggingConfig(log_level=settings.log_level)  # type: ignore[arg-type]  # checked by pydantic
    configure_logging(logging_config)
    blocks = AT_ONCE * (-(-settings.max_model_len // BLOCK_SIZE) + 1)
    return EngineArgs(
        model=str(settings.model),
        dtype=settings.dtype,  # type: ignore[arg-type]  # checked by argparse
        skip_tokenizer_init=True,
        max_model_len=settings.max_model_len,
        max_num_seqs=AT_ONCE,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=blocks,
        # tokens of a hit would not be seen
        enable_prefix_caching=False,
        disable_log_stats=True,
        logging_config=logging_config,
        use_tqdm_on_load=False,
        additional_config={"ucm": _CALLED},
    )
