"""One engine of benchmarks.engine_steps: times its steps, and writes `result.json` into the folder it is given."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

REPLAYS = 10
KERNELS = 25  # listed kernels, by time, the longest first
SETTLED = 6  # decode steps that do not count
SPARE = 4  # tokens of each request beyond the measured steps, for profiled steps
BLOCK = 128


def prompt_steps(requests: int, context: int, budget: int) -> int:
    """Returns the most steps until `requests` prompts of `context` tokens are computed, at `budget` tokens a step,
    while finished ones decode. Raises ValueError if this many decodes leave no room for prompts.
    """
    if budget <= requests:
        raise ValueError(
            f"--requests {requests} needs a prompt step (--prompt) of more than {requests} tokens, found {budget}"
        )
    return -(-requests * context // (budget - requests)) + 1


def new_tokens(asked: dict[str, Any], requests: int) -> int:
    """Returns the tokens that each of this many requests gets: the first decodes while the prompts of the others are
    computed.
    """
    return prompt_steps(requests, asked["context"], asked["prompt"]) + SETTLED + asked["repeats"] + SPARE


def longest_request(asked: dict[str, Any]) -> int:
    """Tokens, in whole blocks."""
    decodes = (asked["context"] + new_tokens(asked, requests) for requests in asked["requests"])
    return -(-max(*decodes, asked["prompt"] + 1) // BLOCK) * BLOCK


def write_buckets(path: Path, asked: dict[str, Any]) -> None:
    """Writes a bucket of its own for each kind of step, as `gaudi-ucm tune` finds them for such traffic, and the
    largest.
    """
    from vllm_gaudi_ucm.graphs.cost.specs import ModelSpec, device_spec
    from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
    from vllm_gaudi_ucm.graphs.lookup import BucketSet
    from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
    from vllm_gaudi_ucm.graphs.shapes.limits import Limits
    from vllm_gaudi_ucm.graphs.strategies.file import write_bucket_file

    longest, most = longest_request(asked), max(asked["requests"])
    blocks = longest // BLOCK
    limits = Limits(asked["prompt"], most, longest, BLOCK, most * blocks + 1, False, 2 * blocks)
    shapes = [limits.maximum.forward, ForwardShape.from_sizes(True, asked["prompt"], 0, 0)]
    for requests in asked["requests"]:
        each = -(-(asked["context"] + new_tokens(asked, requests)) // BLOCK)
        # one entry more than blocks, which is the dummy block's
        shapes.append(ForwardShape.from_sizes(False, requests, 0, min(requests * each + 1, limits.max_unique_blocks)))
    cost = CostModel(device_spec("h200"), ModelSpec.from_hf_config(asked["config"]), BLOCK)
    buckets = BucketSet(shapes, sorted({1, *asked["requests"]}), limits, cost)
    write_bucket_file(path, buckets, {"benchmark": "engine_steps"})


class Side:
    """An engine with a model of random weights, and its measurements.

    asked: see `engine_steps.serve`. engine: vLLM's. log: path of the phase log.
    """

    def __init__(self, asked: dict[str, Any], engine: Any, log: Path) -> None:
        self._asked = asked
        self._engine = engine
        self._log = log
        self._runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self._steps = 0
        self._adapters = [] if not asked["adapters"] else make_adapters(asked, log.parent)
        for adapter in self._adapters:
            engine.add_lora(adapter)
        self.kernels: dict[str, list[tuple[str, int, float]]] = {}

    def decode(self, requests: int) -> dict[str, Any]:
        """Steps in which every request gets one token, after all have theirs of the prompt."""
        context, repeats = self._asked["context"], self._asked["repeats"]
        self._add(requests, context, new_tokens(self._asked, requests))
        walls: list[float] = []
        settled, begin = 0, time.perf_counter()
        while self._engine.has_unfinished_requests() and len(walls) < repeats:
            outputs = self._step()
            if not outputs and self._asked["ahead"]:
                # it has only been queued: the time belongs to the step that is read next
                continue
            now = time.perf_counter()
            wall, begin = now - begin, now
            if len(outputs) < requests or any(len(output.outputs[0].token_ids) < 2 for output in outputs):
                continue
            settled += 1
            if settled > SETTLED:
                walls.append(wall)
        if len(walls) < repeats:
            raise RuntimeError(
                f"found {len(walls)} decode steps of {requests} requests after the first {SETTLED}, expected {repeats}"
            )
        last = self._recorded()
        device = self._replays(requests)
        experts = self._experts(outputs)
        launches = self._profile(f"decode of {requests}", self._step)
        while self._engine.has_unfinished_requests():
            self._step()
        found = self._found(requests, context, walls, range(last - repeats, last), device, launches)
        return {**found, "experts": experts}

    def prompt(self) -> dict[str, Any]:
        """Steps that compute a whole prompt and its token."""
        tokens, walls = self._asked["prompt"], []
        self._prompt(tokens)
        first = self._recorded()
        for _ in range(self._asked["repeats"]):
            begin = time.perf_counter()
            self._prompt(tokens)
            walls.append(time.perf_counter() - begin)
        last = self._recorded()
        device = self._replays(1)
        launches = self._profile(f"prompt of {tokens}", lambda: self._prompt(tokens))
        return self._found(0, tokens, walls, range(first, last), device, launches)

    def worker_times(self, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the steps with their times in the phase log."""
        from vllm_gaudi_ucm.observability.phase_log import read_phase_log

        records = [record for record in read_phase_log(self._log)[1] if record.tokens]
        found = []
        for step in steps:
            low, high = step.pop("steps")
            mine = records[low:high]
            worker = statistics.median(record.plan_ms + record.forward_ms + record.sample_ms for record in mine)
            expected = step["requests"] or step["tokens"]
            if any(record.tokens != expected for record in mine):
                raise RuntimeError(f"steps of {[record.tokens for record in mine]} tokens, expected {expected}")
            seen = sum(record.unique_pairs + record.shared_pairs for record in mine) / (len(mine) * expected)
            shape = str(mine[-1].padded.to_list())
            found.append({**step, "worker_ms": worker, "padded": shape, "context": seen if step["requests"] else 0.0})
        return found

    def _add(self, requests: int, tokens: int, new: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        for index in range(requests):
            prompt = [(index * 31 + self._steps * 7 + t) % 4000 + 3 for t in range(tokens)]
            adapter = self._adapters[index % len(self._adapters)] if self._adapters else None
            name = f"{self._steps}-{index}"
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params, lora_request=adapter)

    def _step(self) -> list[Any]:
        self._steps += 1
        return self._engine.step()

    def _recorded(self) -> int:
        """Steps that the phase log has. One that is queued has no record until its tokens are read."""
        steps: int = self._runner.parts.records.phase_log.summary.steps
        return steps

    def _prompt(self, tokens: int) -> None:
        self._add(1, tokens, 1)
        while self._engine.has_unfinished_requests():
            self._step()

    def _found(
        self,
        requests: int,
        tokens: int,
        walls: list[float],
        steps: range,
        device: float | None,
        launches: int | None,
    ) -> dict[str, Any]:
        return {
            "requests": requests,
            "tokens": tokens,
            "wall_ms": 1e3 * statistics.median(walls),
            "device_ms": device,
            "launches": launches,
            "steps": [steps.start, steps.stop],
        }

    @torch.inference_mode()
    def _experts(self, outputs: list[Any]) -> float | None:
        """Experts of a layer that the tokens of a step take, on average of the layers; None without any.

        Graphs do not say, so the tokens go through the layers again, without a context.
        """
        from vllm_gaudi_ucm.graphs.cost.specs import ModelSpec
        from vllm_gaudi_ucm.layers import experts as layer

        if ModelSpec.from_hf_config(self._asked["config"]).experts is None:
            return None
        decoder, seen, plain = self._runner.decoder, list[int](), layer.mixture_of_experts

        def watched(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, experts: Any) -> torch.Tensor:
            seen.append(int(ids.unique().numel()))
            return plain(x, ids, shares, experts)

        tokens = [output.outputs[0].token_ids[-1] for output in outputs]
        device = next(decoder.model.parameters()).device
        layer.mixture_of_experts = watched
        try:
            step = decoder.unattended(len(tokens), device)
            decoder.run_layers(step._replace(rows={**step.rows, "token_ids": torch.tensor(tokens, device=device)}))
        finally:
            layer.mixture_of_experts = plain
        return statistics.mean(seen)

    @torch.inference_mode()
    def _replays(self, logits: int) -> float | None:
        """Returns the milliseconds of the last step's graphs, replayed one after the other: they compute that step
        again, on top of its results. None without graphs.
        """
        if self._runner.static is None:
            return None
        import numpy as np

        rows, execution = np.arange(logits), self._runner.static.execution
        return milliseconds(execution.forward) + milliseconds(lambda: execution.logits(rows))

    def _profile(self, name: str, run: Callable[[], object]) -> int | None:
        """Counts the launches of a step, on a CPU its operators, and keeps the longest in `kernels`. None without
        `--kernels`.
        """
        if not self._asked["kernels"]:
            return None
        kinds, on_gpu = torch.profiler.ProfilerActivity, torch.cuda.is_available()
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA] if on_gpu else [kinds.CPU]) as profile:
            run()
            if on_gpu:
                torch.cuda.synchronize()
        times: dict[str, list[float]] = defaultdict(list)
        wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
        for event in profile.events():
            if event.device_type == wanted:
                times[event.name].append(event.time_range.elapsed_us() / 1e3)
        longest = sorted(times.items(), key=lambda item: -sum(item[1]))
        self.kernels[name] = [(kernel, len(spans), sum(spans)) for kernel, spans in longest[:KERNELS]]
        return sum(len(spans) for spans in times.values())


def milliseconds(replay: Callable[[], object]) -> float:
    """Returns the milliseconds of one replay, among REPLAYS consecutive ones."""
    replay()
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        for _ in range(REPLAYS):
            replay()
        return 1e3 * (time.perf_counter() - begin) / REPLAYS
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(REPLAYS):
        replay()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / REPLAYS


def make_adapters(asked: dict[str, Any], folder: Path) -> list[Any]:
    """Writes adapters of random matrices for all linear layers and embeddings, and returns requests for them."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM
    from vllm.lora.request import LoRARequest

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**asked["config"]))
    rank, found = asked["rank"], []
    for number in range(1, asked["adapters"] + 1):
        random = torch.Generator().manual_seed(number)
        tensors: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if weight is None or weight.dim() != 2:
                continue
            outputs, inputs = weight.shape
            kinds = ("lora_A.weight", "lora_B.weight")
            if isinstance(module, torch.nn.Embedding):
                kinds, (outputs, inputs) = ("lora_embedding_A", "lora_embedding_B"), (inputs, outputs)
            for kind, shape in zip(kinds, ((rank, inputs), (outputs, rank)), strict=True):
                value = torch.randn(shape, generator=random) * 0.01
                tensors[f"base_model.model.{name}.{kind}"] = value.to(torch.bfloat16)
        place = folder / f"adapter-{number}"
        place.mkdir()
        save_file(tensors, place / "adapter_model.safetensors")
        described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
        (place / "adapter_config.json").write_text(json.dumps(described))
        found.append(LoRARequest(place.name, number, str(place)))
    return found


def start(asked: dict[str, Any], folder: Path, log: Path) -> Any:
    """The engine."""
    from vllm import LLM

    (folder / "config.json").write_text(json.dumps(asked["config"]))
    graphs: dict[str, Any] = {"mode": asked["mode"], "warm_up": "full"}
    scheduler = {"async_scheduling": asked["ahead"]}
    if asked["max_graphs"] is not None:
        graphs["max_graphs"] = asked["max_graphs"]
    else:
        write_buckets(folder / "buckets.yaml", asked)
        graphs["buckets"] = str(folder / "buckets.yaml")
    adapters = {"enable_lora": True, "max_loras": asked["adapters"], "max_lora_rank": asked["rank"]}
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=asked["dtype"],
        block_size=BLOCK,
        max_model_len=longest_request(asked),
        max_num_seqs=max(asked["requests"]),
        max_num_batched_tokens=asked["prompt"],
        enable_prefix_caching=False,
        seed=0,
        compilation_config={"custom_ops": asked["custom_ops"]},
        additional_config={"ucm": {"phase_log": str(log), "graphs": graphs, "scheduler": scheduler}},
        **({"kv_cache_memory_bytes": asked["kv_bytes"]} if asked["kv_bytes"] else {}),
        **(adapters if asked["adapters"] else {}),
    )
    return llm.llm_engine


def start_facts(engine: Any, import_seconds: float, start_seconds: float) -> dict[str, Any]:
    """Describes the time of a start. start_seconds: all of it; import_seconds: imports of vLLM and torch.

    warm_up_seconds: of these, graphs that the engine waits for before it serves. graphs: how many its buckets have.
    stages: seconds of each stage of the worker's start.
    """
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return {
        "start_seconds": start_seconds,
        "import_seconds": import_seconds,
        "warm_up_seconds": engine.vllm_config.compilation_config.compilation_time,
        "graphs": 0 if runner.static is None else runner.static.execution.ready.buckets.num_graphs,
        "stages": runner.start_stages.seconds,
    }


def device_name() -> str:
    """Returns the name of the GPU, or only torch's version."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{name}, torch {torch.__version__}"


def main() -> None:
    """Measures every kind of step that was asked for."""
    asked, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    log, begin = folder / "steps.jsonl", time.perf_counter()
    importlib.import_module("vllm.entrypoints.llm")
    imported = time.perf_counter()
    engine = start(asked, folder, log)
    started = start_facts(engine, imported - begin, time.perf_counter() - begin)
    side = Side(asked, engine, log)
    steps = [side.decode(requests) for requests in asked["requests"]]
    steps.append(side.prompt())
    # writes the end of the log
    engine.engine_core.shutdown()
    found = {
        "steps": side.worker_times(steps),
        "facts": {"device": device_name(), **started, "kernels": side.kernels},
    }
    (folder / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
