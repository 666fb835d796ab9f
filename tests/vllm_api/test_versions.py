"""Version window: which versions are inside, and the one error that names all that are not."""

import pytest

from vllm_gaudi_ucm.vllm_api import versions

VLLM, TORCH = versions.WINDOWS


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
        (VLLM, "0.33.0", True),
        (VLLM, "0.33.0+empty", True),
        (VLLM, "0.34.0", False),
        (VLLM, "0.34.0rc1", False),
        (VLLM, "0.34.0.dev1+g12", False),
        (VLLM, "1.0.0", False),
        (TORCH, "2.11.0", True),
        (TORCH, "2.11.0a0+git1234", True),
        (TORCH, "2.13.0+cpu", True),
        (TORCH, "2.13.1+cu130", True),
        (TORCH, "2.10.1", False),
        (TORCH, "2.14.0+cpu", True),
        (TORCH, "2.15.0", False),
        (TORCH, "2.15.0a0+git1", False),
    ],
)
def test_window(window: versions.VersionWindow, version: str, inside: bool) -> None:
    assert window.holds(version) is inside


def test_installed_versions_are_inside() -> None:
    versions.check_versions()


def test_an_untested_vllm_is_refused_and_the_option_lets_it_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of torch there is no such option, and a missing vLLM is no untested one."""
    found: dict[str, str | None] = {"vllm": "0.35.2", "torch": "2.13.0", "vllm-gaudi-ucm": "0.1.0"}
    monkeypatch.setattr(versions, "installed_version", lambda name: found[name])
    with pytest.raises(versions.UnsupportedVersionError, match=r"vllm 0\.35\.2 .*ucm\.allow_untested_vllm true"):
        versions.check_versions()
    for _ in range(2):
        versions.check_versions(allow_untested_vllm=True)
    assert caplog.text.count("vllm 0.35.2 is installed, expected >=0.32.0,<0.34: untested") == 1
    found["torch"] = "2.10.0"
    with pytest.raises(versions.UnsupportedVersionError, match=r"run here: torch 2\.10\.0") as caught:
        versions.check_versions(allow_untested_vllm=True)
    assert "allow_untested" not in str(caught.value)
    found.update(vllm=None, torch="2.13.0")
    with pytest.raises(versions.UnsupportedVersionError, match="vllm is not installed"):
        versions.check_versions(allow_untested_vllm=True)


def test_one_error_names_every_package(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"vllm": "0.31.0+cpu", "torch": None, "vllm-gaudi-ucm": "0.1.0"}
    monkeypatch.setattr(versions, "installed_version", found.__getitem__)
    with pytest.raises(versions.UnsupportedVersionError) as caught:
        versions.check_versions()
    message = str(caught.value)
    assert "vllm-gaudi-ucm 0.1.0 cannot run here" in message
    assert "vllm 0.31.0+cpu is installed, expected >=0.32.0,<0.34" in message
    assert "torch is not installed, expected >=2.11,<2.15" in message
    assert "Install a supported version" in message
