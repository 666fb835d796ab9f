"""Helpers of `test_setup.py` that other tests use, too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig, LoadConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from tests.engine.tiny_models import make_config
from vllm_gaudi_ucm.connector.forward_inputs import MODEL_FIELDS
from vllm_gaudi_ucm.connector.setup import ConnectorSetup


def make_setup(folder: Path, **changes: Any) -> ConnectorSetup:
    """The configuration of an engine, as far as it is read; changes: of its parts."""
    given: dict[str, Any] = {
        "dtype": torch.float32,
        "kv_dtype": torch.float32,
        "block_size": 16,
        "heads": 2,
        "layers": ("0", "1"),
        "window_layers": (),
        "ucm": {},
        "revision": None,
        "hf": {},
        "role": "kv_both",
        "options": {},
        "executor": "uni",
        "rank": 0,
        "tp": 1,
        "pp": 1,
        "draft_heads": None,
        **changes,
    }
    folder.mkdir(exist_ok=True)
    model = SimpleNamespace(
        model=str(folder),
        dtype=given["dtype"],
        revision=given["revision"],
        hf_config=make_config("llama", **given["hf"]),
        max_model_len=512,
        trust_remote_code=False,
        seed=0,
        use_mla=False,
        get_total_num_kv_heads=lambda: 2,
        get_total_num_hidden_layers=lambda: 5,
        **dict.fromkeys(set(MODEL_FIELDS) - {"dtype", "revision"}),
    )
    transfer = KVTransferConfig(
        kv_connector="UcmConnector",
        kv_role=given["role"],
        kv_connector_extra_config={"store": {"kind": "memory"}, **given["options"]},
    )
    drafts = None
    if given["draft_heads"] is not None:
        draft_model = SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: given["draft_heads"])
        drafts = SimpleNamespace(method="draft_model", draft_model_config=draft_model)
    config: Any = SimpleNamespace(
        model_config=model,
        load_config=LoadConfig(),
        speculative_config=drafts,
        additional_config={"ucm": given["ucm"]},
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(
            rank=given["rank"],
            tensor_parallel_size=given["tp"],
            pipeline_parallel_size=given["pp"],
            world_size=given["tp"] * given["pp"],
            distributed_executor_backend=given["executor"],
        ),
    )
    spec = FullAttentionSpec(
        block_size=given["block_size"], num_kv_heads=given["heads"], head_size=8, dtype=given["kv_dtype"]
    )
    groups = [KVCacheGroupSpec(list(given["layers"]), spec)]
    if given["window_layers"]:
        window = SlidingWindowSpec(
            block_size=given["block_size"],
            num_kv_heads=given["heads"],
            head_size=8,
            dtype=given["kv_dtype"],
            sliding_window=24,
        )
        groups.append(KVCacheGroupSpec(list(given["window_layers"]), window))
    return ConnectorSetup.from_config(config, KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups))
