"""vLLM's connector for NIXL: `vllm.distributed.kv_transfer.kv_connector.v1.nixl`.

Internal: `NixlPullConnector`, which vLLM also calls `NixlConnector`, and `NixlPullConnectorWorker`, the side of it in a
worker; ours keep their protocol and the scheduler's side. `ReqMeta` is a type of its methods. The package `nixl` is
only imported when a worker starts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from vllm_gaudi_ucm.vllm_api.kv_cache import AttentionSpec, KVCacheConfig, KVCacheSpec, layer_specs

__all__ = ["NixlPullConnector", "NixlPullConnectorWorker", "ReqMeta", "describe_parts"]


def describe_parts(worker: NixlPullConnectorWorker, config: KVCacheConfig, parts: Mapping[str, Sequence[str]]) -> None:
    """Makes a worker take several tensors for each layer, which it then registers as if each were a layer's.

    Reason: the worker registers one tensor for each name of the KV-cache groups, and finds the size of its blocks in
    the layer's specification. It splits one tensor into regions, but not a layer into tensors.
    Remove when: vLLM registers several tensors of a layer.

    parts: names of a layer's tensors: keys, then values.
    """
    specs: dict[str, KVCacheSpec] = {}
    for layer, spec in layer_specs(config).items():
        assert isinstance(spec, AttentionSpec), "only layers with keys and values are served"
        for name, size in zip(parts[layer], (spec.head_size, spec.head_size_v), strict=True):
            specs[name] = replace(spec, head_size=size, head_size_v=0, page_size_padded=None)
    groups = [
        replace(group, layer_names=[part for name in group.layer_names for part in parts[name]])
        for group in config.kv_cache_groups
    ]
    worker.kv_cache_config = replace(config, kv_cache_groups=groups)
    worker._layer_specs = specs
