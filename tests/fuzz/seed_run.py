"""One seed, in a process of its own: draws and starts an engine, serves its traffic, and checks its answers."""

from __future__ import annotations

import os
import re
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.renderers.base import BaseRenderer

from tests.engine.serving import Engine
from tests.engine.worker_processes import EngineOfWorkers
from tests.fuzz.answer_check import Answer, AnswerCheck
from tests.fuzz.draws import Draws, UnknownPinError
from tests.fuzz.grammars import Grammars
from tests.fuzz.leaks import leaks
from tests.fuzz.outcome import Outcome
from tests.fuzz.service import Service
from tests.fuzz.setting import Setting, draw_setting
from tests.fuzz.traffic import draw_traffic
from vllm_gaudi_ucm.options.errors import UcmConfigError, UnsupportedFeatureError

MOST_DRAWS = 40
"""Engines that a seed draws, until one is not refused."""
MOST_PROBLEMS = 12
"""Lines of problems that are kept."""

_LOGGED = re.compile(r"(?:UcmConfigError|UnsupportedFeatureError|ValueError): ((?:vllm-gaudi-ucm does|ucm\.|--).*)")
_NAMES_OPTION = re.compile(r"(ucm\.|--)[a-z]")


def run_seed(seed: int, pins: Mapping[str, str], folder: Path) -> Outcome:
    """The outcome of a seed. folder: for what the engine stores."""
    begin = time.perf_counter()
    outcome = Outcome(seed)
    try:
        _run(outcome, pins, folder)
    except UnknownPinError as error:
        outcome.problems.append(str(error))
    except BaseException as error:
        outcome.problems.append(in_one_line(error))
        traceback.print_exc()
    outcome.seconds = time.perf_counter() - begin
    return outcome


def write_outcome(seed: int, pins: dict[str, str], folder: str) -> None:
    """Runs a seed in this process, writes `outcome.json` into the folder, and ends the process."""
    os.setsid()
    _prepare_process()
    outcome = run_seed(seed, pins, Path(folder))
    (Path(folder) / "outcome.json").write_bytes(msgspec.json.encode(outcome))
    # threads of an engine that failed may never end
    os._exit(0)


def _prepare_process() -> None:
    torch.set_num_threads(1)
    # a chat template is not needed, and a model without a tokenizer has none
    BaseRenderer.warmup = lambda self, chat_params: None  # type: ignore[method-assign]
    # the forced contract is refused for what vLLM's own runner does not do
    VllmConfig._validate_v2_model_runner = lambda self: None  # type: ignore[method-assign]


def _force_contract(contract: str) -> None:
    """vLLM's choice depends on the machine: how its scheduler sends requests that it has preempted."""
    is_v2 = contract == "v2"
    # for processes of workers; here vLLM remembers what it once found
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(is_v2))
    VllmConfig.use_v2_model_runner = property(lambda self: is_v2)  # type: ignore[assignment, method-assign]


def _run(outcome: Outcome, pins: Mapping[str, str], folder: Path) -> None:
    draws, setting, engine = _start(outcome, pins, folder)
    traffic = draw_traffic(draws, setting)
    draws.check_pins()
    service = Service(engine, setting, traffic)
    try:
        service.serve()
        outcome.problems += leaks(engine)
    except Exception as error:
        outcome.problems.append(f"step {service.steps}: {in_one_line(error)}")
        traceback.print_exc()
    outcome.steps, outcome.preemptions = service.steps, engine.preemptions
    outcome.requests, outcome.refused_requests = len(traffic.asks) + len(traffic.sessions), service.refused
    answers = list(service.answers())
    if outcome.problems:
        # what has no end has a cause, which is a problem already
        answers = [_cut(answer) for answer in answers]
    outcome.aborts = sum(answer.is_cut for answer in answers)
    outcome.tokens = sum(len(answer.tokens) for answer in answers)
    grammars = Grammars(engine.core.structured_output_manager, setting.model.vocabulary)
    check = AnswerCheck(_logits(setting.model.folder()), setting.max_length, grammars)
    wrong = [problem for answer in answers for problem in check.problems(answer)]
    outcome.problems += wrong[:MOST_PROBLEMS]
    if not outcome.problems:
        engine.__exit__()


def _cut(answer: Answer) -> Answer:
    """The answer as one whose client left."""
    answer.is_cut = True
    return answer


def _start(outcome: Outcome, pins: Mapping[str, str], folder: Path) -> tuple[Draws, Setting, Engine]:
    """The first engine that is not refused. Raises what a start raises that is no refusal by name."""
    refused: list[str] = []
    for attempt in range(MOST_DRAWS):
        draws = Draws(outcome.seed, attempt, pins)
        setting = draw_setting(draws, folder)
        _force_contract(setting.contract)
        written = _size(folder / "log")
        outcome.setting, outcome.refused_engines = str(setting), refused
        try:
            kind = EngineOfWorkers if setting.workers > 1 else Engine
            return draws, setting, kind(setting.model.folder(), setting.ucm, **setting.options)
        except Exception as error:
            reason = refusal(error) or logged_refusal(folder / "log", written)
            if reason is None:
                raise
            refused.append(reason)
    raise RuntimeError(f"all of {MOST_DRAWS} engines were refused: {Counter(refused).most_common(3)}")


def refusal(error: BaseException) -> str | None:
    """The words of a refusal by name; None if the error is none."""
    for one in _chain(error):
        if isinstance(one, UcmConfigError | UnsupportedFeatureError) or (
            isinstance(one, ValueError) and _NAMES_OPTION.match(str(one))
        ):
            return str(one)
    # vLLM's own checks of its options
    return str(error) if isinstance(error, ValidationError) else None


def logged_refusal(log: Path, start: int) -> str | None:
    """The words of a refusal by a worker in a process of its own, of which vLLM only says here why it ended.

    start: bytes of the log that were there before.
    """
    if not _size(log):
        return None
    text = log.read_bytes()[start:].decode(errors="replace")
    found = _LOGGED.search(text)
    return found.group(1) if found else None


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        if isinstance(error, ValidationError):
            inner = [detail.get("ctx", {}).get("error") for detail in error.errors()]
            yield from (one for one in inner if isinstance(one, BaseException))
        error = error.__cause__ or error.__context__


def in_one_line(error: BaseException) -> str:
    """Type, message and place of an error, in one line."""
    place = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    where = f" at {Path(place.filename).name}:{place.lineno}" if place else ""
    return f"{type(error).__name__}{where}: {str(error) or 'no message'}"[:600]


def _logits(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def logits(tokens: Any) -> torch.Tensor:
        found: torch.Tensor = reference(torch.tensor([list(tokens)])).logits[0].float()
        return found

    return logits
