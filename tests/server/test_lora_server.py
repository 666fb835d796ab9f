"""A server that loads adapters (LoRA) while it serves: `/v1/load_lora_adapter`, and requests that name adapters."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI

from tests.engine.adapters import make_adapter
from tests.server.conftest import CLIENT_OPTIONS
from tests.server.server import HTTP, MODEL_NAME, Server, start_server

pytestmark = pytest.mark.slow  # starts a server of its own

GRAPHS = {"mode": "eager", "max_graphs": 14, "recipe_check": "fail"}


def load(server: Server, name: str, path: Path) -> httpx.Response:
    return HTTP.post(f"{server.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


def answer(client: OpenAI, model: str) -> str:
    found = client.completions.create(
        model=model, prompt="one two three", max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    return found.choices[0].text


@pytest.mark.parametrize("graphs", [None, GRAPHS], ids=["true shapes", "buckets"])
def test_adapters_are_loaded_while_it_serves(
    tiny_text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: dict[str, object] | None
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    first, second = (make_adapter(tmp_path / name, tiny_text_model, seed=seed) for seed, name in enumerate("ab"))
    large = make_adapter(tmp_path / "large", tiny_text_model, rank=16)
    options = ("--enable-lora", "--max-loras", "1", "--max-cpu-loras", "2", "--max-lora-rank", "8")
    given = ("--lora-modules", f"first={first}")
    server = start_server(tiny_text_model, tmp_path, *options, *given, **({} if graphs is None else {"graphs": graphs}))
    try:
        with OpenAI(base_url=f"{server.url}/v1", **CLIENT_OPTIONS) as client:
            plain, adapted = answer(client, MODEL_NAME), answer(client, "first")
            assert plain != adapted
            with pytest.raises(openai.NotFoundError, match="second"):
                answer(client, "second")
            # requests go on while an adapter is loaded
            others: list[str] = []
            busy = threading.Thread(target=lambda: others.extend(answer(client, "first") for _ in range(4)))
            busy.start()
            assert load(server, "second", second).status_code == 200
            busy.join()
            assert others == [adapted] * 4
            other = answer(client, "second")
            assert other not in (plain, adapted)
            assert {model.id for model in client.models.list()} == {MODEL_NAME, "first", "second"}
            # adapters that cannot be used: the call gets the reason, and the next one works
            wrong = load(server, "large", large)
            assert wrong.status_code in (400, 500)
            assert "rank 16 is greater than max_lora_rank 8" in wrong.text
            assert load(server, "gone", tmp_path / "gone").status_code == 404
            assert answer(client, "first") == adapted
            # one that is gone when it is needed again: two others have taken its places in memory
            for name in ("c", "d"):
                assert (
                    load(server, name, make_adapter(tmp_path / name, tiny_text_model, seed=ord(name))).status_code
                    == 200
                )
            (second / "adapter_config.json").unlink()
            with pytest.raises(openai.APIStatusError, match="second") as error:
                answer(client, "second")
            assert error.value.status_code == 400
            assert answer(client, "first") == adapted
            assert answer(client, MODEL_NAME) == plain
            gone = HTTP.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "first"})
            assert gone.status_code == 200
            with pytest.raises(openai.NotFoundError, match="first"):
                answer(client, "first")
        server.terminate()
    finally:
        server.kill()
