"""A server whose model reads pictures: chats with data URLs, and pictures that cannot be read."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.engine.picture_models import PictureReference, make_picture_model, picture, prompt
from tests.server.server import HTTP, MODEL_NAME, Server, start_server

pytestmark = pytest.mark.slow  # starts a server of its own

OPTIONS = ("--limit-mm-per-prompt", '{"image": 2}', "--max-model-len", "128", "--dtype", "float32")
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def data_url(content: bytes, kind: str = "image/png") -> dict[str, Any]:
    url = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat(server: Server, *parts: dict[str, Any]) -> httpx.Response:
    content = [{"type": "text", "text": "w20 w30"}, *parts]
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return HTTP.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def tokens(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torchvision", reason="vLLM's classes of models with pictures import it")
    folder = make_picture_model(tmp_path_factory.mktemp("pictures") / "llava", "llava")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_MAX_IMAGE_PIXELS", str(10**6))
        started = start_server(model, tmp_path_factory.mktemp("server"), *OPTIONS)
    yield started
    started.kill()


def test_chats_with_pictures(server: Server, model: Path) -> None:
    """The same tokens as Hugging Face's model; a chat without a picture is another prompt."""
    first, second = picture(1), picture(2, 50, 20)
    reference = PictureReference(model)
    for pictures in ((first,), (second,), (first, second), ()):
        found = tokens(chat(server, *(data_url(png(one)) for one in pictures)))
        text = "<image> " * len(pictures) + "w20 w30"
        best = reference.logprobs(prompt(text, *pictures), found).argmax(-1).tolist()
        assert found == best


BAD: dict[str, list[dict[str, Any]]] = {
    "truncated": [data_url(png(picture(1))[:60])],
    "truncated in its pixels": [data_url(png(picture(1, 200, 200))[:-60])],
    "empty": [data_url(b"")],
    "no picture": [data_url(b"not a picture at all")],
    "text": [data_url(b"hello", "text/plain")],
    "not base64": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}],
    "no URL": [{"type": "image_url", "image_url": {}}],
    "huge": [data_url(png(Image.new("1", (2000, 2000))))],
    "too many": [data_url(png(picture(seed))) for seed in range(3)],
    "sound": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
    "a film": [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}],
    "a prompt that is too long": [{"type": "text", "text": "w9 " * 100}, *(data_url(png(picture(s))) for s in (1, 2))],
}


ANSWERED_500: dict[str, list[dict[str, Any]]] = {
    "a path": [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}],
    "larger than pillow decodes": [data_url(png(Image.new("1", (20000, 20000))))],
}
"""vLLM's frontend refuses these with a message, and with a status that blames the server."""


@pytest.mark.parametrize("case", ANSWERED_500)
def test_what_the_frontend_refuses_never_reaches_the_engine(server: Server, case: str) -> None:
    bad = chat(server, *ANSWERED_500[case])
    assert bad.status_code >= 400
    assert "Traceback" not in bad.text
    tokens(chat(server, data_url(png(picture(1)))))


@pytest.mark.parametrize("case", BAD)
def test_a_bad_picture_ends_its_request_alone(server: Server, case: str) -> None:
    """covers: D5 (user data never raises in the engine)"""
    good = data_url(png(picture(1)))
    before = tokens(chat(server, good))
    bad = chat(server, *BAD[case])
    assert 400 <= bad.status_code < 500, f"{bad.status_code} {bad.text}"
    assert "Traceback" not in bad.text
    assert tokens(chat(server, good)) == before


def mp4(folder: Path, seed: int) -> dict[str, Any]:
    """Returns the part of a chat with a film of 8 frames."""
    cv2 = pytest.importorskip("cv2", reason="vLLM decodes videos with it")
    file = folder / f"{seed}.mp4"
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter_fourcc(*"mp4v"), 4.0, (32, 32))
    for number in range(8):
        writer.write(np.ascontiguousarray(np.asarray(picture(10 * seed + number, 32, 32))[..., ::-1]))
    writer.release()
    return video_url(file.read_bytes())


def video_url(content: bytes) -> dict[str, Any]:
    url = f"data:video/mp4;base64,{base64.b64encode(content).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


def test_a_bad_video_ends_its_request_alone(tmp_path: Path) -> None:
    """covers: D5 (user data never raises in the engine)"""
    pytest.importorskip("torchvision", reason="vLLM's classes of models with pictures import it")
    from tests.engine.qwen_vl_models import make_qwen, qwen_config

    model = make_qwen(tmp_path / "qwen", qwen_config("qwen2_5_vl"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    first, second = mp4(tmp_path, 1), mp4(tmp_path, 2)
    content = base64.b64decode(first["video_url"]["url"].partition(",")[2])
    server = start_server(model, tmp_path, "--max-model-len", "384", "--dtype", "float32")
    try:
        before, other, text = (tokens(chat(server, *parts)) for parts in ([first], [second], []))
        assert len({tuple(found) for found in (before, other, text)}) == 3
        for bad in (video_url(content[:200]), video_url(b""), video_url(b"no film"), video_url(png(picture(1))[:40])):
            found = chat(server, bad)
            # vLLM answers 500 to a film of which OpenCV reads no frame
            assert 400 <= found.status_code <= 500, f"{found.status_code} {found.text}"
            assert "Traceback" not in found.text
            assert tokens(chat(server, first)) == before
    finally:
        server.kill()
