"""Version window: which versions are inside, and the one error that names all that are not."""

import pytest

from vllm_gaudi_ucm.vllm_api import compat

VLLM, TORCH = compat.WINDOWS


@pytest.mark.parametrize(
    ("window", "version", "inside"),
    [
        (VLLM, "0.32.0", True),
        (VLLM, "0.32.0+empty", True),
        (VLLM, "0.32.0+cpu", True),
        (VLLM, "0.32.7", True),
        (VLLM, "0.32.1.dev3+g1234abc", True),
        (VLLM, "0.32.0rc1", False),
        (VLLM, "0.31.9", False),
        (VLLM, "0.33.0", False),
        (VLLM, "0.33.0rc1", False),
        (VLLM, "0.33.0.dev1+g12", False),
        (VLLM, "1.0.0", False),
        (TORCH, "2.11.0", True),
        (TORCH, "2.11.0a0+git1234", True),
        (TORCH, "2.13.0+cpu", True),
        (TORCH, "2.13.1+cu130", True),
        (TORCH, "2.10.1", False),
        (TORCH, "2.14.0", False),
        (TORCH, "2.14.0a0+git1", False),
    ],
)
def test_window(window: compat.Window, version: str, inside: bool) -> None:
    assert window.holds(version) is inside


def test_installed_versions_are_inside() -> None:
    compat.check_versions()


def test_one_error_names_every_package(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm": "0.31.0+cpu", "torch": None, "vllm-gaudi-ucm": "0.1.0"}
    monkeypatch.setattr(compat, "installed_version", versions.__getitem__)
    with pytest.raises(compat.UnsupportedVersionError) as caught:
        compat.check_versions()
    message = str(caught.value)
    assert "vllm-gaudi-ucm 0.1.0 cannot run here" in message
    assert "vllm 0.31.0+cpu is installed, expected >=0.32.0,<0.33" in message
    assert "torch is not installed, expected >=2.11,<2.14" in message
    assert "Install a supported version" in message


def test_own_platforms_follow_vllms_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A built-in plugin that raises counts as not active, as in vLLM itself."""
    import vllm.platforms

    def broken() -> str:
        raise OSError("driver")

    plugins = {"cuda": lambda: "C", "rocm": lambda: None, "xpu": broken, "cpu": lambda: "P"}
    monkeypatch.setattr(vllm.platforms, "builtin_platform_plugins", plugins)
    assert compat.vllm_own_platforms() == ["cuda", "cpu"]


def test_entries_name_reason_and_removal() -> None:
    """Every public function and constant about versions documents why it exists and when it goes."""
    source = compat.__loader__.get_source("vllm_gaudi_ucm.vllm_api.compat")  # type: ignore[union-attr]
    assert source.count("Reason:") == source.count("Remove when:") >= 4
