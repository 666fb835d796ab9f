"""The three devices behind one protocol: cpu here, cuda where there is a GPU, hpu on the simulated card."""

import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.sim_path import SIM_PATH
from vllm_gaudi_ucm.device import Device, cuda, get_device
from vllm_gaudi_ucm.device.cpu import cpu_model
from vllm_gaudi_ucm.device.hpu import HpuDevice


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="found 'tpu', expected one of cpu, cuda, hpu"):
        get_device("tpu")


@pytest.mark.parametrize(("kind", "backend"), [("cpu", "gloo"), ("cuda", "nccl"), ("hpu", "hccl")])
def test_every_device_has_the_whole_protocol(kind: str, backend: str) -> None:
    """Making one starts nothing, so all three can be made here."""
    device = get_device(kind)
    assert (device.kind, device.dist_backend) == (kind, backend)
    for name, method in inspect.getmembers(Device, inspect.isfunction):
        if not name.startswith("_"):
            ours = getattr(type(device), name)
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(method).parameters), name


def test_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> None:
        raise AssertionError("torch.accelerator raises on a CPU-only torch")

    monkeypatch.setattr(torch.accelerator, "synchronize", forbidden)
    monkeypatch.setattr(torch.accelerator, "empty_cache", forbidden)
    device = get_device("cpu")
    assert device.torch_device() == torch.device("cpu")
    assert device.name()
    device.synchronize()
    device.empty_cache()
    free, total = device.memory()
    assert 0 < free <= total
    device.seed_all(7)
    first = torch.rand(3)
    device.seed_all(7)
    assert torch.equal(first, torch.rand(3))


def test_cpu_model(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert cpu_model(cpuinfo) is None
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 50\n")
    assert cpu_model(cpuinfo) is None
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Other\n")
    assert cpu_model(cpuinfo) == "Some CPU @ 2 GHz"


def test_cuda_copies_on_a_stream_of_the_threads_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread waits for what it launched there, and the stream is made once."""
    calls: list[str] = []

    class Event:
        def record(self) -> None:
            calls.append("recorded")

        def wait(self) -> None:
            calls.append("fence")

    class Stream:
        def __init__(self) -> None:
            calls.append("made")

        def synchronize(self) -> None:
            calls.append("waited")

    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        calls.append("begin")
        yield
        calls.append("end")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(cuda, "_own", threading.local())
    device = get_device("cuda")
    fence = device.fence()
    for _ in range(2):
        with device.beside_computation(fence):
            calls.append("copy")
    assert calls == ["recorded", "made", *["begin", "fence", "copy", "end", "waited"] * 2]
    with pytest.raises(ValueError, match="in the middle"), device.beside_computation(fence):
        raise ValueError("in the middle")
    assert calls[-1] == "waited"


def test_cuda_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls and their order of results; a GPU itself is not needed for that."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3, 8))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: calls.append(f"seed {seed}"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append(f"device {index}"))
    monkeypatch.setattr(cuda, "_taken", 0)
    device = get_device("cuda")
    assert device.torch_device() == torch.device("cuda", 0)
    device.take_device(2)
    assert device.torch_device() == torch.device("cuda", 2)
    device.enter_thread()
    with pytest.raises(ValueError, match="worker 4 of this machine needs a GPU of its own, 3 are visible"):
        device.take_device(3)
    assert device.name() == "Some GPU"
    memory = device.memory()
    assert (memory.free, memory.total) == (3, 8)
    device.synchronize()
    device.empty_cache()
    device.seed_all(5)
    assert calls == ["device 2", "device 2", "synchronize", "empty_cache", "seed 5"]


@pytest.mark.parametrize("call", [HpuDevice().torch_device, HpuDevice().memory, HpuDevice().name])
def test_hpu_without_software_says_what_is_missing(call: object) -> None:
    with pytest.raises(RuntimeError, match=r"device hpu: Gaudi's PyTorch bridge cannot be imported .*habana"):
        call()  # type: ignore[operator]


ON_SIMULATOR = """
import torch
from vllm_gaudi_ucm.device import cuda, get_device
device = get_device("hpu")
assert not hasattr(torch, "hpu"), "making the object must not start the card"
assert device.torch_device() == torch.device("hpu")
from habana_frameworks.torch.simulator import card
assert torch.hpu.is_available() and torch.hpu.device_count() == 1 and torch.hpu.current_device() == 0
assert torch.hpu.get_device_properties(0).total_memory == card.total_bytes
assert device.name() == "GAUDI3"
card.device_type = "synDeviceGaudi2"
assert device.name() == "GAUDI2" == torch.hpu.get_device_properties().name
card.free_bytes, card.total_bytes = 5, 9
memory = device.memory()
assert (memory.free, memory.total) == (5, 5), "the pool's, not the card's"
device.synchronize()
device.synchronize()
device.empty_cache()
device.seed_all(11)
first = torch.rand(2)
device.seed_all(11)
assert torch.equal(first, torch.rand(2)), "the host is seeded, too"
assert card.synchronizations == 2 and card.seeds == [11, 11]
from threading import Thread
streams = []
def copy():
    for _ in range(2):
        with device.beside_computation(device.fence()):
            streams.append(torch.hpu.current_stream())
threads = [Thread(target=copy) for _ in range(2)]
for thread in threads:
    thread.start()
    thread.join()
assert streams[0] is streams[1] is not streams[2] is streams[3], "a stream for each thread"
assert torch.hpu.default_stream() not in streams
assert torch.hpu.current_stream() is torch.hpu.default_stream()
card.reset()
assert card.synchronizations == 0 and card.seeds == [] and card.device_type == "synDeviceGaudi3"
"""


def test_hpu_on_the_simulated_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SIM_PATH)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # so that it shows who starts the card
    done = subprocess.run([sys.executable, "-c", ON_SIMULATOR], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
