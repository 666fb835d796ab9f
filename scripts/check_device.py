"""Runs the plugin end to end on the device that VLLM_GAUDI_UCM_DEVICE names and compares it with Hugging Face there.

For machines that CI does not have: needs no network and no model file (a small random Llama is made on the spot).
usage: VLLM_GAUDI_UCM_DEVICE=cuda python scripts/check_device.py [--only NAME ...]
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

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
        dtype="float32",
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


def reference_tokens(model: Any, prompts: list[list[int]], device: str) -> list[list[int]]:
    model = model.to(device)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append(out[0, len(prompt) :].tolist())
    return found


class Kind(NamedTuple):
    """The kind of an engine. turns: how often it serves all prompts; with a store, the second turn loads."""

    ucm: dict[str, Any]
    arguments: Mapping[str, Any] = MappingProxyType({})
    turns: int = 1


def sparse(method: str, **options: Any) -> dict[str, Any]:
    """Serves with every block chosen, so the tokens equal dense attention's; every part of a selection runs."""
    asked = {"sparse_ratio": 1.0, "sparse_steps": "always", "min_tokens": 256, **options}
    return {"ucm_sparse_method": method, "ucm_sparse_config": {method: asked}}


def kinds(folder: str) -> dict[str, Kind]:
    """The kinds by name. folder: the model's folder, which also serves as draft model; stores get folders in it."""
    drafts = {"speculative_config": {"method": "draft_model", "model": folder, "num_speculative_tokens": 3}}
    ahead = {"scheduler": {"async_scheduling": True}}

    def stored(name: str) -> dict[str, Any]:
        store = {"kind": "file", "path": f"{folder}/{name}", "capacity": "1GiB"}
        transfer = {
            "kv_connector": "UcmConnector",
            "kv_connector_module_path": "vllm_gaudi_ucm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": store},
        }
        return {"kv_transfer_config": transfer, "enable_prefix_caching": False}

    return {
        "dense": Kind({}),
        "GSA": Kind(sparse("GSA", dense_layers=[0], reuse_layers=2)),
        "GSA, cuda_fused": Kind(sparse("GSA", implementation="cuda_fused")),
        "ESA": Kind(sparse("ESA", summary="hash")),
        "KVStar": Kind(sparse("KVStar", summary="minmax")),
        "drafts": Kind({}, drafts),
        "KVStar, drafts": Kind(sparse("KVStar"), drafts),
        "store": Kind(ahead, stored("store"), turns=2),
        "GSA, store": Kind({**ahead, **sparse("GSA")}, stored("store-of-gsa"), turns=2),
    }


def engine_tokens(folder: str, prompts: list[list[int]], kind: Kind, log: Path) -> tuple[list[list[int]], float, bool]:
    """Tokens of the last turn, its seconds, and whether steps are scheduled ahead."""
    llm = LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=256 << 20,
        block_size=32 if "ucm_sparse_method" in kind.ucm else None,
        additional_config={"ucm": {"phase_log": str(log), "graphs": {"max_graphs": 32, "warm_up": "full"}, **kind.ucm}},
        **kind.arguments,
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    llm.generate(requests[:1], params, use_tqdm=False)
    for _ in range(kind.turns):
        begin = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
    is_ahead = bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
    llm.llm_engine.engine_core.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs], seconds, is_ahead


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(kinds("")), metavar="NAME", help="of these engines")
    only = parser.parse_args().only
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = make_prompts()
    device = current_platform.device_type
    print(f"{type(current_platform).__name__} on {current_platform.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(folder)
        expected = reference_tokens(model, prompts, device)
        del model
        wrong = 0
        for name, kind in kinds(folder).items():
            if (only and name not in only) or ("cuda" in name and device != "cuda"):
                continue
            log = Path(folder) / f"{name}.jsonl"
            tokens, seconds, is_ahead = engine_tokens(folder, prompts, kind, log)
            equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
            wrong += len(prompts) - equal
            total = sum(map(len, prompts)) + NEW_TOKENS * len(prompts)
            _, steps = read_phase_log(log)
            print(
                f"{name}: {equal} of {len(prompts)} prompts equal Hugging Face's greedy tokens; "
                f"{total / seconds:.0f} tokens/s; phases {sorted({step.bucket.phase for step in steps})}; "
                f"{sum(step.sparse for step in steps)} sparse decodes; "
                f"{sum(step.loaded_blocks for step in steps)} blocks loaded; "
                f"{'scheduled ahead' if is_ahead else 'synchronous'}",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
