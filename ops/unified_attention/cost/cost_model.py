"""Seconds of a step's attention as a linear function of its features, for each implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from vllm_gaudi_ucm.ops.unified_attention.cost.features import LAYER_FEATURES, STEP_FEATURES, Features
from vllm_gaudi_ucm.ops.unified_attention.cost.least_squares import Numbers, non_negative_least_squares

NAMES = tuple([f"layer.{name}" for name in LAYER_FEATURES] + [f"step.{name}" for name in STEP_FEATURES])

NEAR = 2.0  # times the most of a feature that was measured: so far a prediction is believed


@dataclass(frozen=True)
class Sample:
    """A measured step: seconds of one layer, and of what is derived once for all layers."""

    implementation: str
    features: Features
    layer_seconds: float
    step_seconds: float


@dataclass(frozen=True)
class CostModel:
    """coefficients: by implementation, float64 [NAMES] seconds for one of each feature, none negative.

    largest: by implementation, float64 [NAMES] the most of each feature that was measured.
    """

    coefficients: Mapping[str, Numbers]
    largest: Mapping[str, Numbers]

    def seconds(self, implementation: str, features: Features, layers: int) -> float:
        """Predicted seconds of all layers of a step; KeyError for an implementation that was not measured."""
        return float(self.coefficients[implementation] @ features.over(layers))

    def coefficient(self, implementation: str, name: str) -> float:
        """Seconds for one of the feature, one of NAMES; KeyError for an implementation that was not measured."""
        return float(self.coefficients[implementation][NAMES.index(name)])

    def covers(self, implementation: str, features: Features) -> bool:
        """Whether the features are near what was measured; far beyond it the prediction is worth nothing."""
        return bool((features.over(1) <= NEAR * self.largest[implementation]).all())

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> Self:
        """The coefficients with the least squares of relative errors; an implementation has to be in the samples."""
        coefficients, largest = {}, {}
        for name in dict.fromkeys(sample.implementation for sample in samples):
            own = [sample for sample in samples if sample.implementation == name]
            layer = _fit([one.features.layer for one in own], [one.layer_seconds for one in own])
            step = _fit([one.features.step for one in own], [one.step_seconds for one in own])
            coefficients[name] = np.concatenate((layer, step))
            largest[name] = np.stack([one.features.over(1) for one in own]).max(0)
        return cls(coefficients, largest)

    def to_json(self) -> dict[str, dict[str, dict[str, float]]]:
        """By implementation and feature."""
        return {
            what: {name: dict(zip(NAMES, vector.tolist(), strict=True)) for name, vector in vectors.items()}
            for what, vectors in (("coefficients", self.coefficients), ("largest", self.largest))
        }

    @classmethod
    def from_json(cls, found: object) -> Self:
        """What `to_json` gave; ValueError for anything else."""
        if not isinstance(found, dict):
            raise ValueError(f"found {type(found).__name__}, expected an object with coefficients and largest")
        coefficients, largest = (_vectors(what, found.get(what)) for what in ("coefficients", "largest"))
        if coefficients.keys() != largest.keys():
            raise ValueError("coefficients and largest are of different implementations")
        return cls(coefficients, largest)


def _fit(features: Sequence[Numbers], seconds: Sequence[float]) -> Numbers:
    # a relative error counts the same for short steps and long ones
    weight = 1.0 / np.maximum(np.array(seconds), 1e-9)
    return non_negative_least_squares(np.stack(features) * weight[:, None], np.ones(len(weight)))


def _vectors(what: str, found: object) -> dict[str, Numbers]:
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{what}: found {type(found).__name__}, expected an object by implementation")
    return {str(name): _vector(f"{what} of {name}", entries) for name, entries in found.items()}


def _vector(where: str, entries: object) -> Numbers:
    if not isinstance(entries, dict) or set(entries) != set(NAMES):
        raise ValueError(f"{where}: expected exactly the features {', '.join(NAMES)}")
    for feature, value in entries.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < np.inf:
            raise ValueError(f"{where}: {feature} is {value!r}, expected a finite number >= 0")
    return np.array([float(entries[feature]) for feature in NAMES])
