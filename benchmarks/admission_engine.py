"""The rules of admission in a whole engine whose KV cache is too small: work, memory, answers per second.

`python -m benchmarks.admission_engine [--model MODEL] [--mix batch] [--requests N] [--rounds N]`. Sessions of a mix of
`gaudi-ucm trace`, with fewer tokens, from clients that never wait. Each asks for the longest answer of the mix
(`max_tokens`) and gets one of its lengths. Every rule serves the same sessions, one after the other, in several rounds;
seconds are those of the processor. Without a model: random weights of a small one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table

from benchmarks.admission import RULES
from benchmarks.positive import positive
from vllm_gaudi_ucm.observability.phase_log import PhaseLogReader
from vllm_gaudi_ucm_tools.output import report_console
from vllm_gaudi_ucm_tools.traffic.simulation import MIXES, Mix

if TYPE_CHECKING:
    from vllm import LLM

SIDES = (*((rule, "recompute") for rule in RULES), ("greedy", "swap"))
"""`ucm.scheduler.admission` and `ucm.preemption.mode`."""
SMALL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
}
BLOCK = 128
TOGETHER = 32
"""Clients, and most requests of a step."""


class Turn(NamedTuple):
    """A turn of a session. tokens: tokens that a client adds to the conversation. answer: tokens that it gets."""

    tokens: list[int]
    answer: int


def draw_sessions(mix: Mix, scale: int, answers: int, requests: int) -> list[list[Turn]]:
    """Sessions with this many turns together. The first turn begins with a prefix that sessions share."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 1000) for _ in range(max(1, count // scale))]

    prefixes = [tokens(mix.prefix_length.draw(rng)) for _ in range(mix.prefixes)]
    sessions: list[list[Turn]] = []
    while requests > 0:
        turns = 1 if mix.turns <= 1 else 1 + int(rng.expovariate(1.0 / (mix.turns - 1.0)) + 0.5)
        begin = rng.choice(prefixes) if rng.random() < mix.prefix_share else []
        session = [
            Turn(tokens(mix.prompt.draw(rng)), max(1, answers * mix.output.draw(rng) // scale))
            for _ in range(min(turns, requests))
        ]
        session[0] = session[0]._replace(tokens=begin + session[0].tokens)
        sessions.append(session)
        requests -= len(session)
    return sessions


@dataclass
class Served:
    """An engine's work. waited, busy: steps in which requests waited, and the sum of the shares of the cache in use."""

    rule: str
    mode: str
    steps: int = 0
    computed: int = 0
    rows: int = 0
    preemptions: int = 0
    answers: int = 0
    tokens: int = 0
    waited: int = 0
    busy: float = 0.0
    seconds: float = 0.0

    @property
    def memory(self) -> float:
        return self.busy / max(1, self.waited)

    def watch(self, scheduler: Any) -> None:
        """Starts counting what it schedules."""
        schedule, preempt = scheduler.schedule, scheduler._preempt_request
        pool = scheduler.kv_cache_manager.block_pool

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.steps += 1
            self.computed += output.total_num_scheduled_tokens
            if scheduler.waiting:
                self.waited += 1
                self.busy += 1 - pool.get_num_free_blocks() / (pool.num_gpu_blocks - 1)
            return output

        def preempted(*args: Any, **kwargs: Any) -> None:
            self.preemptions += 1
            preempt(*args, **kwargs)

        scheduler.schedule, scheduler._preempt_request = scheduled, preempted


class Clients:
    """Each sends a session's turns, one after the other, and then takes the next session."""

    def __init__(self, llm: LLM, sessions: Sequence[list[Turn]], longest: int) -> None:
        self._engine: Any = llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._sessions = list(sessions)[::-1]
        self._longest = longest
        self._talks: dict[str, tuple[list[int], list[Turn]]] = {}
        self._count = 0

    def run(self, served: Served) -> None:
        for _ in range(min(TOGETHER, len(self._sessions))):
            self._send([], self._sessions.pop())
        while self._talks:
            for output in self._engine.step():
                if output.finished:
                    self._answered(output, served)
            self._end_answers()

    def _send(self, said: list[int], turns: list[Turn]) -> None:
        from vllm import SamplingParams

        self._count += 1
        name, prompt = f"r{self._count}", said + turns[0].tokens
        params = SamplingParams(temperature=0.0, max_tokens=self._longest, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        self._talks[name] = prompt, turns
        self._end_answers()

    def _answered(self, output: Any, served: Served) -> None:
        prompt, turns = self._talks.pop(output.request_id)
        answer = list(output.outputs[0].token_ids)
        assert len(answer) == turns[0].answer
        served.answers += 1
        served.tokens += len(answer)
        if turns[1:]:
            self._send(prompt + answer, turns[1:])
        elif self._sessions:
            self._send([], self._sessions.pop())

    def _end_answers(self) -> None:
        """An answer whose next token is its last one; the scheduler does not know before."""
        for request in self._scheduler.requests.values():
            # vLLM appends something random to the client's name
            _, turns = self._talks[request.request_id.partition("-")[0]]
            if request.num_output_tokens == turns[0].answer - 1:
                request.max_tokens = turns[0].answer


def serve(model: Path | None, mix: Mix, side: tuple[str, str], args: argparse.Namespace) -> Served:
    """One engine, from its first request to its last answer."""
    from transformers import LlamaConfig
    from vllm import LLM

    served = Served(*side)
    sessions = draw_sessions(mix, args.scale, args.answers, args.requests)
    longest = args.answers * mix.output.high // args.scale
    ends = [sum(len(turn.tokens) + turn.answer for turn in session) for session in sessions]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "phases.jsonl"
        if model is None:
            LlamaConfig(architectures=["LlamaForCausalLM"], **SMALL).save_pretrained(folder)
        ucm = {
            "scheduler": {"admission": side[0]},
            "preemption": {"mode": side[1]},
            "graphs": {"mode": "eager" if args.static else "off"},
            "phase_log": str(log),
        }
        llm = LLM(
            model=folder if model is None else str(model),
            load_format="auto" if model is not None else "dummy",
            dtype="float32",
            block_size=BLOCK // args.scale,
            max_model_len=max(ends) + longest,
            max_num_seqs=TOGETHER,
            max_num_batched_tokens=mix.limits.max_num_batched_tokens // args.scale,
            num_gpu_blocks_override=args.blocks,
            kv_cache_memory_bytes=1 << 30,
            async_scheduling=False,
            enable_prefix_caching=args.prefix_cache,
            skip_tokenizer_init=True,
            additional_config={"ucm": ucm},
        )
        core: Any = llm.llm_engine.engine_core
        scheduler = core.engine_core.scheduler
        clients = Clients(llm, sessions, longest)
        served.watch(scheduler)
        begin = time.process_time()
        clients.run(served)
        served.seconds = time.process_time() - begin
        core.engine_core.model_executor.shutdown()
        scheduler.shutdown()
        with PhaseLogReader(log) as steps:
            served.rows = sum(step.padded.query_len for step in steps.steps())
    return served


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="folder of a model")
    parser.add_argument("--mix", choices=sorted(MIXES), default="batch", help="default: %(default)s")
    parser.add_argument("--requests", type=positive, default=150, help="default: %(default)s")
    parser.add_argument("--scale", type=positive, default=4, help="divides all tokens (default: %(default)s)")
    parser.add_argument("--answers", type=positive, default=2, help="times as long (default: %(default)s)")
    parser.add_argument("--blocks", type=positive, default=120, help="of the KV cache (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=2, help="the faster one counts (default: %(default)s)")
    parser.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_false", help="nothing is found again")
    parser.add_argument("--static", action="store_true", help="steps are padded to buckets")
    parser.add_argument("--json", type=Path, help="writes the figures to this file")
    args = parser.parse_args(argv)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    found: dict[tuple[str, str], Served] = {}
    for _ in range(args.rounds):
        for side in SIDES:
            served = serve(args.model, MIXES[args.mix], side, args)
            # the faster one: the machine may be busy with other things
            found[side] = min(found.get(side, served), served, key=lambda one: one.seconds)
    report_console(least_width=110).print(_table(list(found.values())))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(one) | {"memory": one.memory} for one in found.values()], indent=1))
    return 0


def _table(found: Sequence[Served]) -> Table:
    table = Table(
        "rule", "preempted", "preemptions", "steps", "tokens computed", "rows, padded", "memory", "seconds", ""
    )
    for one in found:
        table.add_row(
            one.rule,
            one.mode,
            f"{one.preemptions:,}",
            f"{one.steps:,}",
            f"{one.computed:,}",
            f"{one.rows:,}",
            f"{one.memory:.1%}",
            f"{one.seconds:.1f}",
            f"{found[0].seconds / one.seconds:.2f}x",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
