"""Helpers of `test_step_metrics.py` that other tests use, too."""

from __future__ import annotations


def total(name: str, **labels: str) -> str:
    text = ",".join(f'{label}="{value}"' for label, value in sorted({"engine": "0", **labels}.items()))
    return f"gaudi_ucm_{name}{{{text}}}"
