"""What every process of a test imports, less what depends on its device: loaded once, then processes fork from it.

vLLM asks the platform's plugins for the device while its modules are imported, so none of them but the package is here.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os

from tests.ports import port_of_ranks

# read once, by huggingface_hub while it is imported
os.environ["HF_HUB_OFFLINE"] = "1"
# no collection while they load: see `import_heap`
gc.disable()
# the order is vLLM's: its package sets torch up
for name in (
    "vllm",
    "transformers",
    "transformers.processing_utils",
    "transformers.models.auto.image_processing_auto",
    "openai.types.responses",
    "openai.types.eval_create_params",
    "fastapi",
    "aiohttp",
    "grpc",
    "xgrammar",
    "accelerate",
    "numba",
    "redis",
    "pytest",
    # imported by vLLM's engines while they start
    "ray",
    "compressed_tensors",
    "cv2",
    "einops",
    "google.rpc.error_details_pb2",
    "jsonschema",
    "llguidance",
    "loguru",
    "msgspec",
    "openai_harmony",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "partial_json_parser",
    "rich.progress",
    "setuptools",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental",
    "sympy.combinatorics",
):
    if importlib.util.find_spec(name.partition(".")[0]):
        importlib.import_module(name)
importlib.import_module("vllm.utils.network_utils")._get_open_port = port_of_ranks
gc.freeze()
gc.enable()


def import_vllm(device: str, *others: str) -> None:
    """Also what engines on a device import: vLLM, which asks the platform's plugins for it, and the plugin.

    others: modules of its processes alone.
    """
    gc.disable()
    os.environ["VLLM_GAUDI_UCM_DEVICE"] = device
    for name in (
        "vllm.entrypoints.llm",
        "vllm.model_executor.models.llama",
        "vllm.v1.executor.multiproc_executor",
        "vllm_gaudi_ucm.platform.worker",
        "vllm_gaudi_ucm.start.model_runner",
        *others,
    ):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
