"""The engine of `gaudi-ucm sparse-report`: one request at a time, in this process, so that its attention can be
observed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm_tools.observed_engine import ObservedEngine

if TYPE_CHECKING:
    from vllm_gaudi_ucm.sparse.base import UcmSparseBase
    from vllm_gaudi_ucm.sparse.selection.block_selector import SelectionLayer
    from vllm_gaudi_ucm.vllm_api.engine import EngineArgs

PROMPT_CHUNK = 512
# of the prefix cache: the blocks of a request that has ended are the prompt of the next
SPARE_BLOCKS = 4


@dataclass(frozen=True)
class EngineSettings:
    """Settings that the engines of a report share. device: hpu, cuda or cpu. max_model_len: of prompt and answer."""

    model: Path
    device: str
    max_model_len: int
    block_size: int
    log_level: str = "ERROR"

    @property
    def serves_true_shapes(self) -> bool:
        """True if a server would run steps at their true shapes there."""
        return self.device == "cpu"


@dataclass
class Reply:
    """An answer and its times. likeliest: the model's own choice at each place, if logprobs were requested."""

    first_token_s: float
    tokens: list[int] = field(default_factory=list)
    likeliest: list[int] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)


class SparseEngine(ObservedEngine):
    """An engine that answers one request at a time.

    Args:
        settings: settings of the report.
        ucm: the plugin's options.
        true_shapes: without graphs, and able to follow forced tokens: `runner` then shows the actual steps. Otherwise
            it runs like a server.
    """

    def __init__(self, settings: EngineSettings, ucm: Mapping[str, Any], true_shapes: bool) -> None:
        super().__init__(settings.model, partial(_engine_args, settings, ucm, true_shapes))
        self._requests = 0

    @property
    def method(self) -> UcmSparseBase | None:
        """The worker's side of the sparse method."""
        worker = self.runner.parts.sparse
        return None if worker is None else worker.method

    def layers(self) -> list[SelectionLayer]:
        """Keys and scale of each attention layer, in the model's order."""
        from vllm_gaudi_ucm.kv_cache.allocation import attention_layers
        from vllm_gaudi_ucm.kv_cache.pair import in_blocks
        from vllm_gaudi_ucm.sparse.selection.block_selector import SelectionLayer

        parts, found = self.runner.parts, []
        for name, layer in attention_layers(self.vllm_config).items():
            implementation: Any = layer.impl
            keys = in_blocks(parts.kv_caches[name], parts.block_size).key
            found.append(SelectionLayer(keys, implementation.scale))
        return found

    def answer(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        on_step: Callable[[], None],
        extra_args: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
    ) -> Reply:
        """The greedy answer to a prompt of token ids, of exactly this length; `on_step` is called after steps."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=logprobs,
            detokenize=False,
            extra_args=dict(extra_args or {}),
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        self._requests += 1
        self._engine.add_request(f"report-{self._requests}", {"prompt_token_ids": list(prompt)}, params)
        reply, begin = Reply(0.0), time.perf_counter()
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            end = time.perf_counter()
            on_step()
            for output in outputs:
                _take(reply, output.outputs[0], end - begin)
                begin = end
        return reply


def _engine_args(settings: EngineSettings, ucm: Mapping[str, Any], true_shapes: bool) -> EngineArgs:
    from vllm_gaudi_ucm.vllm_api.engine import EngineArgs, LoggingConfig, configure_logging
    from vllm_gaudi_ucm_tools.sparse_report.forced_tokens import ForcedTokens

    logging_config = LoggingConfig(log_level=settings.log_level)  # type: ignore[arg-type]  # checked by pydantic
    configure_logging(logging_config)
    graphs = {"graphs": {"mode": "off"} if true_shapes else {"warm_up": "full"}}
    return EngineArgs(
        model=str(settings.model),
        # vLLM would turn a float32 model into float16, for which most CPUs have no arithmetic.
        dtype="float32" if settings.device == "cpu" else "bfloat16",
        skip_tokenizer_init=True,
        max_model_len=settings.max_model_len,
        max_num_seqs=1,
        max_num_batched_tokens=min(PROMPT_CHUNK, settings.max_model_len),
        block_size=settings.block_size,
        num_gpu_blocks_override=-(-settings.max_model_len // settings.block_size) + SPARE_BLOCKS,
        disable_log_stats=True,
        logging_config=logging_config,
        use_tqdm_on_load=False,
        logits_processors=[ForcedTokens] if true_shapes else None,
        additional_config={"ucm": {**graphs, **ucm}},
    )


def _take(reply: Reply, completion: Any, seconds: float) -> None:
    if reply.tokens:
        reply.step_s.append(seconds)
    else:
        reply.first_token_s = seconds
    reply.tokens = list(completion.token_ids)
    if completion.logprobs:
        reply.likeliest = [
            next(token for token, found in place.items() if found.rank == 1) for place in completion.logprobs
        ]
