"""Runs the plugin end to end on the device that VLLM_GAUDI_UCM_DEVICE names and compares it with Hugging Face there.

For machines that CI does not have: needs no network and no model file (a small random Llama is made on the spot).
usage: VLLM_GAUDI_UCM_DEVICE=cuda python scripts/check_device.py
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from vllm_gaudi_ucm.observability.phase_log import read_phase_log

VOCABULARY = 1024
NEW_TOKENS = 48


def make_model(folder: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        torch_dtype="float32",
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def make_prompts() -> list[list[int]]:
    """Short, long, and prompts with a common prefix that the prefix cache and the shared part get to see."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    prefix = tokens(300)
    return [tokens(n) for n in (1, 7, 128, 129, 700, 1500)] + [prefix + tokens(n) for n in (5, 40, 200, 128)]


def reference_tokens(model: LlamaForCausalLM, prompts: list[list[int]], device: str) -> list[list[int]]:
    model = model.to(device)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append(out[0, len(prompt) :].tolist())
    return found


# Every block is chosen, so the tokens are those of dense attention; every part of a selection runs.
ALL_BLOCKS = {"sparse_ratio": 1.0, "sparse_steps": "always", "min_tokens": 256}
METHODS: dict[str, dict[str, Any]] = {
    "dense": {},
    "GSA": {"ucm_sparse_config": {"GSA": {**ALL_BLOCKS, "dense_layers": [0], "reuse_layers": 2}}},
    "GSA, cuda_fused": {"ucm_sparse_config": {"GSA": {**ALL_BLOCKS, "implementation": "cuda_fused"}}},
    "ESA": {"ucm_sparse_config": {"ESA": {**ALL_BLOCKS, "summary": "hash"}}},
    "KVStar": {"ucm_sparse_config": {"KVStar": {**ALL_BLOCKS, "summary": "minmax"}}},
}


def engine_tokens(folder: str, prompts: list[list[int]], method: str, log: Path) -> tuple[list[list[int]], float]:
    sparse = {} if method == "dense" else {"ucm_sparse_method": method.partition(",")[0], **METHODS[method]}
    llm = LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=256 << 20,
        block_size=32 if sparse else None,
        additional_config={"ucm": {"phase_log": str(log), "graphs": {"max_graphs": 32, "warm_up": "full"}, **sparse}},
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    llm.generate(requests[:1], params, use_tqdm=False)
    begin = time.perf_counter()
    outputs = llm.generate(requests, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    llm.llm_engine.engine_core.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs], seconds


def main() -> int:
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = make_prompts()
    device = current_platform.device_type
    print(f"{type(current_platform).__name__} on {current_platform.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(folder)
        expected = reference_tokens(model, prompts, device)
        del model
        wrong = 0
        for method in METHODS:
            if "cuda" in method and device != "cuda":
                continue
            log = Path(folder) / f"{method}.jsonl"
            tokens, seconds = engine_tokens(folder, prompts, method, log)
            equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
            wrong += len(prompts) - equal
            total = sum(map(len, prompts)) + NEW_TOKENS * len(prompts)
            _, steps = read_phase_log(log)
            print(
                f"{method}: {equal} of {len(prompts)} prompts equal Hugging Face's greedy tokens; "
                f"{total / seconds:.0f} tokens/s; phases {sorted({step.bucket.phase for step in steps})}; "
                f"{sum(step.sparse for step in steps)} sparse decodes",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
