"""A server with `--enable-prompt-embeds`: the same tokens from embeddings, and embeddings that do not fit."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.server.server import HTTP, MODEL_NAME, Server, start_server

pytestmark = pytest.mark.slow  # starts a server of its own

PROMPT = [5, 9, 14, 3, 77, 21, 40]


def encoded(tensor: torch.Tensor) -> str:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def complete(server: Server, **prompt: Any) -> Any:
    body = {"model": MODEL_NAME, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return HTTP.post(f"{server.url}/v1/completions", json={**body, **prompt}, timeout=60)


def test_completions_of_embeddings(tiny_text_model: Path, tmp_path: Path) -> None:
    """The embeddings of a prompt's tokens give the tokens of that prompt. A bad one ends its request alone."""
    embed = AutoModelForCausalLM.from_pretrained(tiny_text_model, dtype=torch.float32).get_input_embeddings()
    with torch.inference_mode():
        rows = embed(torch.tensor(PROMPT)).clone()
    server = start_server(tiny_text_model, tmp_path, "--enable-prompt-embeds", "--dtype", "float32")
    try:
        expected = complete(server, prompt=PROMPT).raise_for_status().json()["choices"][0]["token_ids"]
        for bad in (encoded(rows[:, :-1]), encoded(rows.long()), encoded(rows)[:40], "@@@"):
            refused = complete(server, prompt=None, prompt_embeds=bad)
            assert 400 <= refused.status_code < 500, refused.text
            assert "Traceback" not in refused.text
            found = complete(server, prompt=None, prompt_embeds=encoded(rows)).raise_for_status().json()
            assert found["choices"][0]["token_ids"] == expected
    finally:
        server.kill()
