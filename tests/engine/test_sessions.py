"""Sessions of streamed inputs: each has a prompt and parameters of its own, and stands on all that came before."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.v1.request import RequestStatus

from tests.connector.fault_store import FaultStore
from tests.engine.serving import Engine
from tests.engine.tiny_models import VOCAB
from vllm_gaudi_ucm.protocol.sparse_meta import RequestSelection
from vllm_gaudi_ucm.sparse.selection.selection_state import SelectionState

pytestmark = pytest.mark.slow  # starts engines

STATIC = {"graphs": {"mode": "eager", "max_graphs": 10, "warm_up": "full"}}
GSA = {
    "ucm_sparse_method": "GSA",
    "ucm_sparse_config": {
        "GSA": {
            "sparse_steps": "always",
            "min_tokens": 32,
            "local_window_sz": 1,
            "init_window_sz": 1,
            "min_blocks": 2,
            "sparse_ratio": 0.1,
        }
    },
}


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


class Sessions:
    """An engine, and what each of its sessions and requests gets.

    preempts: whether every fourth step preempts what runs.
    """

    def __init__(self, engine: Engine, preempts: bool = False) -> None:
        self.engine = engine
        self._preempts, self._steps = preempts, 0
        self.got: dict[str, list[int]] = {}

    def send(self, name: str, prompt: Sequence[int], params: SamplingParams, resumable: bool = True) -> None:
        core = self.engine.core
        made = self.engine.llm.llm_engine.input_processor.process_inputs(
            name,
            {"prompt_token_ids": list(prompt)},  # type: ignore[arg-type]  # as AsyncLLM gets it
            params,
            supported_tasks=("generate",),
            resumable=resumable,
        )
        made.request_id = made.external_req_id = name
        core.add_request(*core.preprocess_add_request(made))
        self.got[name] = []

    def run(self) -> None:
        """Until no input is left."""
        core, table = self.engine.core, self.engine.runner.parts.requests
        while any(
            request.status != RequestStatus.WAITING_FOR_STREAMING_REQ for request in core.scheduler.requests.values()
        ):
            self._steps += 1
            if self._preempts and not self._steps % 4:
                # sessions that wait for input keep their blocks, so that the cache is not reset
                with suppress(RuntimeError):
                    core.scheduler.reset_prefix_cache(reset_running_requests=True)
            outputs, executed = core.step_fn()
            core.post_step(executed)
            table.check_integrity()
            for group in (outputs or {}).values():
                for output in group.outputs:
                    self.got[output.request_id] += output.new_token_ids

    def turn(self, inputs: Mapping[str, tuple[Sequence[int], SamplingParams]]) -> dict[str, list[int]]:
        """All of them at once -> the answer to each."""
        for name, (prompt, params) in inputs.items():
            self.send(name, prompt, params)
        self.run()
        return {name: self.got[name] for name in inputs}

    def alone(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """The answer to a request of its own."""
        # its last step may still be in flight when the next one begins
        name = f"alone-{len(self.got)}"
        self.send(name, prompt, params, resumable=False)
        self.run()
        return self.got[name]

    def end(self) -> None:
        core = self.engine.core
        core.abort_requests(list(core.scheduler.requests))
        self.alone([1, 2, 3], greedy(2))
        self.engine.check_idle()


@pytest.mark.parametrize(
    "kind",
    ["true shapes", "static", "asynchronous", "drafts", "asynchronous drafts", "preempted", "asynchronous preempted"],
)
def test_each_input_has_its_prompt_and_its_parameters(tiny_llama: Path, contract: str, kind: str) -> None:
    """covers: A7 D7. Three sessions at once; their answers are those of requests that have the whole as a prompt."""
    ucm: dict[str, Any] = {"scheduler": {"async_scheduling": "asynchronous" in kind}}
    options: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 120}
    if kind == "static":
        ucm |= STATIC
    if "drafts" in kind:
        options["speculative_config"] = {"method": "draft_model", "model": str(tiny_llama), "num_speculative_tokens": 2}
    asked = [
        greedy(12),
        greedy(11, allowed_token_ids=list(range(40, 80))),
        greedy(13, repetition_penalty=1.5),
        greedy(1),
        SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True),
    ]
    with Engine(tiny_llama, ucm, **options) as engine:
        assert engine.core.scheduler.use_v2_model_runner == (contract == "V2")
        sessions = Sessions(engine, preempts="preempted" in kind)
        contexts: dict[str, list[int]] = {name: [] for name in "abc"}
        found, expected = [], []
        for turn in range(4):
            inputs = {
                name: (tokens(10 * turn + index, 1 + 9 * index + turn), asked[(turn + index) % len(asked)])
                for index, name in enumerate(contexts)
            }
            for name, got in sessions.turn(inputs).items():
                prompt, params = inputs[name]
                contexts[name] += prompt
                expected.append((list(contexts[name]), params))
                found.append(got)
                # the last token of an answer is dropped
                contexts[name] += got[:-1]
        preemptions = engine.preemptions
        sessions.end()
        assert found == [sessions.alone(*one) for one in expected]
        assert (preemptions > 5) == ("preempted" in kind)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of requests whose steps were sparse, one for each step."""
    seen: list[str] = []
    step = SelectionState.step

    def noted(self: Any, request_ids: Any, batch: Any, drafts: Any, decisions: Mapping[str, RequestSelection]) -> Any:
        seen.extend(decisions)
        return step(self, request_ids, batch, drafts, decisions)

    monkeypatch.setattr(SelectionState, "step", noted)
    return seen


def worker_side(engine: Engine) -> Any:
    assert engine.runner.transfer is not None
    connector: Any = engine.runner.transfer.connector
    return connector.worker_side


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Iterator[Sessions]:
    with Engine(tiny_llama) as engine:
        yield Sessions(engine)


# without drafts the scheduler decides over steps, with them the worker
@pytest.mark.parametrize("drafts", [False, True], ids=["tokens", "drafts"])
@pytest.mark.parametrize("first", ["dense", "sparse"])
def test_no_dense_request_finds_what_a_sparse_step_wrote(
    tiny_llama: Path,
    plain: Sessions,
    fault_store: FaultStore,
    watched: list[str],
    contract: str,
    drafts: bool,
    first: str,
) -> None:
    """covers: D2 F2. An input of a session says otherwise than the one before."""
    options: dict[str, Any] = {
        "max_num_seqs": 4,
        "block_size": 16,
        "kv_transfer_config": KVTransferConfig(
            kv_connector="UcmConnector",
            kv_connector_module_path="vllm_gaudi_ucm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"store": {"kind": "memory"}, "save_patience": 0},
        ),
    }
    if drafts:
        options["speculative_config"] = {"method": "draft_model", "model": str(tiny_llama), "num_speculative_tokens": 2}
    dense = {"extra_args": {"ucm_sparse": False}}
    switches = [dense, {}, dense] if first == "dense" else [{}, dense, {}]
    context: list[int] = []
    with Engine(tiny_llama, {**GSA, "scheduler": {"async_scheduling": True}}, **options) as engine:
        sessions = Sessions(engine)
        answers, counts = [], []
        for turn, switch in enumerate(switches):
            prompt = tokens(turn, 60)
            before = len(watched)
            (got,) = sessions.turn({"s": (prompt, greedy(60, **switch))}).values()
            counts.append(len(watched) - before)
            answers.append((context + prompt, got))
            context += prompt + got[:-1]
        assert [count > 0 for count in counts] == [switch != dense for switch in switches]
        sessions.end()
        same_engine = sessions.alone(context, greedy(20, **dense))
        assert worker_side(engine).saver.flush(60.0)
    with Engine(tiny_llama, {}, **options) as engine:
        sessions = Sessions(engine)
        from_store = sessions.alone(context, greedy(20))
        assert worker_side(engine).loads.counts.loaded_blocks > 0
    expected = plain.alone(context, greedy(20))
    assert same_engine == expected
    assert from_store == expected
    if first == "dense":
        prompt, got = answers[0]
        assert got == plain.alone(prompt, greedy(60))
