"""A `QUANT_CONFIG` with the files that it names, as Intel Neural Compressor lays them out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NODES: Mapping[str, Any] = {
    "model.layers.0.mlp.down_proj": {
        "inputs": [[[3.5]]],
        "outputs": [[[2.0]], [[2.0]]],
        "params": {"weight": [[0.25]]},
    }
}


def write_files(
    folder: Path,
    nodes: Mapping[str, Any] | None = None,
    ranks: int = 1,
    content_mode: str = "DynamicRange",
    **config: Any,
) -> Path:
    """The `QUANT_CONFIG`. Its path of the files is another machine's."""
    (folder / "g3").mkdir(parents=True, exist_ok=True)
    method = "" if content_mode == "DynamicRange" else f"_{config.get('scale_method', 'maxabs_hw').upper()}"
    for rank in range(ranks):
        content = {
            "GlobalRank": None,
            "LocalRank": rank,
            "Mode": content_mode,
            "Nodes": NODES if nodes is None else nodes,
        }
        (folder / "g3" / f"inc_output_hooks_maxabs{method}_{rank}_{ranks}.json").write_text(json.dumps(content))
    path = folder / "maxabs_quant_g3.json"
    usual = {
        "mode": "QUANTIZE",
        "observer": "maxabs",
        "scale_method": "maxabs_hw",
        "allowlist": {"types": [], "names": []},
        "blocklist": {"types": [], "names": []},
        "dump_stats_path": "/elsewhere/model/g3/inc_output",
    }
    path.write_text(json.dumps({key: value for key, value in {**usual, **config}.items() if value is not ...}))
    return path
