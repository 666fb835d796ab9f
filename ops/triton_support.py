"""Whether kernels in Triton can run here; triton itself is imported only to find out, and only where it may be used."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=8)
def why_not_triton(device_type: str) -> str | None:
    """Why Triton has no kernels for tensors on this type of device; None if it has.

    On a CPU it has them under its interpreter (TRITON_INTERPRET=1), which is for tests: very slow.
    """
    if device_type not in ("cpu", "cuda"):
        return f"they are for cuda, the tensors are on {device_type}"
    try:
        from triton import knobs
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    if device_type == "cpu" and not knobs.runtime.interpret:
        return "the tensors are on cpu, and TRITON_INTERPRET=1 is not set"
    return None
