"""Two servers over NIXL behind the proxy of `examples/two_engines.py`: one computes prompts, the other one decodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port
from tests.prefetch.stores import eventually
from tests.server.server import HTTP, MODEL_NAME, Server, environment, start_server

pytest.importorskip("nixl", reason="the package nixl is not installed")
pytestmark = pytest.mark.slow  # starts servers of its own

PROXY = Path(__file__).parents[2] / "examples" / "two_engines.py"
BLOCK = 32
# as the example says
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
PROMPTS = [
    " ".join(f"{number} times {factor} is {factor * number}." for number in range(1, last))
    for factor, last in ((3, 60), (7, 20), (9, 2))
]


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[Server]:
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
        options = ("--block-size", str(BLOCK), "--kv-transfer-config", json.dumps(TRANSFER))
        server = start_server(model, folder, *options)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def proxying(first: Server, second: Server) -> Iterator[str]:
    """Yields the address of the proxy, once it answers."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = ("--prefill", first.url, "--decode", second.url, "--port", str(port))
    process = subprocess.Popen([sys.executable, str(PROXY), *options], env=environment())
    try:
        assert eventually(lambda: answers(url), 60), f"the proxy does not answer (status {process.poll()})"
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/v1/models").status_code == 200
    except httpx.TransportError:
        return False


def tokens(url: str, prompt: str, salt: str) -> list[int]:
    """Returns the tokens of an answer. salt: requests share blocks of a server only under the same one."""
    body = {
        **{"model": MODEL_NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True},
        **{"return_token_ids": True, "cache_salt": salt},
    }
    answer = HTTP.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    assert len(found) == 12
    return found


def test_the_second_server_reads_the_blocks_of_the_first(tiny_text_model: Path, tmp_path: Path) -> None:
    """The proxy's answers have the tokens of one server alone, also after the first server has been killed."""
    with (
        serving(tiny_text_model, tmp_path / "first") as first,
        serving(tiny_text_model, tmp_path / "second") as second,
        proxying(first, second) as proxy,
    ):
        expected = [tokens(second.url, prompt, "alone") for prompt in PROMPTS]
        assert second.metric("vllm:external_prefix_cache_hits_total") == 0
        assert [tokens(proxy, prompt, "both") for prompt in PROMPTS] == expected
        read = second.metric("vllm:external_prefix_cache_hits_total")
        # every token of the prompts but the last of each, which the second server computes
        assert read >= sum(len(prompt.split()) for prompt in PROMPTS) - len(PROMPTS)
        first.kill()
        assert [tokens(proxy, prompt, "first is gone") for prompt in PROMPTS] == expected
        assert second.metric("vllm:external_prefix_cache_hits_total") == read
