"""A seed decides everything; a pin changes one draw and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.draws import Draws, UnknownPinError
from tests.fuzz.fuzz_models import FuzzModel
from tests.fuzz.setting import Setting, draw_setting
from tests.fuzz.traffic import Traffic, draw_traffic


@pytest.fixture(autouse=True)
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings name the folders of models; nothing reads them here."""
    monkeypatch.setattr(FuzzModel, "folder", lambda self: Path(f"/{self.family}"))


def drawn(seed: int, **pins: str) -> tuple[Setting, Traffic]:
    draws = Draws(seed, pins=pins)
    setting = draw_setting(draws, Path("/blocks"))
    traffic = draw_traffic(draws, setting)
    draws.check_pins()
    return setting, traffic


def test_a_seed_repeats_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.fuzz_models.DraftModel.folder", lambda self: Path("/draft"))
    settings = [drawn(seed) for seed in range(40)]
    assert [drawn(seed) for seed in range(40)] == settings
    assert len({str(setting) for setting, _ in settings}) > 30
    assert len({setting.model.family for setting, _ in settings}) > 8
    assert {setting.contract for setting, _ in settings} == {"v1", "v2"}
    assert any(traffic.sessions for _, traffic in settings)
    assert any(ask.aborted is not None for _, traffic in settings for ask in traffic.asks)


def test_a_pin_changes_one_draw() -> None:
    setting, traffic = drawn(5, drafts="none")
    pinned, same = drawn(5, drafts="none", max_num_seqs="1" if setting.options["max_num_seqs"] != 1 else "2")
    assert pinned.options.pop("max_num_seqs") != setting.options.pop("max_num_seqs")
    assert (pinned, same) == (setting, traffic)


def test_requests_fit_the_model() -> None:
    for seed in range(20):
        setting, traffic = drawn(seed, drafts="none")
        for ask in traffic.asks:
            assert 0 < len(ask.prompt) < setting.max_length
            assert max(ask.prompt) < setting.model.vocabulary
            assert setting.model.speaks or not (ask.params.stop or ask.params.structured_outputs)


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"nonsense": "1"}, "nonsense: no such draw"),
        ({"max_num_seqs": "3"}, "max_num_seqs=3: expected one of 1, 2, 4"),
        ({"num_drafts": "9", "drafts": "ngram"}, "num_drafts=9: expected one of 1 to 4"),
    ],
)
def test_a_pin_that_fits_nothing_is_an_error(pins: dict[str, str], words: str) -> None:
    with pytest.raises(UnknownPinError, match=words):
        drawn(1, **pins)
