"""Serves the load of `gaudi-ucm demo` with vLLM's asynchronous engine, as a server would."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.device.detect import detect_device
from vllm_gaudi_ucm_tools.buckets.cost_options import read_model
from vllm_gaudi_ucm_tools.demo.load import DemoRequest

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.engine import AsyncLLM

MAX_MODEL_LEN = 4096
NEEDED_MODEL_LEN = 3072
KV_CACHE_BYTES = 2**30


class DemoError(ValueError):
    """Raised if the demo cannot run; the message names the option, what was found and what to do."""


@dataclass
class Answer:
    """The output of one request so far."""

    request: DemoRequest
    texts: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens_of_sample: list[int] = field(default_factory=list)
    first_token_s: float | None = None
    finished: bool = False

    @property
    def output_tokens(self) -> int:
        """Tokens of all samples together."""
        return sum(self.tokens_of_sample)

    @property
    def progress(self) -> float:
        """Fraction of the tokens that this request may yield; 1 when it is finished."""
        return 1.0 if self.finished else self.output_tokens / (self.request.n * self.request.max_tokens)


def check_model(model: Path) -> int:
    """The context length to serve `model` with, or DemoError if the folder holds no usable model."""
    config = model / "config.json"
    if not config.is_file():
        raise DemoError(
            f"--model: {model} holds no config.json; expected the folder of a model in Hugging Face format; "
            "`gaudi-ucm fetch-model` puts a small one in place"
        )
    try:
        found = json.loads(config.read_text()).get("max_position_embeddings", MAX_MODEL_LEN)
    except (ValueError, AttributeError, RecursionError) as error:
        raise DemoError(f"--model: {config} is not a JSON object ({error}); fetch the model again") from error
    if type(found) is not int:
        raise DemoError(f"--model: {config}: max_position_embeddings is {found!r}, expected a number")
    if found < NEEDED_MODEL_LEN:
        raise DemoError(
            f"--model: {model} has a context of {found} tokens, the demo needs {NEEDED_MODEL_LEN}; choose another model"
        )
    return min(found, MAX_MODEL_LEN)


def check_workers(model: Path, workers: int) -> None:
    """Raises a ValueError that names the option if `workers` cannot share the heads of the model."""
    if workers != 1:
        read_model(model)[1].shard(workers)


def start_engine(model: Path, phase_log: Path, seed: int, log_level: str, workers: int = 1) -> AsyncLLM:
    """The engine as `vllm serve` would start it, writing its phase log; only the sizes are small."""
    max_model_len = check_model(model)
    from vllm_gaudi_ucm.vllm_api.engine import AsyncEngineArgs, AsyncLLM, LoggingConfig, configure_logging

    logging_config = LoggingConfig(log_level=log_level)  # type: ignore[arg-type]  # a Literal, checked by pydantic
    configure_logging(logging_config)
    arguments = AsyncEngineArgs(
        model=str(model),
        # vLLM would turn a float32 model into float16, for which most CPUs have no arithmetic.
        dtype="float32" if detect_device() == "cpu" else "bfloat16",
        max_model_len=max_model_len,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        seed=seed,
        tensor_parallel_size=workers,
        disable_log_stats=True,
        logging_config=logging_config,
        use_tqdm_on_load=False,
        additional_config={"ucm": {"phase_log": str(phase_log)}},
    )
    try:
        return AsyncLLM.from_engine_args(arguments)
    except RuntimeError as error:
        raise DemoError(
            f"--model: the engine did not start with {model} ({error}); its own error is printed above"
        ) from error


async def serve(
    engine: AsyncLLM, load: Sequence[DemoRequest], on_change: Callable[[list[Answer]], None]
) -> list[Answer]:
    """Send each request at its time and collect the answers; `on_change` sees all of them after each output."""
    answers = [Answer(request) for request in load]

    async def follow(index: int, answer: Answer) -> None:
        await asyncio.sleep(answer.request.arrival_s)
        sent = time.perf_counter()
        prompt = await _render(engine, answer.request)
        async for output in engine.generate(prompt, _params(answer.request), f"demo-{index}"):
            if answer.first_token_s is None:
                answer.first_token_s = time.perf_counter() - sent
            _collect(answer, output)
            on_change(answers)

    from vllm_gaudi_ucm.vllm_api.engine import EngineDeadError

    try:
        # The first failure ends the demo; asyncio.run cancels the other requests.
        await asyncio.gather(*(follow(index, answer) for index, answer in enumerate(answers)))
    except EngineDeadError as error:
        raise DemoError(f"the engine stopped while serving ({error}); its own error is printed above") from error
    return answers


async def _render(engine: AsyncLLM, request: DemoRequest) -> Any:
    """Returns the engine's input for a chat, through the model's chat template if it has one."""
    tokenizer: Any = engine.get_tokenizer()
    messages = [{"role": role, "content": content} for role, content in request.messages]
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        text = "\n\n".join(message["content"] for message in messages)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    (rendered,) = await engine.renderer.render_cmpl_async([{"prompt_token_ids": token_ids}])
    return rendered


def _params(request: DemoRequest) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=request.n,
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        output_kind=RequestOutputKind.CUMULATIVE,
    )


def _collect(answer: Answer, output: Any) -> None:
    """Take over the state of a request; a cumulative output holds the samples that changed, each whole."""
    while len(answer.texts) < answer.request.n:
        answer.texts.append("")
        answer.tokens_of_sample.append(0)
    for sample in output.outputs:
        answer.texts[sample.index] = sample.text
        answer.tokens_of_sample[sample.index] = len(sample.token_ids)
    answer.prompt_tokens = len(output.prompt_token_ids or ())
    answer.cached_tokens = output.num_cached_tokens or 0
    answer.finished = output.finished
