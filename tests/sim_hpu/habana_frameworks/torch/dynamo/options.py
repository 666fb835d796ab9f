"""Options of `hpu_backend`: the keys that `torch.compile(options=...)` may have, and the environment's defaults."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Source: the bridge's dynamo/compile_backend/config.py.
KNOWN = frozenset(
    {
        *("keep_input_mutations", "use_inplace_index_copy", "use_inplace_allreduce", "enable_allreduce_graph_split"),
        *("use_eager_fallback", "force_static_compile", "use_graph_freezing", "reinplace_add", "reassign_full_copy"),
        *("reassign_copy_", "remove_unnecessary_clones", "use_boxed_input", "enable_sfg", "use_compiled_recipes"),
        "inference",
    }
)
_ENVIRONMENT = {
    "keep_input_mutations": ("PT_HPU_KEEP_INPUT_MUTATIONS", True),
    "use_inplace_index_copy": ("PT_HPU_USE_INPLACE_INDEX_COPY", True),
    "use_eager_fallback": ("PT_HPU_USE_EAGER_FALLBACK", True),
}


@dataclass(frozen=True)
class Options:
    """The options that change what a region does or counts here; the others change speed alone."""

    keep_input_mutations: bool
    use_inplace_index_copy: bool
    use_eager_fallback: bool
    force_static_compile: bool


def read_options(given: Mapping[str, Any] | None) -> Options:
    """Raises ValueError for a key that the backend does not know."""
    unknown = set(given or {}) - KNOWN
    if unknown:
        raise ValueError(f"hpu_backend: options {sorted(unknown)} are unknown, expected of {sorted(KNOWN)} (duty 6)")
    defaults = {key: _flag(name, default) for key, (name, default) in _ENVIRONMENT.items()}
    defaults["force_static_compile"] = False
    return Options(**{key: bool((given or {}).get(key, default)) for key, default in defaults.items()})


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(name, "")
    return default if not text else text.lower() not in ("0", "false")
