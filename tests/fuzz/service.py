"""An engine under the traffic of a seed, step by step, and what its clients got."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm import RequestOutput, SamplingParams
from vllm.outputs import CompletionOutput

from tests.engine.serving import Engine
from tests.fuzz.answer_check import Answer
from tests.fuzz.setting import ALL_BLOCKS, Setting
from tests.fuzz.traffic import Ask, Session, Traffic

MOST_STEPS = 6000
"""Steps after which what has not ended does not end. The longest traffic takes a quarter."""


@dataclass
class Served:
    """A request in service.

    Args:
        ask: what was asked.
        params: by completion, as vLLM made them.
        outputs: the newest of each completion.
    """

    ask: Ask
    params: list[SamplingParams] = field(default_factory=list)
    outputs: dict[int, CompletionOutput] = field(default_factory=dict)
    prompt_scores: Any = None
    is_cut: bool = False

    @property
    def has_ended(self) -> bool:
        ends = [one.finish_reason for one in self.outputs.values()]
        return self.is_cut or (len(ends) == self.ask.params.n and None not in ends)


@dataclass
class OpenSession:
    """A session in service. context: tokens before the turn that runs. sent: inputs. due: step of the next one."""

    session: Session
    context: list[int]
    due: int
    sent: int = 0
    got: list[int] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    is_over: bool = False


class Service:
    """Serves the traffic of a seed.

    Args:
        engine: in this process; its workers may be elsewhere.
        setting: what it was started with.
        traffic: what its clients do.
    """

    def __init__(self, engine: Engine, setting: Setting, traffic: Traffic) -> None:
        self.engine, self._setting, self._traffic = engine, setting, traffic
        self.steps = 0
        self.refused: list[str] = []
        """Requests that vLLM or the plugin refused by name."""
        self._served: dict[str, Served] = {}
        self._sessions: dict[str, OpenSession] = {}
        self._front: Any = engine.llm.llm_engine
        self._watch()

    def serve(self) -> None:
        """Steps until everything has ended. Raises what a step raises, and TimeoutError if there is no end."""
        while self.steps <= self._traffic.last_step or self._is_busy():
            if self.steps > MOST_STEPS:
                raise TimeoutError(f"after {self.steps} steps: {', '.join(self._unfinished())}")
            self._arrive()
            self._leave()
            self._reset()
            for session in self._sessions.values():
                self._send(session)
            if self.steps in self._traffic.pauses:
                time.sleep(self._traffic.pause)
            self._step()

    def answers(self) -> Iterator[Answer]:
        """Yields the answers that clients got, completion by completion."""
        for name, served in self._served.items():
            for index in range(served.ask.params.n):
                yield self._answer(name, served, index)
        for session in self._sessions.values():
            yield from session.answers

    def _watch(self) -> None:
        """Sees requests as vLLM sends them to the engine, and tokens of sessions as they come back."""
        client = self._front.engine_core
        add, get = client.add_request, client.get_output

        def add_request(request: Any) -> None:
            # completions of a request share its name
            served = self._served.get(request.external_req_id)
            if served is not None:
                served.params.append(request.sampling_params)
            add(request)

        def get_output() -> Any:
            outputs = get()
            for output in outputs.outputs:
                session = self._sessions.get(output.request_id)
                if session is not None:
                    self._continue(session, output)
            return outputs

        client.add_request, client.get_output = add_request, get_output

    def _arrive(self) -> None:
        for ask in self._traffic.asks:
            if ask.step == self.steps:
                served = self._served[ask.name] = Served(ask)
                try:
                    self._front.add_request(
                        ask.name, {"prompt_token_ids": list(ask.prompt)}, ask.params, priority=ask.priority
                    )
                except ValueError as error:
                    # vLLM's and the plugin's word for a request that cannot be served
                    self.refused.append(f"{ask.name}: {error}")
                    del self._served[ask.name]
                else:
                    assert len(served.params) == ask.params.n
        for session in self._traffic.sessions:
            if session.step == self.steps:
                self._sessions[session.name] = OpenSession(session, list(session.turns[0].prompt), self.steps)

    def _leave(self) -> None:
        for name, served in self._served.items():
            ask = served.ask
            if ask.aborted is not None and self.steps == ask.step + ask.aborted and not served.has_ended:
                served.is_cut = True
                self._front.abort_request([name], internal=False)

    def _reset(self) -> None:
        for reset in self._traffic.resets:
            if reset.step == self.steps:
                # vLLM preempts no session that waits for its next input, and ends with an error
                open_sessions = any(not session.is_over for session in self._sessions.values())
                self._front.reset_prefix_cache(reset.running and not open_sessions, reset.store)

    def _send(self, session: OpenSession) -> None:
        """The next inputs of a session that are due, or its end."""
        name, turns = session.session.name, session.session.turns
        while session.sent < len(turns) and not session.is_over:
            turn = turns[session.sent]
            at_once = session.sent > 0 and turn.delay is None
            if not at_once and (len(session.answers) < session.sent or self.steps < session.due):
                return
            try:
                session.params.append(self._input(name, turn.prompt, turn.params, resumable=True))
            except ValueError as error:
                self.refused.append(f"{name} turn {session.sent}: {error}")
                self._end(session)
            session.sent += 1
        if len(session.answers) == len(turns):
            self._end(session)

    def _end(self, session: OpenSession) -> None:
        if session.is_over:
            return
        session.is_over = True
        if session.session.aborted:
            self._front.engine_core.abort_requests([session.session.name])
        elif session.sent:
            self._input(session.session.name, [0], session.session.turns[0].params, resumable=False)

    def _input(self, name: str, prompt: list[int], params: SamplingParams, *, resumable: bool) -> SamplingParams:
        """An input of a session; parameters as vLLM made them."""
        made = self._front.input_processor.process_inputs(
            name, {"prompt_token_ids": list(prompt)}, params, supported_tasks=("generate",), resumable=resumable
        )
        made.request_id = made.external_req_id = name
        self._front.engine_core.add_request(made)
        found: SamplingParams = made.sampling_params
        return found

    def _continue(self, session: OpenSession, output: Any) -> None:
        """Takes tokens of a session; where its turn ends the next one begins."""
        session.got += output.new_token_ids
        if output.finish_reason is None or session.is_over:
            return
        turns, name = session.session.turns, session.session.name
        number = len(session.answers)
        params = session.params[number]
        session.answers.append(
            Answer(
                f"{name} turn {number}",
                list(session.context),
                params,
                list(session.got),
                str(output.finish_reason),
                # sparse turns leave their keys in the context of the next ones
                is_exact=all(map(self._is_exact, session.params[: number + 1])),
            )
        )
        # vLLM keeps what was computed: all but the last token
        session.context += session.got[:-1]
        session.got = []
        if number + 1 < len(turns):
            following = turns[number + 1]
            session.context += following.prompt
            session.due = self.steps + 1 + (following.delay or 0)

    def _step(self) -> None:
        for output in self.engine.step():
            self._take(output)
        self.steps += 1

    def _take(self, output: RequestOutput) -> None:
        served = self._served.get(output.request_id)
        if served is None or served.is_cut:
            return
        served.outputs.update((one.index, one) for one in output.outputs)
        if output.prompt_logprobs is not None:
            served.prompt_scores = output.prompt_logprobs

    def _answer(self, name: str, served: Served, index: int) -> Answer:
        found = served.outputs.get(index)
        params = served.params[index]
        return Answer(
            name if served.ask.params.n == 1 else f"{name} answer {index}",
            served.ask.prompt,
            params,
            list(found.token_ids) if found else [],
            found.finish_reason if found else None,
            found.text if found and self._setting.model.speaks else None,
            found.logprobs if found else None,
            served.prompt_scores,
            served.is_cut,
            self._is_exact(params),
        )

    def _is_exact(self, params: SamplingParams) -> bool:
        """True if dense attention gives the same tokens."""
        dense = (params.extra_args or {}).get("ucm_sparse") is False
        return dense or self._setting.ratio in (None, ALL_BLOCKS)

    def _is_busy(self) -> bool:
        return bool(self._unfinished()) or self.engine.core.scheduler.has_unfinished_requests()

    def _unfinished(self) -> list[str]:
        sessions = [name for name, session in self._sessions.items() if not session.is_over]
        return [name for name, served in self._served.items() if not served.has_ended] + sessions
