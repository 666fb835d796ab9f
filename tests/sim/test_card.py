"""The module `torch.hpu`, settings of the card, and what importing the bridge does to a process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist


def test_figures(ht: Any, card: Any) -> None:
    from habana_frameworks.torch.utils.experimental import _get_device_type

    assert torch.hpu is ht.hpu
    assert torch.hpu.is_available()
    assert torch.hpu.is_initialized()
    card.free_bytes, card.total_bytes = 5, 7
    assert torch.hpu.get_device_properties().total_memory == 7
    assert torch.hpu.mem_get_info()[1] == torch.hpu.memory_reserved() == 5
    assert _get_device_type().name == "synDeviceGaudi3"
    card.device_type = "synDeviceGaudi2"
    assert _get_device_type().name == "synDeviceGaudi2"
    assert torch.hpu.get_device_properties(0).name == "GAUDI2"
    with pytest.raises(ValueError, match="card 1 of 1"):
        torch.hpu.get_device_properties(1)
    torch.hpu.random.manual_seed_all(5)
    assert card.seeds == [5]


def test_tensors_take_memory(card: Any) -> None:
    """By storage, not by view, until the last of its tensors is gone; the host's take none."""
    gc.collect()
    free, _ = torch.hpu.mem_get_info()
    x = torch.zeros(1 << 20, device="hpu")
    view, copy = x[1:].view(torch.int32), x.cpu()
    assert free - torch.hpu.mem_get_info()[0] == 4 << 20
    y = x + 1
    assert free - torch.hpu.mem_get_info()[0] == 8 << 20
    del x, y
    assert free - torch.hpu.mem_get_info()[0] == 4 << 20
    del view, copy
    assert torch.hpu.mem_get_info()[0] == free


def test_streams_and_events() -> None:
    stream, other = torch.hpu.Stream(), torch.hpu.Stream()
    with torch.hpu.stream(stream):
        assert torch.hpu.current_stream() is stream
        begin = stream.record_event(torch.hpu.Event(enable_timing=True))
    assert torch.hpu.current_stream() is torch.hpu.default_stream()
    end = torch.hpu.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="elapsed_time"):
        begin.elapsed_time(end)
    end.record()
    assert begin.elapsed_time(end) >= 0
    assert end.query()
    other.wait_stream(stream)
    other.wait_event(end)


def test_fork_raises_and_other_ways_work(forbidden: Any) -> None:
    with forbidden("fork: the device is started in this process"):
        os.fork()
    with forbidden("fork"):
        multiprocessing.get_context("fork").Process(target=print).start()
    assert subprocess.run([sys.executable, "-c", "print(3)"], capture_output=True, text=True).stdout == "3\n"


def test_hccl_is_gloo(tmp_path: Any) -> None:
    dist.init_process_group("hccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert dist.get_backend() == "hccl"
        x = torch.ones(2, device="hpu")
        dist.all_reduce(x)
        group = dist.new_group([0], backend="hccl")
        gathered = torch.empty(2, device="hpu")
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renames it
        all_gather(gathered, x, group=group)
        assert gathered.tolist() == [1, 1]
        assert gathered.device == torch.device("hpu", 0)
        objects = [None]
        dist.all_gather_object(objects, {"a": 1})
        assert objects == [{"a": 1}]
    finally:
        dist.destroy_process_group()


def test_vllm_operators_are_opened() -> None:
    """A kernel registered for HPU alone runs, and what it is made of is checked."""
    library = torch.library.Library("sim_test", "DEF")
    library.define("pick(Tensor x, Tensor i) -> Tensor")
    library.impl("pick", lambda x, i: x.index_select(0, i) * 2, "HPU")
    x = torch.ones(3, device="hpu")
    picked = torch.ops.sim_test.pick(x, torch.tensor([1], device="hpu"))
    assert picked.tolist() == [2]
    with pytest.raises(RuntimeError, match="index -1 is out of range"):
        torch.ops.sim_test.pick(x, torch.tensor([-1], device="hpu"))
