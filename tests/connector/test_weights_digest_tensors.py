"""Training that changes any one tensor changes the digest, whatever the format, at a bounded number of bytes read."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_gaudi_ucm.connector.forward_inputs import weights_digest

Tensors = dict[str, torch.Tensor]
PER_TENSOR = 16 << 10


def model(layers: int = 6) -> Tensors:
    """As models are: few large matrices, and many small vectors between them."""
    torch.manual_seed(0)
    tensors: Tensors = {"embed": torch.randn(512, 64)}
    for layer in range(layers):
        for name, shape in (("q", (64, 64)), ("up", (192, 64)), ("norm", (64,)), ("bias", (1,))):
            tensors[f"layers.{layer}.{name}"] = torch.randn(shape)
    return tensors


def as_safetensors(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors")


def as_shards(folder: Path, tensors: Tensors) -> None:
    names = sorted(tensors)
    for shard in range(3):
        save_file({name: tensors[name] for name in names[shard::3]}, folder / f"model-{shard}-of-3.safetensors")


def as_archive(folder: Path, tensors: Tensors) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


FORMATS = pytest.mark.parametrize("save", [as_safetensors, as_shards, as_archive], ids=lambda save: save.__name__[3:])


def digest_of(folder: Path, save: Callable[[Path, Tensors], None], tensors: Tensors) -> str:
    folder.mkdir(exist_ok=True)
    save(folder, tensors)
    return weights_digest(str(folder))


@FORMATS
def test_each_tensor_counts(tmp_path: Path, save: Callable[[Path, Tensors], None]) -> None:
    """covers: F3. Each perturbed alone, as training does it."""
    tensors = model()
    digests = {digest_of(tmp_path, save, tensors)}
    for name, tensor in tensors.items():
        digests.add(digest_of(tmp_path, save, {**tensors, name: tensor * 1.001}))
    assert len(digests) == 1 + len(tensors)
    assert digest_of(tmp_path, save, tensors) in digests


def test_each_of_many_tensors_counts(tmp_path: Path) -> None:
    """covers: F3. Layers as deep and wide as to lie between any samples of a file."""
    shapes = {"q": (256, 256), "kv": (128, 256), "o": (256, 256), "up": (512, 256), "down": (256, 512), "norm": (256,)}
    tensors = {f"{layer}.{name}": torch.zeros(shape) for layer in range(12) for name, shape in shapes.items()}
    digests = {digest_of(tmp_path, as_safetensors, tensors)}
    with (tmp_path / "model.safetensors").open("r+b") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        for name, entry in json.loads(file.read(length)).items():
            if name in tensors:
                start, end = entry["data_offsets"]
                os.pwrite(file.fileno(), b"\1" * (end - start), 8 + length + start)
                digests.add(weights_digest(str(tmp_path)))
                os.pwrite(file.fileno(), bytes(end - start), 8 + length + start)
    assert len(digests) == 1 + len(tensors)


@pytest.mark.parametrize("place", ["beginning", "middle", "end"])
def test_a_part_of_a_large_tensor_counts(tmp_path: Path, place: str) -> None:
    """covers: F3. Neighbours are larger than the whole file's samples would reach across."""
    tensors = {name: torch.zeros(1 << 20) for name in "abc"}
    first = digest_of(tmp_path, as_safetensors, tensors)
    count = len(tensors["b"]) // 4
    start = {"beginning": 0, "middle": len(tensors["b"]) // 2 - count // 2, "end": len(tensors["b"]) - count}[place]
    tensors["b"][start : start + count] += 1
    assert digest_of(tmp_path, as_safetensors, tensors) != first


def test_names_and_shapes_count(tmp_path: Path) -> None:
    """covers: F3. The same bytes under another name are other weights."""
    shapes = [{"a": (4, 8), "b": (8, 4)}, {"a": (8, 4), "b": (4, 8)}, {"a": (4, 8), "c": (8, 4)}, {"a": (64,)}]
    digests = {
        digest_of(tmp_path, as_safetensors, {name: torch.ones(shape) for name, shape in tensors.items()})
        for tensors in shapes
    }
    assert len(digests) == 4


def test_the_index_says_which_files_are_read(tmp_path: Path) -> None:
    """covers: F3"""
    first = digest_of(tmp_path, as_shards, model())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"embed": "model-0-of-3.safetensors"}}))
    second = weights_digest(str(tmp_path))
    index.write_text(json.dumps({"weight_map": {"embed": "model-1-of-3.safetensors"}}))
    assert len({first, second, weights_digest(str(tmp_path))}) == 3


@pytest.mark.parametrize("name", ["model.gguf", "model.bin"])
def test_files_of_unknown_structure_are_sampled_throughout(tmp_path: Path, name: str) -> None:
    """covers: F3. What is missed is less than a 1024th of the file."""
    content = bytearray(8 << 20)
    (tmp_path / name).write_bytes(content)
    digests = {weights_digest(str(tmp_path))}
    for start in range(0, len(content), len(content) // 16):
        changed = content.copy()
        changed[start : start + len(content) // 1024] = b"x" * (len(content) // 1024)
        (tmp_path / name).write_bytes(changed)
        digests.add(weights_digest(str(tmp_path)))
    assert len(digests) == 17


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 3) + b"[1]",
        struct.pack("<Q", 2) + b"\xff\xff",
        struct.pack("<Q", 7) + b'{"a":1}',
        struct.pack("<Q", 33) + b'{"a":{"data_offsets":[-9,1<<60]}}',
        struct.pack("<Q", 33) + b'{"a":{"data_offsets":[0,99999]}} ',
        struct.pack("<Q", 31) + b'{"a":{"data_offsets":[0.5,2]}} ',
        struct.pack("<Q", 200_000) + b"[" * 200_000,
        b"PK\x05\x06",
    ],
    ids=range(10),
)
def test_broken_files_have_digests_too(tmp_path: Path, header: bytes) -> None:
    """Whether they can be loaded is for the loader to say."""
    for name in ("model.safetensors", "model.bin"):
        (tmp_path / name).write_bytes(header + b"rest")
    first = weights_digest(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(header + b"REST")
    assert first != weights_digest(str(tmp_path)) != ""


def bytes_read() -> int:
    """By this process, through system calls, so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_little_of_a_large_model_is_read(tmp_path: Path) -> None:
    """Four files of 4 GiB each (with holes: no disk is taken), 256 tensors, as a model of 8 billion parameters has."""
    matrices, files = 64, 4
    size = (4 << 30) // matrices
    for number in range(files):
        header = {
            f"{number}.{at}": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [at * size, (at + 1) * size]}
            for at in range(matrices)
        }
        text = json.dumps(header).encode()
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + (4 << 30))
    before = bytes_read()
    first = weights_digest(str(tmp_path))
    read = bytes_read() - before
    assert read < 1.2 * files * matrices * PER_TENSOR + files * (16 << 10)
    with (tmp_path / "model-2.safetensors").open("r+b") as file:
        # the end of one matrix, in the middle of the file
        os.pwrite(file.fileno(), b"x" * (64 << 10), 8 + len(text) + 33 * size - (64 << 10))
    assert weights_digest(str(tmp_path)) != first
