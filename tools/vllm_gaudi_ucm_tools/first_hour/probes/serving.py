"""Probes 24, 27, 28 and 29: vLLM's engine with this plugin, in the probe's own process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from vllm_gaudi_ucm_tools.first_hour.bench import Bench
from vllm_gaudi_ucm_tools.first_hour.loading import DoesNotApply
from vllm_gaudi_ucm_tools.first_hour.random_model import vocabulary, write_model

FEW_GRAPHS = 8
TRACE = "trace.json"
Prompt = list[int]


class Server:
    """An engine in this process, which tokens go into and come out of."""

    def __init__(self, bench: Bench) -> None:
        if bench.kind == "cpu" and bench.mode == "compile":
            raise DoesNotApply("a CPU serves at true shapes, which are not compiled")
        from vllm import LLM

        self.folder = Path(bench.model) if bench.model else write_model(bench.folder / "model", bench.full)
        self.vocabulary = vocabulary(self.folder)
        ucm: dict[str, Any] = {}
        if bench.kind != "cpu" and not bench.full:
            ucm = {"graphs": {"max_graphs": FEW_GRAPHS}}
        options: dict[str, Any] = {"max_model_len": bench.pick(256, 2048), "max_num_seqs": bench.pick(16, 64)}
        if not bench.model:
            options["kv_cache_memory_bytes"] = bench.pick(16 << 20, 2 << 30)
        begin = time.perf_counter()
        self._llm = LLM(
            model=str(self.folder),
            dtype="bfloat16",
            max_num_batched_tokens=bench.pick(128, 2048),
            enforce_eager=bench.mode == "eager",
            skip_tokenizer_init=True,
            seed=0,
            additional_config={"ucm": ucm},
            **options,
        )
        bench.measure("start of the engine", time.perf_counter() - begin, "s")

    def prompts(self, count: int, length: int) -> list[Prompt]:
        """Random tokens, the same each time."""
        random = torch.Generator().manual_seed(count)
        found: list[Prompt] = torch.randint(3, self.vocabulary, (count, length), generator=random).tolist()
        return found

    def generate(self, prompts: Sequence[Prompt], tokens: int) -> list[list[int]]:
        """Greedy tokens of each prompt, exactly `tokens` of them."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """Frees the device's memory."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()


def tokens(bench: Bench) -> None:
    """Probe 27: compares every token with the logits of the same model on the host, after the same tokens."""
    server = Server(bench)
    prompts = server.prompts(4, bench.pick(24, 200))
    answers = server.generate(prompts, bench.pick(8, 32))
    server.close()
    exact, rough = (_logits(server.folder, prompts, answers, dtype) for dtype in (torch.float32, torch.bfloat16))
    error = max(float((a - b).abs().max()) for a, b in zip(exact, rough, strict=True))
    if not bench.claim("error of bf16 on the host", f"{error:.3g}", "finite", error < float("inf")):
        return
    logits = torch.cat(exact)
    on_device, on_host = torch.tensor(list(chain(*answers))), torch.cat(rough).argmax(1)
    missing, allowed = (float(_below_best(logits, chosen).mean()) for chosen in (on_device, on_host))
    # twice the host's loss in bf16, and a little if it loses nothing: few tokens are near ties
    budget = 2 * allowed + 0.003 * float(logits.std())
    bench.claim("logit of a token below the best, mean", f"{missing:.3g}", f"at most {budget:.3g}", missing <= budget)
    equal = float((logits.argmax(1) == on_device).float().mean())
    bench.measure("tokens equal to the reference's best", 100 * equal, "%")


def _below_best(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns how far the logits of these tokens are below the best of their rows, float32 [rows]."""
    return logits.amax(1) - logits.gather(1, tokens[:, None]).flatten()


def _logits(
    folder: Path, prompts: Sequence[Prompt], answers: Sequence[list[int]], dtype: torch.dtype
) -> list[torch.Tensor]:
    """float32 [answer, vocabulary] of each prompt, computed on the host by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    found = []
    with torch.no_grad():
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
            found.append(logits.float())
    return found


def throughput(bench: Bench) -> None:
    """Probe 28."""
    server = Server(bench)
    length, count = bench.pick((16, 8), (128, 128))
    points = []
    for requests in (1, 16, 64):
        prompts = server.prompts(requests, length)
        server.generate(prompts, count)
        begin = time.perf_counter()
        answers = server.generate(prompts, count)
        seconds = time.perf_counter() - begin
        bench.claim(f"{requests} requests", f"{sum(map(len, answers))} tokens", f"{requests * count} tokens")
        bench.measure(f"{requests} requests", requests * count / seconds, "tokens/s")
        points.append((float(requests), requests * count / seconds))
    bench.series("throughput", "requests", "tokens/s", points)
    bench.answer("tokens/s at 1, 16 and 64", ", ".join(f"{rate:.0f}" for _, rate in points))
    server.close()


def steady(bench: Bench) -> None:
    """Probe 24: the same traffic for minutes; the device counts compilations."""
    server = Server(bench)
    length, count = bench.pick((16, 8), (128, 64))
    loads = [server.prompts(requests, length) for requests in (1, 7, 16, 64)]
    for load in loads:
        server.generate(load, count)
    bench.compilations(lambda: None)
    compiled, rounds, made = 0, 0, 0
    alone: list[tuple[float, float]] = []  # rounds of one request: when, and milliseconds of a token
    end = time.perf_counter() + 60 * bench.minutes
    begin = time.perf_counter()
    while rounds == 0 or time.perf_counter() < end:
        load = loads[rounds % len(loads)]
        started = time.perf_counter()
        compiled += bench.compilations(lambda: server.generate(load, count))  # noqa: B023 - called at once
        if len(load) == 1:
            now = time.perf_counter()
            alone.append((now - begin, 1e3 * (now - started) / count))
        rounds, made = rounds + 1, made + len(load) * count
    seconds = time.perf_counter() - begin
    bench.claim(f"compilations in {rounds} rounds", compiled, 0)
    bench.answer("mean of all rounds", f"{made / seconds:.0f} tokens/s")
    one = bench.seconds(lambda: server.generate(loads[0], count), 3) / count
    bench.measure("one request, per token", 1e3 * one, "ms")
    bench.series("one request", "seconds since the start", "ms per token", alone)
    on_device = _device_seconds(_profile(bench, lambda: server.generate(loads[0], count))) / count
    if on_device:
        share = max(0.0, 1 - on_device / one)
        words = f"{1e3 * on_device:.2f} ms of the device, so {share:.0%} of {1e3 * one:.2f} ms is the host's"
        bench.answer("one request, per token", words)
    else:
        bench.answer("one request, per token", f"{1e3 * one:.2f} ms; the profiler records no time of the device here")
    server.close()


def _profile(bench: Bench, call: Callable[[], object]) -> torch.profiler.profile:
    """Profiles a call, with the device's own activities if torch knows any."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    known = torch.profiler.supported_activities()
    activities += [one for one in known if one.name in (bench.kind.upper(), "HPU") and one not in activities]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        bench.device.synchronize()
    return profile


def _device_seconds(profile: torch.profiler.profile) -> float:
    """Returns the seconds of all kernels; 0 if the profiler saw none."""
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6


def trace(bench: Bench) -> None:
    """Probe 29."""
    server = Server(bench)
    prompts = server.prompts(4, bench.pick(16, 128))
    server.generate(prompts, 4)
    profile = _profile(bench, lambda: server.generate(prompts, 4))
    events = profile.key_averages()
    bench.claim("operators in the trace", len(events), "some", len(events) > 0)
    top = sorted(events, key=lambda event: -event.self_cpu_time_total)[:10]
    bench.note("most host time", {event.key: round(event.self_cpu_time_total) for event in top})
    profile.export_chrome_trace(str(bench.folder / TRACE))
    bench.answer("most host time", f"{top[0].key}; the whole trace is {TRACE}")
    server.close()
