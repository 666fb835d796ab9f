"""bfloat16 on a CPU with a matrix unit, in one run: tests of its kernels, products of few rows, parts of a layer,
attention, how idle threads wait, and whole engines with and without the unit's kernel for few rows.

`python -m benchmarks.matrix_unit [PART ...] > FILE`; offline. Engines need vLLM, the tests pytest, the rest neither.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def section(name: str) -> None:
    """Print a heading."""
    print(f"\n===== {name} ({time.strftime('%H:%M:%S')})", flush=True)


def tool(*arguments: str, limit: int = 150, env: dict[str, str] | None = None) -> None:
    """Runs a module, and prints its output."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            timeout=limit,
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
        )
        print(
            done.stdout[-9000:], done.stderr[-2500:] if done.returncode else "", f"status {done.returncode}", flush=True
        )
    except subprocess.TimeoutExpired as error:
        print("timed out", (error.stdout or b"")[-6000:].decode(errors="replace"), flush=True)


def attention() -> None:
    """Prompts in bfloat16 and float32, ours and SDPA."""
    import torch

    from benchmarks import attention_case
    from benchmarks.attention_case import Case
    from vllm_gaudi_ucm.ops.cpu.native import matrix_unit

    for heads, kv, dim in ((9, 3, 64), (32, 8, 128)):
        attention_case.HEADS, attention_case.KV_HEADS, attention_case.DIM = heads, kv, dim
        attention_case.SCALE = dim**-0.5
        import importlib

        from benchmarks import attention_side_ours

        importlib.reload(attention_side_ours)
        for case in (
            Case("4 x 1024", 4, 0, 1024, 0),
            Case("16 x 1 at 512", 16, 511, 1, 0),
            Case("16 x 32 at 480", 16, 480, 32, 0),
        ):
            for dtype in (torch.bfloat16, torch.float32):
                data = attention_case.make_data(case)
                rows, exact = attention_case.exact_rows(data, case)
                half = data.__class__(*(t.to(dtype) for t in (data.query, data.keys, data.values)), data.block_tables)
                call = attention_side_ours.calls(case, half)["native"]
                line = [f"{heads} heads of {dim}, {case.name}, {str(dtype)[6:]}:"]
                for unit in (True, False):
                    with matrix_unit.using(unit):
                        call()
                        times = []
                        for _ in range(7):
                            begin = time.perf_counter()
                            out = call()
                            times.append(time.perf_counter() - begin)
                        error = attention_case.relative_error(out, rows, exact)
                    line.append(f"unit {unit} {statistics.median(times) * 1e3:.2f} ms (error {error:.1e})")
                if case.context == 0:
                    q = half.query.view(case.requests, case.new, heads, dim).transpose(1, 2)
                    k, v = (torch.randn(case.requests, kv, case.new, dim).to(dtype) for _ in range(2))
                    times = []
                    for _ in range(8):
                        begin = time.perf_counter()
                        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                        times.append(time.perf_counter() - begin)
                    line.append(f"SDPA {statistics.median(times[1:]) * 1e3:.2f} ms")
                print(*line, flush=True)


def _microseconds(call: Callable[[], object]) -> int:
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return round(statistics.median(times[5:]) * 1e6)


def _layer(weights: dict[str, Any], rows: int, dtype: Any) -> dict[str, Callable[[], object]]:
    import torch

    from vllm_gaudi_ucm.ops.cpu.packed_linear.api import packed_linear
    from vllm_gaudi_ucm.ops.rms_norm.impl.cpu.norm import rms_norm
    from vllm_gaudi_ucm.ops.rotary.impl.cpu.rotary import rotate
    from vllm_gaudi_ucm.ops.silu_and_mul.impl.cpu.gate import silu_and_mul

    x = {inputs: torch.randn(rows, inputs).to(dtype) for inputs in (576, 1536)}
    qkv, gate = torch.randn(rows, 960).to(dtype), torch.randn(rows, 3072).to(dtype)
    positions, table = torch.arange(rows), torch.randn(8192, 64).to(dtype)
    residual, scale = torch.randn(rows, 576).to(dtype), torch.ones(576, dtype=dtype)
    calls: dict[str, Callable[[], object]] = {
        name: (lambda weight=weight: packed_linear(x[weight.inputs], weight)) for name, weight in weights.items()
    }
    calls["norm"] = lambda: rms_norm(x[576], scale, 1e-5, residual)
    calls["rotary"] = lambda: rotate(qkv[:, :576], qkv[:, 576:768], positions, table, 64)
    calls["silu"] = lambda: silu_and_mul(gate)
    return calls


def parts() -> None:
    """The microseconds of one layer of SmolLM2 in a step of this many rows, by part, in bfloat16 and float32."""
    import torch

    from vllm_gaudi_ucm.ops.cpu.packed_linear.api import pack
    from vllm_gaudi_ucm.ops.cpu.packed_linear.measured_ways import kinds_of, known_ways, learn_ways
    from vllm_gaudi_ucm.ops.cpu.packed_linear.way import Kind

    for dtype in (torch.bfloat16, torch.float32):
        if dtype == torch.bfloat16:
            learn_ways({Kind.PAIRS})
        weights = {
            f"{o}x{i}": pack(torch.randn(o, i).to(dtype), compact=False)
            for o, i in ((960, 576), (576, 576), (3072, 576), (576, 1536))
        }
        learn_ways(kinds_of(list(weights.values())))
        for rows in (1, 16, 64, 2048):
            found = {name: _microseconds(call) for name, call in _layer(weights, rows, dtype).items()}
            print(str(dtype)[6:], rows, "rows:", found, flush=True)
    for kind, times in known_ways().items():
        print(
            kind,
            times.described(list(times.seconds)),
            {way: [round(one * 1e6) for one in all] for way, all in times.seconds.items()},
        )


STEP = r"""
import sys, time, statistics, torch
from vllm_gaudi_ucm.ops.cpu.packed_linear.api import pack, packed_linear
from vllm_gaudi_ucm.ops.rms_norm.impl.cpu.norm import rms_norm
from vllm_gaudi_ucm.ops.silu_and_mul.impl.cpu.gate import silu_and_mul
torch.set_num_threads(int(sys.argv[1]))
shapes = ((960, 576), (576, 576), (3072, 576), (576, 1536))
layers = [[pack(torch.randn(o, i).bfloat16()) for o, i in shapes] for _ in range(30)]
scale = torch.ones(576, dtype=torch.bfloat16)
def step(x):
    for qkv, o, up, down in layers:
        residual = x.clone()
        y = packed_linear(rms_norm(x, scale, 1e-5, residual), qkv)
        y = packed_linear(y[:, :576], o)
        y = packed_linear(rms_norm(y, scale, 1e-5, residual), up)
        x = packed_linear(silu_and_mul(y), down)
    return x
found = []
for rows in (1, 16):
    x = torch.randn(rows, 576).bfloat16()
    times = []
    for _ in range(40):
        begin = time.perf_counter(); step(x); times.append(time.perf_counter() - begin)
    found.append((rows, round(statistics.median(times[8:]) * 1e3, 2)))
print(found)
"""


def spins() -> None:
    """Milliseconds of a decode-like step (30 layers by operations) by how idle threads wait, quiet and busy."""
    ways = {
        "default": {},
        "100": {"GOMP_SPINCOUNT": "100"},
        "1000": {"GOMP_SPINCOUNT": "1000"},
        "10000": {"GOMP_SPINCOUNT": "10000"},
        "passive": {"OMP_WAIT_POLICY": "passive"},
    }
    cores = len(os.sched_getaffinity(0))
    for load in (0, cores):
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
        try:
            for threads in (min(16, cores), 1):
                for _ in range(2):
                    for name, env in ways.items() if threads > 1 else [("one thread", {})]:
                        done = subprocess.run(
                            [sys.executable, "-c", STEP, str(threads)],
                            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
                            capture_output=True,
                            text=True,
                            timeout=200,
                        )
                        print(
                            f"{load} busy, {threads} threads, {name}:",
                            done.stdout.strip() or done.stderr[-300:],
                            flush=True,
                        )
        finally:
            for one in busy:
                one.kill()


WORKER = """
import os
if os.environ.get("WITHOUT_UNIT"):
    from vllm_gaudi_ucm.ops.cpu.packed_linear import api
    from vllm_gaudi_ucm.ops.cpu.packed_linear.way import Kind, Way
    now = api.fastest_way
    def fastest(kind, rows, tiles, onednn):
        if kind is not Kind.PAIRS:
            return now(kind, rows, tiles, onednn)
        return Way.VECTORS if rows <= 16 or not onednn else Way.ONEDNN
    api.fastest_way = fastest
from benchmarks import engine_worker
engine_worker.main()
"""


def engine() -> None:
    """bfloat16 before and after, and float32, on dummy weights of SmolLM2's shape."""
    from benchmarks.engine_side import EngineSide
    from benchmarks.engine_workloads import USUAL, Workload

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rope_theta": 100000, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    worker = folder / "worker.py"
    worker.write_text(WORKER)
    shared = {
        "PYTHONPATH": str(ROOT),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_GAUDI_UCM_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    given = {
        "model": str(folder),
        "max_model_len": 8192,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "kv_cache_memory_bytes": 2 << 30,
        "seed": 0,
    }
    sides = [
        EngineSide(
            "pairs and oneDNN",
            Path(sys.executable),
            {**given, "dtype": "bfloat16"},
            {**shared, "WITHOUT_UNIT": "1"},
            worker,
        ),
        EngineSide("matrix unit", Path(sys.executable), {**given, "dtype": "bfloat16"}, shared, worker),
        EngineSide("float32", Path(sys.executable), {**given, "dtype": "float32"}, shared, worker),
    ]
    try:
        for side in sides:
            print(side.name, side.start(), flush=True)
        for workload in (*USUAL, Workload("decode 4", 4, 64, 48, 1), Workload("decode 64", 64, 64, 32, 1)):
            found: dict[str, list[float]] = {side.name: [] for side in sides}
            for turn in range(-1, 3):
                for side in sides:
                    order = {"prompts": workload.prompts(turn), "output_tokens": workload.output_tokens}
                    seconds = side.ask(order)["seconds"]
                    if turn >= 0:
                        found[side.name].append(workload.tokens / seconds)
            print(workload.name, {name: round(statistics.median(one)) for name, one in found.items()}, flush=True)
    finally:
        for side in sides:
            side.stop()


FILES = (
    "test_half_linear",
    "test_bf16_tiles",
    "test_tile_linear",
    "test_measured_ways",
    "test_native_attention_matrix",
    "test_native_attention_pairs",
    "test_packed_linear",
    "test_compact_weights",
    "test_matrix_unit",
)


def tests() -> None:
    """Tests of the kernels, on the unit."""
    tool("-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/ops/{name}.py" for name in FILES), limit=240)


def rows() -> None:
    """Products of few rows."""
    for threads in ("1", "8", "16"):
        shapes = ["smollm2", *(["8b"] if threads != "1" else [])]
        tool("-m", "benchmarks.linear_rows", "--threads", threads, "--shapes", *shapes)
    tool("-m", "benchmarks.linear_rows", "--threads", "1", "--dtype", "float32", limit=60)


def all_parts() -> None:
    """Parts of a layer, by one thread and by sixteen."""
    import torch

    before = torch.get_num_threads()
    for threads in (1, 16):
        print(threads, "threads")
        torch.set_num_threads(threads)
        parts()
    torch.set_num_threads(before)


PARTS = {"tests": tests, "rows": rows, "parts": all_parts, "attention": attention, "spins": spins, "engine": engine}

if __name__ == "__main__":
    print(subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout[:900])
    for name in sys.argv[1:] or PARTS:
        section(name)
        try:
            PARTS[name]()
        except Exception as error:  # the other parts are worth having
            print(repr(error), flush=True)
