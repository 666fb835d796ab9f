"""Runs the KV connector and memory mode on the device that VLLM_GAUDI_UCM_DEVICE names.

A second engine over the same store must find the prompts' blocks there and give the answers of the first; memory mode
must move blocks out and back. For machines that CI does not have, as check_device.py.
usage: VLLM_GAUDI_UCM_DEVICE=cuda python scripts/check_device_stores.py
"""

import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from check_device import NEW_TOKENS, make_model, make_prompts
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import KVTransferConfig
from vllm.platforms import current_platform

BLOCK = 32
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 256 << 20,
    "block_size": BLOCK,
}
GSA = {"sparse_ratio": 0.2, "sparse_steps": "always", "min_tokens": 256, "local_window_sz": 1, "init_window_sz": 1}
MEMORY_MODE: dict[str, Any] = {
    "ucm_sparse_method": "GSA",
    "ucm_sparse_config": {"GSA": GSA},
    "memory_mode": {"enabled": True, "on_device_ratio": 0.4, "refresh_steps": 4, "max_missed": 1.0},
}


def transfer(store: dict[str, Any], **options: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="UcmConnector",
        kv_connector_module_path="vllm_gaudi_ucm.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"store": store, **options},
    )


class Engine:
    """One engine; `answers` of all prompts at once, with the prompts' tokens that were not computed."""

    def __init__(self, folder: str, ucm: dict[str, Any], **options: Any) -> None:
        self.llm = LLM(folder, **OPTIONS, **options, additional_config={"ucm": ucm})

    def answers(self, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> tuple[list[list[int]], int]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params, use_tqdm=False
        )
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        return [list(output.outputs[0].token_ids) for output in outputs], cached

    @property
    def scheduler(self) -> Any:
        core: Any = self.llm.llm_engine.engine_core
        return core.engine_core.scheduler

    def end(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def check_file_store(folder: str, prompts: list[list[int]], expected: list[list[int]]) -> bool:
    """Two engines, one after the other, over one folder."""
    with tempfile.TemporaryDirectory() as blocks:
        found = []
        for _ in range(2):
            engine = Engine(folder, {}, kv_transfer_config=transfer({"kind": "file", "path": blocks, "deadline": 10.0}))
            found.append(engine.answers(prompts))
            engine.end()
    return _report("file store", found, expected)


def check_memory_store(folder: str, prompts: list[list[int]], expected: list[list[int]]) -> bool:
    """One engine, whose prefix cache is emptied between."""
    engine = Engine(folder, {}, kv_transfer_config=transfer({"kind": "memory", "capacity": 1 << 30}))
    found = [engine.answers(prompts)]
    assert engine.llm.reset_prefix_cache()
    found.append(engine.answers(prompts))
    engine.end()
    return _report("memory store", found, expected)


def check_memory_mode(folder: str, prompts: list[list[int]]) -> bool:
    """Answers depend on when copies arrive, so that they are counted and not compared."""
    engine = Engine(folder, MEMORY_MODE, enable_prefix_caching=False)
    answers, _ = engine.answers(prompts)
    totals = engine.scheduler.offload.totals
    engine.end()
    print(f"memory mode: {totals}", flush=True)
    return all(len(answer) == NEW_TOKENS for answer in answers) and totals.released > 0 and not totals.failed


def _report(name: str, found: list[tuple[list[list[int]], int]], expected: list[list[int]]) -> bool:
    (cold, _), (warm, cached) = found
    equal = [sum(a == b for a, b in zip(tokens, expected, strict=True)) for tokens in (cold, warm)]
    print(
        f"{name}: {equal[0]} cold and {equal[1]} warm answers of {len(expected)} equal those without it; "
        f"{cached} tokens found when warm",
        flush=True,
    )
    return equal == [len(expected)] * 2 and cached > 0


def main() -> int:
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = make_prompts()
    print(f"{type(current_platform).__name__} on {current_platform.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        engine = Engine(folder, {})
        expected, _ = engine.answers(prompts)
        engine.end()
        right = [
            check_file_store(folder, prompts, expected),
            check_memory_store(folder, prompts, expected),
            check_memory_mode(folder, prompts),
        ]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
