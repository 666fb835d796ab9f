"""One registry for everything that can be added from outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_gaudi_ucm.registry import Registry, RegistryError


def registry() -> Registry[object]:
    return Registry("kind of thing", "vllm_gaudi_ucm.test_things", path="pathlib:Path", three=3)


def test_things_are_imported_when_they_are_asked_for() -> None:
    things = registry()
    assert things.names() == ["path", "three"]
    assert things.get("path") is Path
    assert things.get("three") == 3
    assert "three" in things
    assert "four" not in things


def test_unknown_names_have_the_nearest() -> None:
    with pytest.raises(
        RegistryError, match=r"kind of thing: found 'thre', expected one of path, three; the nearest is three"
    ):
        registry().get("thre")


def test_a_name_stands_for_one_thing() -> None:
    things = registry()
    things.register("three", 3)
    with pytest.raises(RegistryError, match="found 3 registered already, expected a name that is free"):
        things.register("three", 4)


@pytest.mark.parametrize("place", ["nowhere:Thing", "pathlib:Nothing"])
def test_what_cannot_be_imported_is_named(place: str) -> None:
    things = registry()
    things.register("broken", place)
    with pytest.raises(RegistryError, match=rf"kind of thing 'broken': {place.replace(':', '.')} cannot be loaded"):
        things.get("broken")


def test_scope_forgets() -> None:
    things = registry()
    with things.scope():
        things.register("four", 4)
        assert things.get("four") == 4
    assert "four" not in things


def test_packages_add_things_by_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm_gaudi_ucm.test_things]\nfrom_outside = pathlib:PurePath\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    things = registry()
    assert things.names() == ["path", "three", "from_outside"]
    assert things.get("from_outside") is __import__("pathlib").PurePath
