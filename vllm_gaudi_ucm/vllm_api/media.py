"""Pictures and other media of requests: `vllm.multimodal.media`.

Extension point: `MEDIA_CONNECTOR_REGISTRY`, which names the class that reads media from URLs, and that class,
`MediaConnector`. Internal: `MediaIO`, which decodes bytes, with a class for each kind (`AudioMediaIO`, `VideoMediaIO`);
the errors that a server answers with a status of their own (`VLLMError`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, AudioMediaIO, MediaConnector, MediaIO, VideoMediaIO

SHOWN = 48
"""Characters of a URL in an error."""


class CheckedMediaIO(MediaIO[Any]):
    """Decodes with another `MediaIO`. Media that this cannot decode, and videos without frames, are errors of a client.

    url: of the media.
    """

    def __init__(self, decoder: MediaIO[Any], url: str) -> None:
        self._decoder = decoder
        self._url = url

    def get_max_bytes(self) -> int | None:
        return self._decoder.get_max_bytes()

    def load_bytes(self, data: bytes) -> Any:
        with self.errors_named():
            return self._checked(self._decoder.load_bytes(data))

    def load_base64(self, media_type: str, data: str) -> Any:
        with self.errors_named():
            return self._checked(self._decoder.load_base64(media_type, data))

    def load_file(self, filepath: Path) -> Any:
        with self.errors_named():
            return self._checked(self._decoder.load_file(filepath))

    def _checked(self, media: Any) -> Any:
        if isinstance(self._decoder, VideoMediaIO) and not len(media[0]):
            raise ValueError("no frame of the video can be decoded")
        return media

    @contextmanager
    def errors_named(self) -> Iterator[None]:
        """Turns errors into one that the server answers with status 400, and that names the part of the chat."""
        try:
            yield
        except (VLLMError, MemoryError):
            raise
        except Exception as error:
            part, url = self._part, self._url
            shown = url if len(url) <= SHOWN else f"{url[:SHOWN]}... ({len(url)} characters)"
            # some vLLM classes divide by the number of frames that they choose
            found = "too few frames, or no pixels" if isinstance(error, ZeroDivisionError) else error
            raise VLLMValidationError(f"{part} {shown} cannot be read: {found}", parameter=part) from error

    @property
    def _part(self) -> str:
        if isinstance(self._decoder, VideoMediaIO):
            return "video_url"
        return "audio_url" if isinstance(self._decoder, AudioMediaIO) else "image_url"


class CheckedMediaConnector(MediaConnector):
    """Reads media as vLLM does, with `CheckedMediaIO`. Errors of connections to other hosts stay as vLLM has them: a
    client may try these again.
    """

    def load_from_url(self, url: str, media_io: MediaIO[Any], *, fetch_timeout: int | None = None) -> Any:
        checked = CheckedMediaIO(media_io, url)
        if _is_of_another_host(url):
            return super().load_from_url(url, checked, fetch_timeout=fetch_timeout)
        with checked.errors_named():
            return super().load_from_url(url, checked, fetch_timeout=fetch_timeout)

    async def load_from_url_async(self, url: str, media_io: MediaIO[Any], *, fetch_timeout: int | None = None) -> Any:
        checked = CheckedMediaIO(media_io, url)
        if _is_of_another_host(url):
            return await super().load_from_url_async(url, checked, fetch_timeout=fetch_timeout)
        with checked.errors_named():
            return await super().load_from_url_async(url, checked, fetch_timeout=fetch_timeout)


def _is_of_another_host(url: str) -> bool:
    return url[:4].lower() == "http"


def check_media() -> None:
    """Has a server read media by `CheckedMediaConnector`, unless another class than vLLM's own does so already.

    Reason: decoders raise errors of any kind, and vLLM answers 500 to most kinds. A video without frames gets as far as
        the model's processor, which divides by their number.
    Remove when: vLLM answers 4xx to media that cannot be decoded, and to videos without frames.
    """
    if MEDIA_CONNECTOR_REGISTRY.name2class.get("http") is MediaConnector:
        MEDIA_CONNECTOR_REGISTRY.register("http")(CheckedMediaConnector)
