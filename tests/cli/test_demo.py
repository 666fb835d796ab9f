"""The demo around the engine: errors before anything is loaded, collecting outputs, the report and the JSON object."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.observability.records import HEADER, mixed_steps, write_log
from vllm_gaudi_ucm.cli import main
from vllm_gaudi_ucm_tools.demo import demo
from vllm_gaudi_ucm_tools.demo import engine as demo_engine
from vllm_gaudi_ucm_tools.demo.engine import Answer, DemoError, check_model, check_workers, serve
from vllm_gaudi_ucm_tools.demo.load import build_load
from vllm_gaudi_ucm_tools.demo.report import LINE, DemoResult, answer_text, throughput_text


class FakeEngine:
    """Yields the tokens of each sample one by one, out of step with each other, as the engine may."""

    def __init__(self) -> None:
        self.prompts: list[int] = []
        self.stopped = False
        self.renderer = SimpleNamespace(render_cmpl_async=self._render)

    async def _render(self, prompts: list[dict[str, Any]]) -> list[list[int]]:
        return [prompt["prompt_token_ids"] for prompt in prompts]

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(chat_template=None, encode=lambda text, add_special_tokens: list(range(len(text))))

    async def generate(self, prompt: list[int], params: Any, request_id: str) -> AsyncIterator[Any]:
        self.prompts.append(len(prompt))
        for step in range(1, 3):
            for index in range(params.n):
                await asyncio.sleep(0)
                sample = SimpleNamespace(index=index, text=f"word{index} " * step, token_ids=[7] * step)
                last = step == 2 and index == params.n - 1
                yield SimpleNamespace(outputs=[sample], prompt_token_ids=prompt, num_cached_tokens=4, finished=last)

    def shutdown(self) -> None:
        self.stopped = True


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all requests arrive at once."""
    real_sleep = asyncio.sleep
    monkeypatch.setattr(demo_engine.asyncio, "sleep", lambda seconds: real_sleep(0))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}))
    return folder


def arguments(*argv: str | Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args([str(arg) for arg in argv])


def test_serve_collects_every_sample(quick: None) -> None:
    load = build_load(6, 0)
    seen: list[int] = []
    answers = asyncio.run(
        serve(FakeEngine(), load, lambda state: seen.append(sum(a.output_tokens for a in state)))  # type: ignore[arg-type]
    )
    assert [answer.request for answer in answers] == load
    assert all(answer.finished and answer.progress == 1.0 for answer in answers)
    assert all(answer.output_tokens == 2 * answer.request.n for answer in answers)
    sampled = next(answer for answer in answers if answer.request.n == 3)
    assert sampled.texts == ["word0 word0 ", "word1 word1 ", "word2 word2 "]
    assert seen == sorted(seen)
    assert seen[-1] == sum(answer.output_tokens for answer in answers)


def test_the_command_prints_one_json_object(
    quick: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()

    def start(folder: Path, log: Path, seed: int, level: str, workers: int) -> FakeEngine:
        assert workers == 1
        write_log(log, mixed_steps(30))
        return engine

    monkeypatch.setattr(demo, "start_engine", start)
    picture = tmp_path / "demo.png"
    assert demo.run(arguments("--model", model, "--requests", "6", "--json", "--plot", picture)) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["requests"], value["finished"], value["output_tokens"]) == (6, 6, 16)
    assert value["phases"]["steps"] == 30
    assert value["phases"]["attention_shares"] == {"causal": 0.6, "shared": 0.3, "unique": 0.1}
    assert picture.stat().st_size > 10_000
    assert engine.stopped


def test_the_engine_is_stopped_when_a_request_fails(quick: None, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(engine, "get_tokenizer", lambda: (_ for _ in ()).throw(OSError("no tokenizer")))
    monkeypatch.setattr(demo, "start_engine", lambda *_: engine)
    with pytest.raises(OSError, match="no tokenizer"):
        demo.run(arguments("--model", model))
    assert engine.stopped


def test_an_engine_that_dies_is_one_clear_error(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()

    async def die(*_: Any) -> AsyncIterator[Any]:
        raise EngineDeadError
        yield

    monkeypatch.setattr(engine, "generate", die)
    with pytest.raises(DemoError, match="the engine stopped while serving"):
        asyncio.run(serve(engine, build_load(4, 0), lambda _: None))  # type: ignore[arg-type]


def test_a_folder_without_a_model_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["demo", "--model", str(tmp_path / "none")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "--model" in captured.err
    assert "fetch-model" in captured.err


@pytest.mark.parametrize(
    ("config", "says"),
    [("{", "not a JSON object"), ("[]", "not a JSON object"), ('{"max_position_embeddings": 512}', "context of 512")],
)
def test_an_unusable_model_names_what_was_found(model: Path, config: str, says: str) -> None:
    (model / "config.json").write_text(config)
    with pytest.raises(DemoError, match=f"--model: .*{says}"):
        check_model(model)


def test_workers_must_be_able_to_share_the_heads(smollm2: Path) -> None:
    """The demo model has 9 heads and 3 KV heads."""
    for workers in (1, 3, 9):
        check_workers(smollm2, workers)
    with pytest.raises(ValueError, match="--tensor-parallel-size is 2, expected a number that 9 heads"):
        demo.run(arguments("--model", smollm2, "--tensor-parallel-size", "2"))


def test_the_context_is_capped(model: Path) -> None:
    assert check_model(model) == demo_engine.MAX_MODEL_LEN
    (model / "config.json").write_text('{"max_position_embeddings": 3500}')
    assert check_model(model) == 3500


def test_questions_and_answers_are_trimmed() -> None:
    for request in build_load(8, 0):
        answer = Answer(request, texts=["many words " * 200] * request.n, tokens_of_sample=[5] * request.n)
        lines = answer_text(answer).plain.splitlines()
        assert len(lines) <= 6
        assert max(len(line) for line in lines) <= LINE + 2
        assert "..." in lines[-1]


def test_throughput_counts_tokens_over_the_time_of_serving() -> None:
    load = build_load(4, 0)
    answers = [Answer(r, [""], 100, 10, [20], 0.5, True) for r in load]
    text = throughput_text(DemoResult(answers, start_up_s=3.0, seconds=4.0, header=HEADER))
    assert "4 requests in 4.0 s" in text
    assert "100.0 tokens/s" in text
    assert "20.0 tokens/s" in text
    assert "40 of them from the prefix cache" in text


def test_the_report_names_every_kind_and_every_phase(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [Answer(r, ["yes"] * r.n, 100, 10, [20] * r.n, 0.5, True) for r in build_load(8, 0)]
    demo.show_result(DemoResult(answers, 3.0, 4.0, HEADER, mixed_steps(30)))
    out = capsys.readouterr().out
    for words in ("short prompts", "shared system prompt", "several samples", "long prompts", "phases of 30 steps"):
        assert words in out
    assert "attention work: causal 60.0%" in " ".join(out.split())
    assert max(len(line) for line in out.splitlines()) <= 80
