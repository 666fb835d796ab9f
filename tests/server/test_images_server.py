"""A server whose model reads pictures: chats with data URLs, and pictures that cannot be read."""

from __future__ import annotations

import base64
import io
import re
import struct
import zlib
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
        best = reference.after(prompt(text, *pictures), found).argmax(-1).tolist()
        assert found == best


def encoded(image: Image.Image, kind: str, **options: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return data_url(buffer.getvalue(), f"image/{kind.lower()}")


def without_pixels(width: int, height: int) -> bytes:
    """Returns the file of a PNG that declares a size, and has 100 bytes of pixels."""
    sizes = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", sizes), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


COLOURS = picture(1, 32, 32)
GREY = Image.fromarray((np.arange(1024).reshape(32, 32) * 64).astype(np.uint16))
ODD: dict[str, tuple[Image.Image, dict[str, Any]]] = {
    "one pixel": (picture(1, 1, 1), data_url(png(picture(1, 1, 1)))),
    "a line": (picture(1, 1, 4000), data_url(png(picture(1, 1, 4000)))),
    "CMYK": (COLOURS.convert("CMYK").convert("RGB"), encoded(COLOURS.convert("CMYK"), "TIFF")),
    "16 bits": (GREY.convert("RGB"), encoded(GREY, "PNG")),
    "a palette": (COLOURS.convert("P").convert("RGB"), encoded(COLOURS.convert("P"), "PNG")),
    "of another type than it says": (COLOURS, data_url(png(COLOURS), "image/jpeg")),
}
"""Pictures, and how a request has them."""


def test_odd_pictures_are_answered(server: Server, model: Path) -> None:
    """Also the first picture of a GIF that moves."""
    reference = PictureReference(model)
    moving = encoded(COLOURS.convert("P"), "GIF", save_all=True, append_images=[picture(2, 32, 32).convert("P")])
    for name, (image, part) in {**ODD, "moving": (COLOURS.convert("P").convert("RGB"), moving)}.items():
        found = tokens(chat(server, part))
        best = reference.after(prompt("<image> w20 w30", image), found).argmax(-1).tolist()
        assert found == best, name


UNREAD = "image_url data:image/png;base64,.* cannot be read: "
BAD: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "truncated": (UNREAD, [data_url(png(picture(1))[:60])]),
    "truncated in its pixels": (UNREAD, [data_url(png(picture(1, 200, 200))[:-60])]),
    "empty": (UNREAD, [data_url(b"")]),
    "no picture": (UNREAD, [data_url(b"not a picture at all")]),
    "without width": (UNREAD, [data_url(without_pixels(0, 0))]),
    "text": ("image_url data:text/plain;base64,aGVsbG8= cannot be read", [data_url(b"hello", "text/plain")]),
    "not base64": ("cannot be read", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}]),
    "plain data": ("Only base64", [{"type": "image_url", "image_url": {"url": "data:image/png,abc"}}]),
    "no URL": ("image_url", [{"type": "image_url", "image_url": {}}]),
    "huge": (UNREAD + "Image dimensions 2000x2000", [data_url(png(Image.new("1", (2000, 2000))))]),
    "larger than pillow decodes": (UNREAD + "Image size", [data_url(without_pixels(60000, 60000))]),
    "a path": ("--allowed-local-media-path", [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}]),
    "too many": ("At most 2 image", [data_url(png(picture(seed))) for seed in range(3)]),
    "sound": ("audio", [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]),
    "a film": ("video", [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}]),
    "a prompt that is too long": (
        "maximum context length",
        [{"type": "text", "text": "w9 " * 100}, *(data_url(png(picture(s))) for s in (1, 2))],
    ),
}
"""What the message says, and the parts of the chat."""


def test_a_bad_picture_ends_its_request_alone(server: Server) -> None:
    """covers: D5 (user data never raises in the engine)"""
    good = data_url(png(picture(1)))
    before = tokens(chat(server, good))
    for name, (says, parts) in BAD.items():
        bad = chat(server, *parts)
        assert bad.status_code == 400, f"{name}: {bad.status_code} {bad.text}"
        assert re.search(says, bad.json()["error"]["message"]), f"{name}: {bad.text}"
        assert len(bad.text) < 1000, name
        assert tokens(chat(server, good)) == before


def mp4(folder: Path, seed: int, frames: int = 8) -> dict[str, Any]:
    """Returns the part of a chat with a film."""
    cv2 = pytest.importorskip("cv2", reason="vLLM decodes videos with it")
    file = folder / f"{seed}.mp4"
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter_fourcc(*"mp4v"), 4.0, (32, 32))
    for number in range(frames):
        writer.write(np.ascontiguousarray(np.asarray(picture(10 * seed + number, 32, 32))[..., ::-1]))
    writer.release()
    return video_url(file.read_bytes())


def video_url(content: bytes) -> dict[str, Any]:
    url = f"data:video/mp4;base64,{base64.b64encode(content).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


def without_frames(content: bytes) -> bytes:
    """Returns the file of a film with zeros in the place of its frames, and its table of contents."""
    first = content.index(b"mdat") + 4
    length = int.from_bytes(content[first - 8 : first - 4], "big") - 8
    return content[:first] + bytes(length) + content[first + length :]


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
        few = "too few frames, or no pixels"
        for says, part in (
            ("Could not open video stream", video_url(content[:200])),
            ("Could not open video stream", video_url(b"")),
            ("Could not open video stream", video_url(b"no film")),
            (few, video_url(png(picture(1))[:40])),
            (few, mp4(tmp_path, 3, frames=1)),
            ("no frame of the video can be decoded", video_url(without_frames(content))),
        ):
            bad = chat(server, part)
            assert bad.status_code == 400, bad.text
            error = bad.json()["error"]
            assert error["param"] == "video_url"
            assert re.match(f"video_url data:video/mp4;base64,.* cannot be read: {says}", error["message"])
            assert tokens(chat(server, first)) == before
    finally:
        server.kill()
