"""What is not supported is refused at start, by name, with the flag or model that asked for it."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from vllm import SamplingParams
from vllm.config import CacheConfig, KVTransferConfig, ParallelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.input_processor import InputProcessor

from tests.engine.contracts import CONTRACTS, runner_contract
from tests.engine.pair_connector import PairConnector
from tests.engine.tiny_models import COMMON, FAMILIES, make_config
from tests.engine.window_models import window_config
from tests.platform.features import NGRAM, save_config, start
from vllm_gaudi_ucm.attention.backend import UnifiedAttentionImpl
from vllm_gaudi_ucm.envs import LOCAL_ENGINES, local_engines
from vllm_gaudi_ucm.options.errors import UcmConfigError, UnsupportedFeatureError
from vllm_gaudi_ucm.platform import lora_features
from vllm_gaudi_ucm.platform.combinations import refuse_device_ids, refuse_other_profiler
from vllm_gaudi_ucm.platform.features import most_experts
from vllm_gaudi_ucm.platform.platform import UcmPlatform
from vllm_gaudi_ucm.platform.speculation_features import OF_SPECULATION
from vllm_gaudi_ucm.vllm_api.blocks import tells_clients_of_errors
from vllm_gaudi_ucm.vllm_api.cache_options import tile_of_slots
from vllm_gaudi_ucm_tools.sparse_report.forced_tokens import FORCED, ForcedTokens


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration without weights is all that these tests load."""
    return save_config(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", "llama")


TORCH = {"profiler": "torch", "torch_profiler_dir": "/profiles"}
FLAGS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "pipeline parallelism, for which vLLM schedules drafts of a request before it has the token that they follow "
        "(take --tensor-parallel-size)",
        "--speculative-config",
        {
            "pipeline_parallel_size": 2,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
        },
    ),
    (
        "adapters (LoRA) whose matrices ranks share out",
        "--fully-sharded-loras",
        {"enable_lora": True, "fully_sharded_loras": True},
    ),
    (
        "graphs for each number of adapters",
        "--specialize-active-lora",
        {"enable_lora": True, "specialize_active_lora": True},
    ),
    (
        "adapters (LoRA) of experts",
        "--enable-mixed-moe-lora-format or --enable-moe-shared-loras",
        {"enable_lora": True, "enable_moe_shared_loras": True},
    ),
    (
        "adapters (LoRA) of encoders and modalities",
        "--default-mm-loras or --enable-tower-connector-lora",
        {"enable_lora": True, "enable_tower_connector_lora": True},
    ),
    (
        "heads for classification in adapters (LoRA)",
        "--max-lora-cls-labels",
        {"enable_lora": True, "max_lora_cls_labels": 3},
    ),
    (
        "the KV connector OffloadingConnector with adapters (LoRA)",
        "--enable-lora with --kv-transfer-config or --kv-offloading-size",
        {"enable_lora": True, "kv_offloading_size": 1.0},
    ),
    (
        "the speculative method ngram_gpu",
        "--speculative-config",
        {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
    ),
    (
        "the KV connector SimpleCPUOffloadConnector",
        "--kv-transfer-config",
        {"kv_transfer_config": KVTransferConfig(kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both")},
    ),
    (
        "the KV connector SimpleCPUOffloadConnector",
        "--kv-transfer-config",
        {
            "kv_transfer_config": KVTransferConfig(
                kv_connector="MultiConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"connectors": [{"kv_connector": "SimpleCPUOffloadConnector"}]},
            )
        },
    ),
    (
        "the KV connector ExampleConnector, which takes keys and values of a layer for one tensor",
        "--kv-transfer-config",
        {"kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")},
    ),
    (
        "the KV connector WholeConnector (it does not declare takes_kv_pairs = True), which takes keys and values",
        "--kv-transfer-config",
        {
            "kv_transfer_config": KVTransferConfig(
                kv_connector="WholeConnector", kv_connector_module_path="tests.engine.pair_connector", kv_role="kv_both"
            ),
        },
    ),
    (
        "the KV offloading backend lmcache",
        "--kv-offloading-backend lmcache",
        {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
    ),
    (
        "the connector of --kv-offloading-size with PairConnector",
        "--kv-offloading-size",
        {
            "kv_offloading_size": 1.0,
            "kv_transfer_config": KVTransferConfig(
                kv_connector="PairConnector", kv_connector_module_path="tests.engine.pair_connector", kv_role="kv_both"
            ),
        },
    ),
    ("dtype fp8_e5m2", "--kv-cache-dtype fp8_e5m2", {"kv_cache_dtype": "fp8_e5m2"}),
    (
        "prompt embeddings with pipeline stages",
        "--enable-prompt-embeds",
        {"enable_prompt_embeds": True, "pipeline_parallel_size": 2},
    ),
    (
        "prompt embeddings with several engines",
        "--enable-prompt-embeds",
        {"enable_prompt_embeds": True, "data_parallel_size": 2},
    ),
    ("quantised while they are loaded (fp8)", "--quantization fp8", {"quantization": "fp8"}),
    ("quantised while they are loaded (fp8_per_tensor)", "--quantization", {"quantization": "fp8_per_tensor"}),
    ("weight offloading", "--cpu-offload-gb", {"cpu_offload_gb": 1}),
    (
        "drafts for a model that pools",
        "--speculative-config",
        {"runner": "pooling", "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ),
    (
        "custom logits processors with a model that pools",
        "--logits-processors",
        {"runner": "pooling", "logits_processors": ["tests.sampling.processors:Any"]},
    ),
    (
        "a KV connector with a model that pools",
        "--kv-transfer-config",
        {
            "runner": "pooling",
            "kv_transfer_config": KVTransferConfig(
                kv_connector="UcmConnector",
                kv_connector_module_path="vllm_gaudi_ucm.connector.connector",
                kv_role="kv_both",
            ),
        },
    ),
    (
        "the profiler proton",
        "--profiler-config",
        {"profiler_config": {"profiler": "proton", "proton_profiler_dir": "/profiles"}},
    ),
    (
        "the profiler's option capture_torch_profiler, detailed_trace_annotation",
        "--profiler-config",
        {"profiler_config": {**TORCH, "capture_torch_profiler": True, "detailed_trace_annotation": True}},
    ),
]


@pytest.mark.parametrize(("feature", "flag", "options"), FLAGS, ids=[flag[0] for flag in FLAGS])
def test_flags(llama: Path, feature: str, flag: str, options: dict[str, Any]) -> None:
    """covers: A18"""
    with pytest.raises(UnsupportedFeatureError, match="not support") as error:
        start(llama, **options)
    assert feature in str(error.value)
    assert flag in str(error.value)


MODELS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("encoder-decoder models", "WhisperForConditionalGeneration", "whisper", {}),
    ("recurrent state", "MambaForCausalLM", "mamba", {}),
]


@pytest.mark.parametrize(("feature", "architecture", "model_type", "changes"), MODELS, ids=[m[2] for m in MODELS])
def test_models(tmp_path: Path, feature: str, architecture: str, model_type: str, changes: dict[str, Any]) -> None:
    """covers: A18"""
    if model_type in FAMILIES:
        save_config(tmp_path, architecture, model_type, **changes)
    else:
        save_foreign_config(tmp_path, architecture, model_type, **changes)
    with pytest.raises(UnsupportedFeatureError, match="not support") as error:
        start(tmp_path)
    assert feature in str(error.value)
    assert str(tmp_path) in str(error.value)


def save_foreign_config(folder: Path, architecture: str, model_type: str, **changes: Any) -> None:
    """The default configuration of a model that this plugin does not serve."""
    config = AutoConfig.for_model(model_type, **changes)
    config.architectures = [architecture]
    config.save_pretrained(folder)


NO_WINDOW = {"sliding_window": None}
MIXTURES: list[tuple[str, str, dict[str, Any]]] = [
    ("MixtralForCausalLM", "mixtral", NO_WINDOW),
    ("Qwen2MoeForCausalLM", "qwen2_moe", {}),
    ("Qwen3MoeForCausalLM", "qwen3_moe", {}),
    ("OlmoeForCausalLM", "olmoe", {}),
    ("GraniteMoeForCausalLM", "granitemoe", {}),
]


@pytest.mark.parametrize(("architecture", "model_type", "changes"), MIXTURES, ids=[m[1] for m in MIXTURES])
def test_mixture_of_experts(tmp_path: Path, architecture: str, model_type: str, changes: dict[str, Any]) -> None:
    """Served, shared out as tensors or as whole experts, also by engines. covers: A18"""
    save_foreign_config(tmp_path, architecture, model_type, **changes)
    start(tmp_path)
    start(tmp_path, data_parallel_size=2)
    start(tmp_path, enable_expert_parallel=True, tensor_parallel_size=2)


def test_stages_of_layers_that_share_keys_and_values(tmp_path: Path) -> None:
    """covers: A18"""
    save_foreign_config(tmp_path, "Gemma4ForCausalLM", "gemma4_text", num_hidden_layers=4, num_kv_shared_layers=2)
    with pytest.raises(UnsupportedFeatureError, match=r"stages with a model whose last 2 layers .*--pipeline-parallel"):
        start(tmp_path, pipeline_parallel_size=2)
    start(tmp_path, tensor_parallel_size=2)


def test_stages_of_a_hybrid_with_experts(tmp_path: Path) -> None:
    """covers: A18"""
    architecture = "GraniteMoeHybridForCausalLM"
    save_foreign_config(tmp_path, architecture, "granitemoehybrid", num_hidden_layers=2, num_local_experts=4)
    with pytest.raises(UnsupportedFeatureError, match=rf"pipeline stages of {architecture} with experts"):
        start(tmp_path, pipeline_parallel_size=2)


def test_what_mixtures_of_experts_lack(tmp_path: Path) -> None:
    """covers: A18"""
    save_foreign_config(tmp_path, "MixtralForCausalLM", "mixtral", **NO_WINDOW)
    asked: dict[str, dict[str, Any]] = {
        r"pipeline stages with 2 engines that share out experts .*--pipeline-parallel-size": {
            "data_parallel_size": 2,
            "pipeline_parallel_size": 2,
        },
        r"whole experts on each device with 2 engines of several devices .*--enable-expert-parallel": {
            "data_parallel_size": 2,
            "tensor_parallel_size": 2,
            "enable_expert_parallel": True,
        },
        r"drafts with 2 engines that share out experts .*--speculative-config": {
            "data_parallel_size": 2,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
        },
        r"another exchange of experts' rows .*--all2all-backend deepep_v2": {
            "data_parallel_size": 2,
            "all2all_backend": "deepep_v2",
        },
        r"ucm_sparse_method with 2 engines that share out experts .*--data-parallel-size": {
            "data_parallel_size": 2,
            "additional_config": {"ucm": {"ucm_sparse_method": "GSA"}},
        },
        r"the kernels triton of experts \(asked for by --moe-backend triton\)": {"moe_backend": "triton"},
        r"the chosen experts in outputs .*--enable-return-routed-experts": {"enable_return_routed_experts": True},
    }
    for says, options in asked.items():
        with pytest.raises(UnsupportedFeatureError, match=says):
            start(tmp_path, **options)


def test_one_expert_or_none_is_no_mixture(tmp_path: Path) -> None:
    """Configurations of dense models carry the keys of their mixtures, too."""
    for value in (0, 1, None):
        start(save_config(tmp_path, "Qwen2ForCausalLM", "qwen2", num_experts=value, num_experts_per_tok=2))


EXPERTS: list[tuple[int, dict[str, Any]]] = [
    (4, {"num_local_experts": 4}),
    (6, {"block_configs": [{"block_type": "attention"}, {"block_type": "moe", "n_routed_experts": 6}]}),
    (8, {"moe_num_experts": [8, 8]}),
    (4, {"ffn_config": {"moe_num_experts": 4, "moe_top_k": 2}}),
    (16, {"layers_num_experts": [0, 16]}),
    (0, {"num_experts_per_tok": 8, "n_shared_experts": 2, "num_shared_experts": 2, "mtp_num_experts": 64}),
    (0, {"num_local_experts": None, "moe_num_experts": 0, "num_experts": True}),
]


@pytest.mark.parametrize(("experts", "values"), EXPERTS)
def test_where_configurations_say_their_experts(experts: int, values: dict[str, Any]) -> None:
    assert most_experts(make_config("llama", **values)) == experts


def test_adapters_of_models_that_pool(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.32 has no error for a failed request."""
    options: dict[str, Any] = {"enable_lora": True, "runner": "pooling"}
    if tells_clients_of_errors():
        assert start(llama, **options).lora_config is not None
    monkeypatch.setattr(lora_features, "tells_clients_of_errors", lambda: False)
    with pytest.raises(UnsupportedFeatureError, match=r"adapters \(LoRA\) with a model that pools .*--enable-lora"):
        start(llama, **options)


@pytest.mark.skipif(UcmPlatform.device_type == "cuda", reason="a GPU has them")
def test_what_a_profiler_lacks_on_this_device(llama: Path) -> None:
    """covers: A18"""
    device = UcmPlatform.device_type
    with pytest.raises(UnsupportedFeatureError, match=rf"the profiler cuda on {device} \(take torch\)"):
        start(llama, profiler_config={"profiler": "cuda"})
    with pytest.raises(UnsupportedFeatureError, match=rf"activity CUDA on {device} \(take CPU, or leave"):
        start(llama, profiler_config={**TORCH, "torch_profiler_activities": ["CPU", "CUDA"]})
    config = start(llama, profiler_config={**TORCH, "torch_profiler_activities": ["CPU"]})
    for name in ("cpu", "cuda", "hpu"):
        refuse_other_profiler(config, name)


@pytest.mark.parametrize("engines", [1, 2])
def test_devices_by_their_ids(llama: Path, monkeypatch: pytest.MonkeyPatch, engines: int) -> None:
    """A CPU has none; what vLLM notes for each of several engines is no such flag."""
    monkeypatch.setenv(LOCAL_ENGINES, "")  # restored afterwards
    config = start(llama, data_parallel_size=engines)
    assert local_engines() == engines
    if engines > 1:
        config.parallel_config.assigned_physical_gpu_ids = [1]
        refuse_device_ids(config, "cpu")
    config.parallel_config.assigned_physical_gpu_ids = list(range(engines))
    with pytest.raises(UnsupportedFeatureError, match="leave the flag out"):
        refuse_device_ids(config, "cpu")
    with pytest.raises(UnsupportedFeatureError, match="HABANA_VISIBLE_MODULES"):
        refuse_device_ids(config, "hpu")
    refuse_device_ids(config, "cuda")


def test_sleep_mode_is_refused_by_vllm_itself(llama: Path) -> None:
    with pytest.raises(ValueError, match="Sleep mode is not supported"):
        start(llama, enable_sleep_mode=True)


@pytest.mark.parametrize(
    ("quantisation", "refused"),
    [
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 64, "data_type": "int", "sym": True},
            r"quantised by Intel's tools \(auto-round\)",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": []},
            r"quantised weights \(modelopt\)",
        ),
        # of gpt-oss alone it is read
        ({"quant_method": "mxfp4"}, r"quantised weights \(mxfp4\)"),
    ],
)
def test_a_quantised_model(tmp_path: Path, quantisation: dict[str, Any], refused: str) -> None:
    """covers: A18"""
    model = save_config(tmp_path, "LlamaForCausalLM", "llama", quantization_config=quantisation)
    with pytest.raises(UnsupportedFeatureError, match=refused):
        start(model, dtype="bfloat16")


def test_ranges_of_intels_compressor(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: A18"""
    monkeypatch.setenv("QUANT_CONFIG", "maxabs.json")
    with pytest.raises(UnsupportedFeatureError, match="measured ranges without `--quantization inc`"):
        start(llama)


def test_one_error_names_everything(llama: Path) -> None:
    with pytest.raises(UnsupportedFeatureError, match="not support") as error:
        start(
            llama,
            kv_offloading_size=1.0,
            kv_offloading_backend="lmcache",
            enable_dbo=True,
            enable_prompt_embeds=True,
            data_parallel_size=2,
        )
    for name in ("KV offloading backend", "dual batch", "prompt embeddings", "--kv-offloading-backend", "--enable-dbo"):
        assert name in str(error.value)


def test_layers_that_embed_tokens_get_no_embeddings(tmp_path: Path) -> None:
    """covers: A18"""
    sizes = {**COMMON, **FAMILIES["llama"], "head_dim": 16, "vocab_size_per_layer_input": 64}
    for folder, width in (("wide", 16), ("none", 0)):
        config = AutoConfig.for_model("gemma4_text", **sizes, hidden_size_per_layer_input=width)
        config.architectures = ["Gemma4ForCausalLM"]
        config.save_pretrained(tmp_path / folder)
    with pytest.raises(UnsupportedFeatureError, match=r"whose layers embed tokens.*--enable-prompt-embeds"):
        start(tmp_path / "wide", enable_prompt_embeds=True)
    start(tmp_path / "wide")
    start(tmp_path / "none", enable_prompt_embeds=True)


BY_TOKEN = {"additional_config": {"ucm": {"kv_cache": {"granularity": "token"}}}}


@pytest.mark.parametrize(
    ("feature", "options"),
    [
        (
            "the KV connector UcmConnector",
            {"kv_transfer_config": KVTransferConfig(kv_connector="UcmConnector", kv_role="kv_both")},
        ),
        ("the KV connector OffloadingConnector", {"kv_offloading_size": 1.0}),
        ("--num-gpu-blocks-override 64", {"num_gpu_blocks_override": 64}),
    ],
)
def test_what_slots_for_tokens_exclude(llama: Path, feature: str, options: dict[str, Any]) -> None:
    """covers: A18"""
    with pytest.raises(UnsupportedFeatureError, match="granularity 'token'") as error:
        start(llama, **BY_TOKEN, **options)
    assert feature in str(error.value)


@pytest.mark.parametrize(("block_size", "tile"), [(None, 128), (1, 128), (32, 32)])
def test_slots_for_tokens_at_static_shapes_come_in_strips_of_our_scheduler(
    llama: Path, block_size: int | None, tile: int
) -> None:
    """However often vLLM copies its configuration, and once the engine has set its own block size."""
    ucm = {"kv_cache": {"granularity": "token"}, "graphs": {"mode": "eager"}}
    config = start(llama, additional_config={"ucm": ucm}, block_size=block_size)
    config.cache_config.block_size = 1
    UcmPlatform.check_and_update_config(config)
    assert tile_of_slots(pickle.loads(pickle.dumps(config))) == tile
    assert config.scheduler_config.scheduler_cls == "vllm_gaudi_ucm.scheduler.scheduler.UcmScheduler"
    assert tile_of_slots(start(llama, **BY_TOKEN)) is None
    with pytest.raises(UnsupportedFeatureError, match="granularity 'token' at static shapes with a scheduler of your"):
        start(llama, additional_config={"ucm": ucm}, scheduler_cls="somebody.Scheduler")


def test_slots_are_counted_without_the_null_slot(llama: Path) -> None:
    """However often vLLM copies its configuration."""
    ucm = {"kv_cache": {"granularity": "token", "max_total_token_num": 4096}}
    config = start(llama, additional_config={"ucm": ucm})
    UcmPlatform.check_and_update_config(config)
    assert config.cache_config.num_gpu_blocks_override == 4097


def test_what_several_workers_exclude(llama: Path) -> None:
    """covers: A18 D9"""
    ours: dict[str, Any] = {
        "kv_connector": "UcmConnector",
        "kv_connector_module_path": "vllm_gaudi_ucm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": {"kind": "memory"}},
    }
    child = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours]},
    }
    for config in (ours, child):
        with pytest.raises(ValueError, match=r'store\.kind.*"memory" with 2 workers.*"file" or "redis"'):
            start(llama, tensor_parallel_size=2, kv_transfer_config=KVTransferConfig(**config))
    ours["kv_connector_extra_config"] = {"store": {"kind": "redis"}}
    gsa: dict[str, Any] = {"ucm_sparse_method": "GSA"}
    offloaded = {**gsa, "memory_mode": {"enabled": True}}
    for ucm in ({}, gsa, offloaded, {"preemption": {"mode": "swap"}}):
        start(llama, tensor_parallel_size=2, additional_config={"ucm": ucm})
    for ucm in ({}, gsa, offloaded):
        connector = KVTransferConfig(**ours)
        start(llama, tensor_parallel_size=2, additional_config={"ucm": ucm}, kv_transfer_config=connector)
    for ucm in ({}, gsa):
        start(llama, tensor_parallel_size=2, additional_config={"ucm": ucm}, kv_offloading_size=1.0)
    with pytest.raises(UnsupportedFeatureError, match=r"ucm.memory_mode with 2 pipeline stages"):
        start(llama, pipeline_parallel_size=2, additional_config={"ucm": offloaded})


@pytest.mark.parametrize("name", ["NixlConnector", "LMCacheConnectorV1"])
def test_pools_of_several_workers(llama: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """covers: A18"""
    monkeypatch.setattr("vllm_gaudi_ucm.connector.transfer_config.find_spec", lambda package: None)
    config = KVTransferConfig(kv_connector=name, kv_role="kv_both")
    with pytest.raises(UnsupportedFeatureError, match=rf"{name} without the package .*pip install"):
        start(llama, kv_transfer_config=config)
    module = {"NixlConnector": "nixl_connector", "LMCacheConnectorV1": "lmcache_connector"}[name]
    config = KVTransferConfig(
        kv_connector=name, kv_connector_module_path=f"vllm_gaudi_ucm.connector.{module}", kv_role="kv_both"
    )
    with pytest.raises(UnsupportedFeatureError, match=rf"{name} with 2 workers.*take UcmConnector"):
        start(llama, kv_transfer_config=config, tensor_parallel_size=2)


def test_what_pipeline_stages_exclude(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: A18. Two layers: stages of one each, or of three in all where the partition says so."""

    def transfer(*names: str) -> KVTransferConfig:
        children: list[dict[str, Any]] = [
            {"kv_connector": name, "kv_connector_module_path": MODULES[name], "kv_role": "kv_both"} for name in names
        ]
        for child in children:
            if child["kv_connector"] == "UcmConnector":
                child["kv_connector_extra_config"] = {"store": {"kind": "redis"}}
        if len(children) == 1:
            return KVTransferConfig(**children[0])
        extra = {"connectors": children}
        return KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra)

    two: dict[str, Any] = {"pipeline_parallel_size": 2}
    start(llama, **two, additional_config={"ucm": {"preemption": {"mode": "auto"}, "ucm_sparse_method": "KVStar"}})
    start(llama, **two, kv_transfer_config=transfer("UcmConnector"))
    start(llama, **two, kv_transfer_config=transfer("OffloadingConnector", "UcmConnector"))
    start(llama, **two, kv_offloading_size=1.0)
    for names in (("PairConnector",), ("UcmConnector", "PairConnector")):
        with pytest.raises(
            UnsupportedFeatureError, match=r"PairConnector with 2 pipeline stages.*--kv-transfer-config"
        ):
            start(llama, **two, kv_transfer_config=transfer(*names))
    monkeypatch.setattr("vllm.envs.VLLM_PP_LAYER_PARTITION", "2,0")
    unequal = r"OffloadingConnector with stages of 2, 0 layers.*UcmConnector does not.*VLLM_PP_LAYER_PARTITION or "
    with pytest.raises(UnsupportedFeatureError, match=f"{unequal}--kv-offloading-size"):
        start(llama, **two, kv_offloading_size=1.0)
    with pytest.raises(UnsupportedFeatureError, match=f"{unequal}--kv-transfer-config"):
        start(llama, **two, kv_transfer_config=transfer("OffloadingConnector"))
    start(llama, **two, kv_transfer_config=transfer("UcmConnector"))


MODULES = {
    "UcmConnector": "vllm_gaudi_ucm.connector",
    "OffloadingConnector": "vllm_gaudi_ucm.connector.offloading_connector",
    "PairConnector": "tests.engine.pair_connector",
}
NEW_FLAGS: list[tuple[str, str, dict[str, Any]]] = [
    ("a kernel for whole layers", "--monokernel", {"monokernel": True}),
    ("sleep mode by criu", "--sleep-mode-backend criu", {"sleep_mode_backend": "criu"}),
]


@pytest.mark.parametrize(("feature", "flag", "options"), NEW_FLAGS, ids=[flag[0] for flag in NEW_FLAGS])
def test_flags_of_vllm_0_33(llama: Path, feature: str, flag: str, options: dict[str, Any]) -> None:
    """covers: A18"""
    if not all(hasattr(EngineArgs, name) for name in options):
        pytest.skip("this vLLM has no such flag")
    with pytest.raises(UnsupportedFeatureError, match=flag) as error:
        start(llama, **options)
    assert feature in str(error.value)


SPECULATION: list[tuple[str, dict[str, Any]]] = [
    ("suffix decoding (the speculative method suffix)", {"method": "suffix", "num_speculative_tokens": 2}),
    ("rejection_sample_method='block'", {**NGRAM, "rejection_sample_method": "block"}),
    ("random drafts (draft_sample_method='probabilistic')", {**NGRAM, "draft_sample_method": "probabilistic"}),
    ("rejection_sample_method='fly'", {**NGRAM, "rejection_sample_method": "fly"}),
    ("parallel_drafting", {**NGRAM, "parallel_drafting": True}),
    ("disable_padded_drafter_batch", {**NGRAM, "disable_padded_drafter_batch": True}),
    ("kv_cache_dtype='fp8'", {**NGRAM, "kv_cache_dtype": "fp8"}),
]


@pytest.mark.parametrize(("feature", "options"), SPECULATION, ids=[case[0] for case in SPECULATION])
def test_speculative_decoding_that_is_refused(
    llama: Path, feature: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """covers: A18"""
    # its package is not needed to refuse it
    monkeypatch.setattr("vllm.config.speculative.has_arctic_inference", lambda: True)
    with pytest.raises(UnsupportedFeatureError, match="not support") as error:
        start(llama, speculative_config=options)
    assert feature in str(error.value)
    assert "--speculative-config" in str(error.value)


@pytest.mark.parametrize(("name", "value"), [("draft_lm_head_quantization", "fp8"), ("xpress_topc", 8)])
def test_options_of_speculation_that_a_supported_vllm_may_lack(name: str, value: object) -> None:
    """Refused wherever vLLM itself lets them through. covers: A18"""
    options: Any = SimpleNamespace(**{name: value})
    (row,) = (row for row in OF_SPECULATION if f"option {name}=" in row.name)
    assert row.asked(options) == (f"the speculative option {name}={value!r}", "--speculative-config")
    assert row.asked(SimpleNamespace(**{name: None})) is None  # type: ignore[arg-type]
    assert row.asked(SimpleNamespace()) is None  # type: ignore[arg-type]


def test_draft_models_that_are_refused(llama: Path, tmp_path: Path) -> None:
    """covers: A18"""
    words = save_config(tmp_path / "words", "LlamaForCausalLM", "llama", vocab_size=300)
    some = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
    window = save_config(tmp_path / "window", "Qwen2ForCausalLM", "qwen2", **some)
    latent = save_config(tmp_path / "latent", "DeepseekV2ForCausalLM", "deepseek_v2")
    for model, feature in (
        (window, "sliding-window attention in some layers of a qwen2 of a draft model"),
        (words, "another vocabulary"),
        (latent, "a draft model of another kind of attention"),
    ):
        options = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
        with pytest.raises((UnsupportedFeatureError, ValueError), match=r"not support|vocabulary") as error:
            start(llama, speculative_config=options)
        assert feature in str(error.value) or "same vocabulary size" in str(error.value)


@pytest.mark.parametrize("name", ["OffloadingConnector", "PairConnector"])
def test_connectors_beside_latents(tmp_path: Path, name: str) -> None:
    """covers: A18"""
    model = save_config(tmp_path, "DeepseekV2ForCausalLM", "deepseek_v2")
    config = KVTransferConfig(kv_connector=name, kv_connector_module_path=MODULES[name], kv_role="kv_both")
    refused = pytest.raises(UnsupportedFeatureError, match=r"PairConnector with multi-head latent .*take UcmConnector")
    with nullcontext() if name == "OffloadingConnector" else refused:
        start(model, kv_transfer_config=config)


def test_custom_logits_processors_beside_drafts(llama: Path) -> None:
    """vLLM has none beside drafts. covers: A18"""
    with pytest.raises(UnsupportedFeatureError, match=r"custom logits processors .*--logits-processors"):
        start(llama, speculative_config=NGRAM, logits_processors=["a.module:Class"])
    start(llama, speculative_config=NGRAM)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_custom_logits_processors(llama: Path, contract: str) -> None:
    """Where vLLM accepts those of its V2 runner alone, the error says how to have it accept ours."""
    with runner_contract(contract):
        refusal = pytest.raises(UnsupportedFeatureError, match=r"VLLM_USE_V2_MODEL_RUNNER=0.*--logits-processors")
        with refusal if contract == "V2" else nullcontext():
            start(llama, logits_processors=["a.module:Class"])
        # what the command sparse-report is made of is accepted on every device
        config = start(llama, logits_processors=[ForcedTokens])
        InputProcessor(config).validate_logits_processors_params(SamplingParams(extra_args={FORCED: [3]}))


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculative_decoding_that_is_supported(llama: Path, method: str) -> None:
    options = NGRAM if method == "ngram" else {"method": method, "model": str(llama), "num_speculative_tokens": 2}
    config = start(llama, speculative_config=options)
    assert config.num_speculative_tokens == 2
    assert not config.scheduler_config.async_scheduling


HEADS = [
    ("eagle", "LlamaForCausalLM"),
    ("eagle3", "LlamaForCausalLM"),
    ("mtp", "DeepseekV3ForCausalLM"),
    ("mtp", "Glm4MoeForCausalLM"),
    ("mtp", "DeepseekV32ForCausalLM"),
    ("mtp", "GlmMoeDsaForCausalLM"),
]
MTP_TYPES = {
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
}


def _with_head(folder: Path, method: str, architecture: str) -> tuple[Path, dict[str, Any]]:
    """The model and the options of a head of this method."""
    if method == "mtp":
        model = save_config(folder / "model", architecture, MTP_TYPES[architecture], num_nextn_predict_layers=1)
        return model, {"method": "mtp", "num_speculative_tokens": 2}
    head = save_config(folder / "head", architecture, "llama", num_hidden_layers=1)
    model = save_config(folder / "model", "LlamaForCausalLM", "llama")
    return model, {"method": method, "model": str(head), "num_speculative_tokens": 2}


@pytest.mark.parametrize(("method", "architecture"), HEADS)
def test_draft_heads_that_are_supported(tmp_path: Path, method: str, architecture: str) -> None:
    model, options = _with_head(tmp_path, method, architecture)
    config = start(model, speculative_config=options)
    assert config.speculative_config is not None
    assert config.speculative_config.method == method


def test_draft_heads_that_are_refused(tmp_path: Path, llama: Path) -> None:
    """covers: A18"""
    _, options = _with_head(tmp_path, "eagle", "MistralForCausalLM")
    refused = pytest.raises(UnsupportedFeatureError, match=r"the draft head EagleMistralForCausalLM .*speculative")
    with refused:
        start(llama, speculative_config=options)


@pytest.mark.parametrize(("method", "architecture"), HEADS)
def test_what_draft_heads_exclude(tmp_path: Path, method: str, architecture: str) -> None:
    """covers: A18"""
    model, options = _with_head(tmp_path, method, architecture)
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
    with pytest.raises(UnsupportedFeatureError, match=r"a draft head with a KV connector .*--speculative-config"):
        start(model, speculative_config=options, kv_transfer_config=transfer)
    for name in ("disable_eagle_block_drop", "use_local_argmax_reduction"):
        if name in vars(start(model, speculative_config=options).speculative_config):
            with pytest.raises(UnsupportedFeatureError, match=f"the speculative option {name}=True"):
                start(model, speculative_config={**options, name: True})


def test_quantised_weights_of_drafts(tmp_path: Path, llama: Path) -> None:
    """A layer of the model's checkpoint has the model's format; another model's is refused. covers: A18"""
    fp8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    model = save_config(tmp_path / "model", "DeepseekV32ForCausalLM", "deepseek_v32", num_nextn_predict_layers=1, **fp8)
    start(model, speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    small = save_config(tmp_path / "small", "LlamaForCausalLM", "llama", **fp8)
    options = {"method": "draft_model", "model": str(small), "num_speculative_tokens": 2}
    with pytest.raises(UnsupportedFeatureError, match=r"a draft model with quantised weights \(fp8\)"):
        start(llama, speculative_config=options)


def test_passes_of_a_head_share_no_choice_of_tokens(tmp_path: Path) -> None:
    """The option is refused; a checkpoint that shares choices is served. covers: A18"""
    _, options = _with_head(tmp_path, "mtp", "GlmMoeDsaForCausalLM")
    changes = {"num_nextn_predict_layers": 1, "index_share_for_mtp_iteration": True}
    model = save_config(tmp_path / "shares", "GlmMoeDsaForCausalLM", "glm_moe_dsa", **changes)
    start(model, speculative_config=options)
    with pytest.raises(UnsupportedFeatureError, match=r"option index_share_for_mtp_iteration=True .*--spec"):
        start(model, speculative_config={**options, "index_share_for_mtp_iteration": True})


def test_what_is_supported_starts(llama: Path) -> None:
    config = start(llama, enable_prefix_caching=True, dtype="bfloat16", max_num_seqs=4)
    assert config.parallel_config.worker_cls == "vllm_gaudi_ucm.platform.worker.UcmWorker"
    assert not config.scheduler_config.async_scheduling


def test_a_window_that_is_switched_off_is_none(tmp_path: Path) -> None:
    """Qwen2's configurations carry a window and a switch."""
    start(save_config(tmp_path, "Qwen2ForCausalLM", "qwen2", sliding_window=64, use_sliding_window=False))


def test_windows_that_vllm_does_not_implement_are_refused(tmp_path: Path) -> None:
    start(save_config(tmp_path / "all", "MistralForCausalLM", "mistral", sliding_window=64))
    some = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
    with pytest.raises(UnsupportedFeatureError, match="sliding-window attention in some layers of a qwen2"):
        start(save_config(tmp_path / "some", "Qwen2ForCausalLM", "qwen2", **some))


def test_an_unknown_option_of_ours_stops_the_start(llama: Path) -> None:
    with pytest.raises((UcmConfigError, ValueError), match=r"ucm\.phase_lag"):
        start(llama, additional_config={"ucm": {"phase_lag": "x"}})


LAYER_ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    ("ALiBi with a sliding window", {"alibi_slopes": [0.5, 0.25], "sliding_window": 64}),
    ("attention type", {"attn_type": "encoder_only"}),
    ("8-bit floats", {"kv_sharing_target_layer_name": "layer.0", "kv_cache_dtype": "fp8"}),
    ("KV cache dtype", {"kv_cache_dtype": "fp8_e5m2"}),
    ("new_idea", {"new_idea": 1}),
]


@pytest.mark.parametrize(("feature", "arguments"), LAYER_ARGUMENTS, ids=[case[0] for case in LAYER_ARGUMENTS])
def test_what_only_a_layer_asks_for(feature: str, arguments: dict[str, Any]) -> None:
    """covers: A18"""
    with pytest.raises(UnsupportedFeatureError, match=feature):
        UnifiedAttentionImpl(2, 16, 0.25, **arguments)


def test_a_plain_layer_is_accepted() -> None:
    layer = UnifiedAttentionImpl(4, 16, 0.25, 2, None, None, "auto", None)
    assert (layer.num_heads, layer.num_kv_heads, layer.head_size) == (4, 2, 16)
    assert layer.spec.is_plain


def test_a_layer_with_more_is_accepted() -> None:
    layer = UnifiedAttentionImpl(2, 16, 0.25, None, None, 64, "auto", 30.0, sinks=torch.zeros(2))
    assert str(layer.spec) == "logits_soft_cap=30.0, is_local=True, has_sinks=True"
    assert UnifiedAttentionImpl(2, 16, 0.25, None, [0.5, 0.25], logits_soft_cap=0.0).spec.has_slopes


def test_another_attention_backend_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="FLASH_ATTN"):
        UcmPlatform.get_attn_backend_cls(AttentionBackendEnum.FLASH_ATTN, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_logprob_token_ids": [[1]], "prompt_logprobs": None},
        {"watermarking": True},
    ],
)
def test_request_parameters_that_would_be_ignored(options: dict[str, Any]) -> None:
    """covers: A18"""
    params = SamplingParams()
    for name, value in options.items():
        setattr(params, name, value)
    with pytest.raises(VLLMValidationError, match=next(iter(options))):
        UcmPlatform.validate_request(None, params)
    UcmPlatform.validate_request(None, SamplingParams())


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_transfer_parameters_that_are_no_mapping_are_refused(name: str) -> None:
    params = SamplingParams(extra_args={name: 5})
    with pytest.raises(VLLMValidationError, match=rf"{name}.*found 5, expected a mapping"):
        UcmPlatform.validate_request(None, params)
    UcmPlatform.validate_request(None, SamplingParams(extra_args={name: {"remote_host": "a"}}))
    if name == "kv_transfer_params":
        params = SamplingParams(extra_args={name: {"do_remote_prefill": True}})
        with pytest.raises(VLLMValidationError, match="'remote_block_ids' is missing"):
            UcmPlatform.validate_request(None, params)


@pytest.mark.parametrize("token", [-1, 10**6, 1 << 40, 10**30])
def test_tokens_that_the_model_does_not_have_are_refused(llama: Path, token: int) -> None:
    """Without a tokenizer vLLM takes any number. covers: D5 (user data never raises in the engine)"""
    start(llama)
    with pytest.raises(VLLMValidationError, match=rf"{token} is out of vocabulary: found in the prompt, expected 0 to"):
        UcmPlatform.validate_request({"type": "token", "prompt_token_ids": [5, token]}, SamplingParams())
    UcmPlatform.validate_request({"type": "token", "prompt_token_ids": [5, 0]}, SamplingParams())


def test_our_connector_brings_our_scheduler(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It hears who waits. A scheduler of the user's stays, and a warning says what is missing then."""
    transfer: dict[str, Any] = {
        "kv_connector": "UcmConnector",
        "kv_connector_module_path": "vllm_gaudi_ucm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": {"kind": "memory"}},
    }
    ours = "vllm_gaudi_ucm.scheduler.scheduler.UcmScheduler"
    config = start(llama, kv_transfer_config=KVTransferConfig(**transfer))
    assert config.scheduler_config.scheduler_cls == ours
    child = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [transfer]}}
    config = start(llama, kv_transfer_config=KVTransferConfig(kv_role="kv_both", **child))
    assert config.scheduler_config.scheduler_cls == ours
    assert start(llama).scheduler_config.scheduler_cls is None
    theirs = "vllm.v1.core.sched.scheduler.Scheduler"
    config = start(llama, kv_transfer_config=KVTransferConfig(**transfer), scheduler_cls=theirs)
    assert config.scheduler_config.scheduler_cls == theirs
    assert "nothing is prefetched for requests that wait" in caplog.text


CHILDREN = {
    "kv_connector_extra_config": {
        "connectors": [
            {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
            {"kv_connector": PairConnector.__name__, "kv_connector_module_path": PairConnector.__module__},
        ]
    }
}
ONE_TABLE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "pipeline stages with ucm.preemption.mode swap or auto, or a KV connector, of a model without layer_types",
        {"preemption": {"mode": "auto"}},
        {"pipeline_parallel_size": 2},
    ),
    (
        "ucm.ucm_sparse_method with pipeline stages",
        {"ucm_sparse_method": "GSA"},
        {"pipeline_parallel_size": 2},
    ),
    (
        "a KV connector that is not UcmConnector or OffloadingConnector",
        {},
        {"kv_transfer_config": KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", **CHILDREN)},
    ),
]


@pytest.mark.parametrize(("feature", "ucm", "options"), ONE_TABLE, ids=[name for name, *_ in ONE_TABLE])
def test_what_knows_one_block_table_switches_the_hybrid_manager_off(
    llama: Path, feature: str, ucm: dict[str, Any], options: dict[str, Any]
) -> None:
    """And the flag that asks for it is not ignored."""
    additional = {"additional_config": {"ucm": ucm}, **options}
    assert start(llama, **additional).scheduler_config.disable_hybrid_kv_cache_manager is True
    with pytest.raises(UnsupportedFeatureError, match="--no-disable-hybrid-kv-cache-manager") as refused:
        start(llama, disable_hybrid_kv_cache_manager=False, **additional)
    assert f"several KV-cache groups with {feature}" in str(refused.value)


def test_stages_know_the_layers_of_a_model_that_says_them(tmp_path: Path) -> None:
    """Then several groups are kept beside swaps and our connector; vLLM's takes all stages for equal."""
    kinds = ["full_attention"] * 2 + ["sliding_attention"] * 3
    changes = {"num_hidden_layers": 5, "layer_types": kinds}
    model, uneven = tmp_path / "even", tmp_path / "uneven"
    window_config("gpt_oss", architectures=["GptOssForCausalLM"]).save_pretrained(model)
    window_config("gemma3_text", architectures=["Gemma3ForCausalLM"], **changes).save_pretrained(uneven)
    swaps = {"additional_config": {"ucm": {"preemption": {"mode": "swap"}}}}
    ours = {"kv_connector": "UcmConnector", "kv_connector_module_path": "vllm_gaudi_ucm.connector"}
    in_files = {"store": {"kind": "file", "path": str(tmp_path / "blocks")}}
    stored = {"kv_transfer_config": KVTransferConfig(**ours, kv_role="kv_both", kv_connector_extra_config=in_files)}
    for folder, options in ((model, swaps), (uneven, swaps), (uneven, stored), (model, {"kv_offloading_size": 1})):
        found = start(folder, pipeline_parallel_size=2, **options)
        assert found.scheduler_config.disable_hybrid_kv_cache_manager is False
    with pytest.raises(UnsupportedFeatureError, match="OffloadingConnector with stages of 3, 2 layers"):
        start(uneven, pipeline_parallel_size=2, kv_offloading_size=1)


def test_stages_offload_in_a_configuration_without_a_model() -> None:
    """One table is kept where no model says how many layers a stage has."""
    options = {"parallel_config": ParallelConfig(pipeline_parallel_size=2)}
    made = VllmConfig(cache_config=CacheConfig(kv_offloading_size=1), **options)
    assert made.kv_transfer_config is not None
    assert made.kv_transfer_config.kv_connector == "OffloadingConnector"
    assert made.scheduler_config.disable_hybrid_kv_cache_manager is True


def test_the_hybrid_manager_is_on(llama: Path) -> None:
    """Beside what speaks of blocks of each group, too."""
    assert start(llama, pipeline_parallel_size=2).scheduler_config.disable_hybrid_kv_cache_manager is False
    for ucm in (
        {},
        {"scheduler": {"admission": "exact"}},
        {"preemption": {"mode": "swap"}},
        {"kv_cache": {"compaction": True, "partial_hits": True}},
        {"ucm_sparse_method": "GSA"},
    ):
        found = start(llama, additional_config={"ucm": ucm})
        assert found.scheduler_config.disable_hybrid_kv_cache_manager is False
