"""Which platform vLLM would take without this plugin."""

from __future__ import annotations

import pytest

from vllm_gaudi_ucm.vllm_api.platforms import vllm_own_platforms


def test_own_platforms_follow_vllms_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A built-in plugin that raises counts as not active, as in vLLM itself."""
    import vllm.platforms

    def broken() -> str:
        raise OSError("driver")

    plugins = {"cuda": lambda: "C", "rocm": lambda: None, "xpu": broken, "cpu": lambda: "P"}
    monkeypatch.setattr(vllm.platforms, "builtin_platform_plugins", plugins)
    assert vllm_own_platforms() == ["cuda", "cpu"]
