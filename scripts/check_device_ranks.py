"""Runs one engine over several workers on CUDA and compares its tokens with those of one worker.

The model is small, random and in float32; the workers replay CUDA graphs with NCCL's collectives, and compare in each
step what they run (`ucm.distributed.check_ranks`). For machines that CI does not have: needs no network.
With --one-gpu all workers share a GPU: NCCL treats each as a host of its own and uses sockets. That is slow, because
the GPU runs the workers in turn, but it is the same code on a machine with one GPU.
usage: VLLM_GAUDI_UCM_DEVICE=cuda python scripts/check_device_ranks.py --sizes 2x1,4x1,1x2,2x2
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from check_device import make_model, make_prompts

from vllm_gaudi_ucm.device.cuda import CudaDevice
from vllm_gaudi_ucm.platform.worker import UcmWorker

NEW_TOKENS = 24
ALL_BLOCKS: dict[str, Any] = {"sparse_ratio": 1.0, "sparse_steps": "always", "min_tokens": 256}
# Every block is chosen, so tokens equal dense attention's; scores of all heads are averaged over the workers.
GSA: dict[str, Any] = {
    "ucm_sparse_method": "GSA",
    "ucm_sparse_config": {"GSA": {**ALL_BLOCKS, "dense_layers": [0], "reuse_layers": 2}},
}
DRAFTS: dict[str, Any] = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
}
# additional options of the plugin, and of vLLM, of each engine
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "drafts": ({}, DRAFTS),
    "GSA": (GSA, {"block_size": 32}),
}


take = CudaDevice.take_device


class OneGpuWorker(UcmWorker):
    """A worker that shares GPU 0 with the others."""

    def init_device(self) -> None:
        # NCCL refuses two ranks on a GPU of one host; with host names of their own they use sockets
        os.environ.update(NCCL_HOSTID=f"worker-{self.rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        CudaDevice.take_device = lambda self, index: take(self, 0)  # type: ignore[method-assign]
        super().init_device()


def serve(folder: Path, case: str, tensor: int, pipeline: int, one_gpu: bool) -> dict[str, Any]:
    """Serves in a process of its own; returns tokens of all prompts, seconds of the start and of the requests."""
    from vllm import LLM, SamplingParams, TokensPrompt

    from vllm_gaudi_ucm.observability.phase_log import read_phase_log

    ours, theirs = CASES[case]
    log = folder / f"{case}-{tensor}-{pipeline}.jsonl"
    workers = tensor * pipeline
    checked = {"distributed": {"check_ranks": True}} if workers > 1 else {}
    own_worker: dict[str, Any] = {"worker_cls": "check_device_ranks.OneGpuWorker"} if one_gpu and workers > 1 else {}
    started = time.perf_counter()
    llm = LLM(
        str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=128 << 20,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        additional_config={
            "ucm": {"phase_log": str(log), "graphs": {"max_graphs": 12, "warm_up": "full"}, **checked, **ours}
        },
        **own_worker,
        **theirs,
    )
    started, begin = time.perf_counter() - started, time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in make_prompts()], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    llm.llm_engine.engine_core.shutdown()
    _, steps = read_phase_log(log)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "started": started,
        "seconds": seconds,
        "steps": len(steps),
        "buckets": len({step.padded for step in steps}),
        "sparse": sum(step.sparse for step in steps),
    }


def served(folder: Path, case: str, tensor: int, pipeline: int, one_gpu: bool) -> dict[str, Any]:
    """The result of `serve`, from its process."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--serve", json.dumps([str(folder), case, tensor, pipeline, one_gpu])]
    here = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": here, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    subprocess.run([*command, str(result)], check=True, env=env, stdout=sys.stderr)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Compares, and prints a line for each engine; returns 1 if tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", nargs=2, metavar=("JSON", "FILE"), help="the process of one engine")
    parser.add_argument("--sizes", default="2x1,4x1,1x2,2x2", help="tensor x pipeline sizes (default: %(default)s)")
    parser.add_argument("--cases", default="dense,GSA", help=f"of {', '.join(CASES)} (default: %(default)s)")
    parser.add_argument("--one-gpu", action="store_true", help="all workers share GPU 0")
    options = parser.parse_args(argv)
    if options.serve:
        asked, result = options.serve
        folder, *rest = json.loads(asked)
        Path(result).write_text(json.dumps(serve(Path(folder), *rest)))
        return 0
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(name)
        expected = served(folder, "dense", 1, 1, False)["tokens"]
        for size in options.sizes.split(","):
            tensor, pipeline = map(int, size.split("x"))
            for case in options.cases.split(","):
                if pipeline > 1 and case == "drafts":
                    continue  # refused by the engine
                found = served(folder, case, tensor, pipeline, options.one_gpu)
                equal = sum(a == b for a, b in zip(found["tokens"], expected, strict=True))
                wrong += len(expected) - equal
                print(
                    f"{tensor} x {pipeline} workers, {case}: {equal} of {len(expected)} prompts have the tokens of "
                    f"one worker; start {found['started']:.0f} s, requests {found['seconds']:.1f} s in "
                    f"{found['steps']} steps of {found['buckets']} buckets, {found['sparse']} sparse decodes",
                    flush=True,
                )
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        print(f"{torch.cuda.device_count()} GPUs visible: {', '.join(names)}; NCCL {torch.cuda.nccl.version()}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
