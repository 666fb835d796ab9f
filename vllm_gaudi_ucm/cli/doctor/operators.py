"""Doctor's section on the operators of Gaudi's software: which are fused on this machine, and why not the others."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_gaudi_ucm.cli.doctor.check import Check

OPERATORS = "operators"
# What Gaudi's software has no fused operator for.
UNFUSED = {
    "gate, silu(x) * y": "torch's operators; Gaudi's software has no fused one",
    "softmax of partials": "torch's operators, in float32; the fused ones round its statistics",
}


def operator_checks(device: str | None) -> Iterator[Check]:
    """A row for each operator on a Gaudi; none on another device."""
    if device != "hpu":
        return
    # torch takes seconds, which the help of the command need not
    from vllm_gaudi_ucm.ops.gaudi_operators import GAUDI_OPERATORS

    for operator in GAUDI_OPERATORS:
        found = operator.resolve()
        if found.call is not None:
            yield Check(OPERATORS, operator.title, "ok", f"fused: {found.why}")
        else:
            yield Check(OPERATORS, operator.title, "warn", f"{operator.instead}: {found.why}", operator.signature)
    for title, found_instead in UNFUSED.items():
        yield Check(OPERATORS, title, "info", found_instead)
