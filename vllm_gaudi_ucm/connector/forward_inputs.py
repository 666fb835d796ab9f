"""Collects what KV depends on in addition to tokens and the shape of the cache: the weights, and how they are used.

Settings that change only the last digits are left out (kernels, device, `ucm.cpu.matrix_unit`, shapes of steps): within
one engine they differ from step to step, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from huggingface_hub import snapshot_download
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
INDEX = ".safetensors.index.json"
"""Suffix of the file that lists which of the others are loaded."""

# Bytes read of a tensor: all of a small one, otherwise pieces from its beginning to its end.
PIECES, PIECE_BYTES = 8, 2 << 10
LONGEST_HEADER = 100_000_000
"""Longest header of a safetensors file, as in its own library."""
# A file that does not tell where its tensors are is divided into this many parts, each sampled like a tensor.
PARTS = 1024

Extent = tuple[int, int]
"""The first byte, and the byte after the last."""


def weights_digest(model: str) -> str:
    """Returns a digest of all weight files, as hexadecimal digits: names, sizes, headers, and samples of every tensor.
    It does not depend on place or times, so a copy has the same digest. Empty if `model` is not a folder with weights.

    At most 16 KiB of a tensor are read: 5 MB in 3,000 calls for a model of 8 billion parameters. Training changes every
    element of the tensors that it trains, which the samples see. They may miss a change of single elements or rows,
    such as those of one token in an embedding, if these are between the pieces; archives of torch (.bin, .pt) hold a
    checksum of each tensor, so that no change is missed there. In other formats, a change of less than a 1024th of the
    file may be missed.
    """
    folder = Path(model)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name.endswith((*SUFFIXES, INDEX)))
    if not any(path.suffix in SUFFIXES for path in files):
        return ""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb", buffering=0) as content:
            size = os.fstat(content.fileno()).st_size
            digest.update(f"{file.relative_to(folder)}\0{size}\0".encode())
            if file.suffix in SUFFIXES:
                described, tensors = _structure(content, size)
                _add_samples(digest, content.fileno(), tensors)
            else:
                described = content.readall()
            digest.update(hashlib.sha256(described).digest())
    return digest.hexdigest()


def _add_samples(digest: hashlib._Hash, file: int, extents: Iterable[Extent]) -> None:
    for start, end in extents:
        room = end - start - PIECE_BYTES
        if end - start <= PIECES * PIECE_BYTES:
            digest.update(os.pread(file, end - start, start))
            continue
        for piece in range(PIECES):
            digest.update(os.pread(file, PIECE_BYTES, start + room * piece // (PIECES - 1)))


def _structure(file: BinaryIO, size: int) -> tuple[bytes, list[Extent]]:
    """Returns the file's header, and the places of its tensors."""
    for read in (_safetensors, _archive):
        try:
            return read(file, size)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, zipfile.BadZipFile):
            continue  # not of this format, or broken, which the loader will report
    return b"", [(size * part // PARTS, size * (part + 1) // PARTS) for part in range(PARTS)]


def _safetensors(file: BinaryIO, size: int) -> tuple[bytes, list[Extent]]:
    """Returns the header, and the tensors in its order."""
    prefix = os.pread(file.fileno(), 8, 0)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    begin = 8 + length
    if begin > size or length > LONGEST_HEADER:
        raise ValueError("no header")
    header = os.pread(file.fileno(), length, 8)
    extents = []
    for name, tensor in json.loads(header).items():
        if name == "__metadata__":
            continue
        start, end = map(index, tensor["data_offsets"])
        if not 0 <= start <= end <= size - begin:
            raise ValueError("a tensor beyond the file")
        extents.append((begin + start, begin + end))
    return header, extents


def _archive(file: BinaryIO, size: int) -> tuple[bytes, list[Extent]]:
    """Reads an archive of torch: names, sizes and checksums of its members, and the members in their order."""
    members = sorted(zipfile.ZipFile(file).infolist(), key=lambda member: member.header_offset)
    described = json.dumps([(member.filename, member.file_size, member.CRC) for member in members])
    starts = [min(max(member.header_offset, 0), size) for member in members]
    return described.encode(), list(zip(starts, [*starts[1:], size], strict=True))


MODEL_FIELDS = (
    "dtype",
    "revision",
    "code_revision",
    "model_impl",
    "model_class_overrides",
    "model_weights",
    "quantization",
    "quantization_config",
)
"""Fields of vLLM's ModelConfig: each counts with its value."""
LOAD_FIELDS = ("load_format", "ignore_patterns")
"""Fields of vLLM's LoadConfig."""

# of `model_loader_extra_config`: they only affect how fast weights are read
_LOADING_SPEED = {"enable_multithread_load", "num_threads", "enable_weights_track", "concurrency", "memory_limit"}
# the place of the model, and the tool that wrote its configuration
_NO_PART_OF_CONFIG = {"_name_or_path", "transformers_version"}
# formats whose weights are files in the folder of the model
_FORMATS_OF_FILES = {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral"} | {
    "sharded_state",
    "runai_streamer",
    "runai_streamer_sharded",
}
_LONG_ROPE = ("longrope", "su")


class ModelInputs(NamedTuple):
    """Inputs of one model. values: plain data, equal if the same tokens give the same KV. is_known: a change of the
    weights changes `values`, too; otherwise their name stands for them.
    """

    name: str
    values: dict[str, Any]
    is_known: bool


def forward_inputs(vllm_config: VllmConfig) -> list[ModelInputs]:
    """Returns the inputs of the model, and of the draft model if there is one: its KV is stored with the target's."""
    found = [_of_model(vllm_config.model_config, vllm_config.load_config)]
    drafts = vllm_config.speculative_config
    if drafts is not None and drafts.method == "draft_model":
        draft = _of_model(drafts.draft_model_config, drafts.draft_load_config or vllm_config.load_config)
        # no layer is computed beyond: blocks there have arbitrary content
        draft.values["max_model_len"] = drafts.draft_model_config.max_model_len
        found.append(draft)
    return found


def _of_model(model: ModelConfig, load: LoadConfig) -> ModelInputs:
    config = {key: value for key, value in model.hf_config.to_dict().items() if key not in _NO_PART_OF_CONFIG}
    extra = load.model_loader_extra_config
    folder = _folder(model, load)
    values: dict[str, Any] = {name: getattr(model, name) for name in MODEL_FIELDS}
    values |= {name: getattr(load, name) for name in LOAD_FIELDS}
    values["config"] = config
    values["long factors"] = [_long_factors(rope, config, model.max_model_len) for rope in _rope_parameters(config)]
    values["loader"] = (
        {key: value for key, value in extra.items() if key not in _LOADING_SPEED} if isinstance(extra, dict) else extra
    )
    values["code"] = _code_digest(folder) if model.trust_remote_code else ""
    if load.load_format == "dummy":
        # vLLM's generator is the device's
        values["weights"] = [model.seed, current_platform.device_type]
        return ModelInputs(model.model, values, is_known=True)
    digest = "" if folder is None else weights_digest(folder)
    is_known = bool(digest) and load.load_format in _FORMATS_OF_FILES
    values["weights"] = [digest, "" if is_known else model.model]
    return ModelInputs(model.model, values, is_known or bool(model.revision))


def _folder(model: ModelConfig, load: LoadConfig) -> str | None:
    """Returns the folder of the model's files, or of a hub's model in the cache; None if there is none."""
    if Path(model.model).is_dir():
        return model.model
    try:
        return str(
            snapshot_download(model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True)
        )
    except (OSError, ValueError):  # it does not exist, or is not the name of a hub's model
        return None


def _code_digest(folder: str | None) -> str:
    """Returns the digest of a model's own code; "" if it has none."""
    if folder is None:
        return ""
    digest, files = hashlib.sha256(), sorted(Path(folder).rglob("*.py"))
    for file in files:
        digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest() if files else ""


def _rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """Returns all rope parameters: layers of different types may have their own."""
    if not isinstance(config, Mapping):
        return
    if isinstance(config.get("rope_type", config.get("type")), str):
        yield config
    for value in config.values():
        yield from _rope_parameters(value)


def _long_factors(rope: Mapping[str, Any], config: Mapping[str, Any], max_model_len: int) -> bool | int:
    """Returns the factors of LongRoPE: vLLM takes one of its two lists, by the longest request allowed."""
    if rope.get("rope_type", rope.get("type")) not in _LONG_ROPE:
        return False
    original = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    return max_model_len if original is None else max_model_len > original
