"""What a worker does where another child of a MultiConnector has not loaded what the step reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gaudi_ucm.runner import kv_transfer
from vllm_gaudi_ucm.runner.kv_transfer import KvTransfer
from vllm_gaudi_ucm.vllm_api.kv_transfer import KVConnectorTransferResults


class Connector:
    """Of all children; does what a test says. lost: blocks that the step has not got."""

    def __init__(self) -> None:
        self.lost = set[int]()

    def get_block_ids_with_load_errors(self) -> set[int]:
        lost, self.lost = self.lost, set()
        return lost

    def get_transfer_results(self, finished: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(set(), set(), set())

    def __getattr__(self, name: str) -> Any:
        return lambda: None


class Ours:
    """Counts what is asked of it."""

    left_out = rests = 0

    @property
    def worker(self) -> Ours:
        return self

    loads = worker

    def leave_out_saves(self) -> None:
        self.left_out += 1

    def wait(self, seconds: float) -> None:
        self.rests += 1


def transfer_with(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> tuple[KvTransfer, Connector, Ours]:
    connector, ours = Connector(), Ours()
    factory = SimpleNamespace(create_connector=lambda *args: connector)
    monkeypatch.setattr(kv_transfer, "KVConnectorFactory", factory)
    monkeypatch.setattr(kv_transfer, "our_connector", lambda found: ours)
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
    sizes: Any = SimpleNamespace(kv_cache_groups=[group])
    config: Any = None
    return KvTransfer(config, sizes, in_layers=False, ahead=ahead), connector, ours


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_is_planned_already_stores_nothing_either(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    transfer, connector, ours = transfer_with(monkeypatch, ahead)
    transfer.finish()
    assert ours.left_out == 0
    connector.lost = {3}
    assert transfer.finish().invalid_block_ids == {3}
    assert ours.left_out == 1
    found = []
    for _ in range(2):
        transfer.finish()
        found.append(ours.left_out)
    assert found == ([2, 2] if ahead else [1, 1])


def test_a_step_without_tokens_rests_where_no_other_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer, _, ours = transfer_with(monkeypatch, ahead=True)
    transfer.finish(rests=False)
    assert ours.rests == 0
    transfer.finish()
    assert ours.rests == 1
