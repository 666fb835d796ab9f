"""Earlier names of options work for one release, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import ClassVar

import pytest

from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.options.section import Section


class Shape(Section):
    earlier_names: ClassVar[Mapping[str, str]] = {"breadth": "width"}

    width: int = 1


def test_an_earlier_name_sets_the_option_and_warns() -> None:
    with pytest.warns(FutureWarning, match="option breadth is now called width"):
        assert Shape.resolve({"breadth": 3}, "shape").width == 3


def test_the_name_itself_does_not_warn() -> None:
    with warnings.catch_warnings(action="error"):
        assert Shape.resolve({"width": 3}, "shape").width == 3


def test_both_names_are_refused() -> None:
    with pytest.raises(UcmConfigError, match=r"shape\.breadth"):
        Shape.resolve({"breadth": 3, "width": 4}, "shape")


def test_a_wrong_value_is_reported_under_the_new_name() -> None:
    with pytest.warns(FutureWarning), pytest.raises(UcmConfigError, match=r"shape\.width: found 'three'"):
        Shape.resolve({"breadth": "three"}, "shape")


def test_ratios_of_memory_mode() -> None:
    sections = {"ucm": {"memory_mode": {"resident_ratio": 0.4, "away_ratio": 3.0}}}
    with pytest.warns(FutureWarning, match="is now called"):
        options = resolve_config(sections).memory_mode
    assert (options.on_device_ratio, options.offloaded_ratio) == (0.4, 3.0)
