"""The output of a step whose tokens are read later, where reading them fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.runner.steps_ahead import StepsAhead, VerifiedLater

REPORTED = KVConnectorOutput(finished_recving={"a"})


def fails() -> Any:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("reported", [REPORTED, None])
def test_what_a_connector_has_reported_outlives_the_tokens(reported: KVConnectorOutput | None) -> None:
    table: Any = None
    carried: Any = None
    ahead = StepsAhead(table, carried, HostWork())
    step: Any = SimpleNamespace(transferred=reported)
    output = ahead.add(VerifiedLater(fails), lambda sampled, _: fails(), step)
    with pytest.raises(RuntimeError, match="the device is gone"):
        output.get_output()
    assert output.get_kv_connector_output() is reported
