"""The doctor's rows on Gaudi's operators: fused, missing, or with another schema."""

from __future__ import annotations

from tests.ops.gaudi_kernels import RMS_NORM, ROTARY, gaudi_software, rms_norm, rotary
from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.cli.doctor.machine import UNFUSED, operator_checks
from vllm_gaudi_ucm.ops.hpu.operators import GAUDI_OPERATORS


def rows(device: str | None = "hpu") -> dict[str, Check]:
    return {check.name: check for check in operator_checks(device)}


def test_every_operator_has_a_row_on_a_gaudi() -> None:
    found = rows()
    assert list(found) == [*(operator.title for operator in GAUDI_OPERATORS), *UNFUSED]
    assert {found[title].status for title in UNFUSED} == {"info"}
    assert rows("cpu") == rows(None) == {}


def test_why_an_operator_is_not_used() -> None:
    swapped = ROTARY.replace("Tensor sin, Tensor cos", "Tensor cos, Tensor sin")
    with gaudi_software({RMS_NORM: rms_norm, swapped: rotary}):
        found = rows()
    assert found["RMSNorm"] == Check(
        "operators", "RMSNorm", "ok", "fused: torch.ops.hpu.rms_norm(data_in, gamma, epsilon)"
    )
    rotation, attention = found["rotary embedding"], found["attention of one partial"]
    assert rotation.status == "warn"
    assert rotation.found.startswith("torch's operators: torch.ops.hpu.rotary_pos_embedding: argument 2 is cos")
    assert "Tensor sin, Tensor cos, Tensor? position_ids, int offset, int mode" in rotation.expected
    assert attention.status == "warn"
    assert "has no FusedSDPA" in attention.found


def test_without_the_bridge_everything_is_torchs() -> None:
    for operator in GAUDI_OPERATORS:
        check = rows()[operator.title]
        assert check.status == "warn"
        assert check.found.startswith(f"{operator.instead}: habana_frameworks.torch cannot be imported")
