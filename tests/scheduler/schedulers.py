"""Real schedulers of ours over a model that exists as a configuration only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 4
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 32,
    "max_position_embeddings": 256,
}


def vllm_config(
    folder: Path, ucm: dict[str, Any], *, num_blocks: int = 200, budget: int = 64, async_scheduling: bool = False
) -> VllmConfig:
    """vLLM's configuration for a model folder made in `folder`."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32"),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=256, is_encoder_decoder=False
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
        additional_config={"ucm": ucm},
    )
    config.scheduler_config.async_scheduling = async_scheduling
    config.cache_config.num_gpu_blocks = num_blocks
    return config


def make_scheduler(config: VllmConfig, scheduler_class: type[Scheduler], windows: Sequence[int] = ()) -> Any:
    """A scheduler as the engine makes it.

    windows: of the groups before the one with whole contexts, in tokens.
    """
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec([f"window {number}"], SlidingWindowSpec(**sizes, sliding_window=window))
        for number, window in enumerate(windows)
    ]
    num_blocks = config.cache_config.num_gpu_blocks
    assert num_blocks is not None
    init_none_hash(sha256)
    return scheduler_class(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[*groups, KVCacheGroupSpec(["layer"], FullAttentionSpec(**sizes))],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def request(
    request_id: str,
    num_tokens: int,
    *,
    max_tokens: int = 50,
    start: int = 0,
    cache_salt: str | None = None,
    resumable: bool = False,
    **extra_args: Any,
) -> Request:
    """A request whose prompt counts from `start`."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args or None)
    prompt = [(start + index) % MODEL["vocab_size"] for index in range(num_tokens)]
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        cache_salt=cache_salt,
        resumable=resumable,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def run_step(scheduler: Any, drafts: int = 0, accepted: int = 0) -> SchedulerOutput:
    """Schedules, computes nothing, hands back tokens (with the accepted drafts), and proposes drafts for the next."""
    output: SchedulerOutput = scheduler.schedule()
    finish_step(scheduler, output, sampled_ids(scheduler, output), drafts, accepted)
    return output


def sampled_ids(scheduler: Any, output: SchedulerOutput) -> set[str]:
    """Requests that get a token from a step that was just scheduled: chunks that do not end a prompt get none."""
    return {name for name in output.num_scheduled_tokens if not scheduler.requests[name].is_prefill_chunk}


def finish_step(scheduler: Any, output: SchedulerOutput, sampled: set[str], drafts: int = 0, accepted: int = 0) -> None:
    """The second half of `run_step`."""
    ids = list(output.num_scheduled_tokens)
    tokens: list[list[int]] = []
    for name in ids:
        num_drafts = len(output.scheduled_spec_decode_tokens.get(name, []))
        tokens.append([1] * (1 + min(accepted, num_drafts)) if name in sampled else [])
    places = {name: index for index, name in enumerate(ids)}
    scheduler.update_from_output(
        output, ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=tokens)
    )
    if drafts:
        scheduler.update_draft_token_ids(DraftTokenIds(ids, [[2] * drafts for _ in ids]))
