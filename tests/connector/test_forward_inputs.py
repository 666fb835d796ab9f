"""What the KV depends on is in the keys, each thing alone; what it does not depend on is not."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config import CacheConfig, KVTransferConfig, LoadConfig, ModelConfig, SpeculativeConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from tests.connector.setup import make_setup
from tests.platform.features import save_config, start
from vllm_gaudi_ucm.connector.forward_inputs import LOAD_FIELDS, MODEL_FIELDS
from vllm_gaudi_ucm.connector.setup import ConnectorSetup
from vllm_gaudi_ucm.options.errors import UcmConfigError

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 256,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "target")


def make_folder(folder: Path, weight: float = 1.0, **config: Any) -> Path:
    """A configuration, and weights that no engine loads."""
    save_config(folder, "LlamaForCausalLM", "llama", **config)
    save_file({"w": torch.full((64, 64), weight)}, folder / "model.safetensors")
    return folder


def key(model: Path, kind: str = "memory", **options: Any) -> bytes:
    """Namespace of dense requests of an engine that is started so."""
    transfer = KVTransferConfig(
        kv_connector="UcmConnector",
        kv_connector_module_path="vllm_gaudi_ucm.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"store": {"kind": kind}},
    )
    options = {"dtype": "float32", "max_model_len": 256, **options}
    config = start(model, kv_transfer_config=transfer, **options)
    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size, num_kv_heads=2, head_size=16, dtype=config.model_config.dtype
    )
    group = KVCacheGroupSpec(["0", "1"], spec)
    setup = ConnectorSetup.from_config(
        config, KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[group])
    )
    return setup.namespace(sparse=False)


def overrides(**values: Any) -> dict[str, Any]:
    return {"hf_overrides": values}


INPUTS: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "bfloat16"},
    "block size": {"block_size": 32},
    "revision": {"revision": "v2"},
    "revision of the code": {"code_revision": "v2"},
    "configuration": overrides(rms_norm_eps=1e-3),
    "rope base": overrides(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "rope scaling": overrides(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    "rope type": overrides(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
    "implementation": {"model_impl": "vllm"},
    "class of the model": {"model_class_overrides": {"Other": "package.module:Other"}},
    "load format": {"load_format": "dummy"},
    "files": {"load_format": "pt"},
    "which files": {"ignore_patterns": ["*.bin"]},
    "loader": {"load_format": "sharded_state", "model_loader_extra_config": {"pattern": "x"}},
}


@pytest.mark.parametrize("name", INPUTS)
def test_each_input_of_the_forward_changes_the_key(model: Path, name: str) -> None:
    """covers: D1 F4"""
    options = INPUTS[name]
    assert key(model, **options) != key(model)
    if "model_loader_extra_config" in options:
        assert key(model, **options) != key(model, load_format=options["load_format"])


OTHERS: dict[str, dict[str, Any]] = {
    "name": {"served_model_name": "other"},
    "tokenizer": {"tokenizer_mode": "slow", "tokenizer_revision": "v2"},
    "length": {"max_model_len": 128},
    "batch": {"max_num_seqs": 3, "max_num_batched_tokens": 512},
    "seed": {"seed": 5},
    "eager": {"enforce_eager": True},
    "logprobs": {"max_logprobs": 5, "logprobs_mode": "raw_logits"},
    "generation": {"generation_config": "vllm"},
    "cache": {"num_gpu_blocks_override": 7, "gpu_memory_utilization": 0.3},
    "hash": {"enable_prefix_caching": True, "prefix_caching_hash_algo": "sha256_cbor"},
    "n-grams": {"speculative_config": NGRAM},
    "place of downloads": {"download_dir": "/tmp"},
    "loading": {"safetensors_load_strategy": "eager", "use_tqdm_on_load": False},
    "speed of loading": {"model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 2}},
    "code that is not there": {"trust_remote_code": True},
    # last digits: within one engine they differ from step to step, too
    "kernels": {"additional_config": {"ucm": {"attention": {"implementation": "reference"}}}},
    "matrix unit": {"additional_config": {"ucm": {"cpu": {"matrix_unit": False}}}},
    "graphs": {"additional_config": {"ucm": {"graphs": {"mode": "eager"}}}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_does(model: Path, name: str) -> None:
    """covers: F4"""
    assert key(model, **OTHERS[name]) == key(model)


def test_the_place_does_not_and_the_code_does(model: Path, tmp_path: Path) -> None:
    """covers: D1 F4"""
    copy = Path(shutil.copytree(model, tmp_path / "elsewhere" / "under another name"))
    assert key(copy) == key(model)
    trusted = {key(model, trust_remote_code=True)}
    for content in ("a = 1", "a = 2"):
        (model / "modeling.py").write_text(content)
        trusted.add(key(model, trust_remote_code=True))
    assert len(trusted) == 3
    assert key(copy) == key(model)


def test_dummy_weights_are_those_of_their_seed(model: Path, tmp_path: Path) -> None:
    """covers: F4"""
    digests = [key(model, load_format="dummy", seed=seed) for seed in (0, 1, 0)]
    assert digests[0] == digests[2] != digests[1]
    # no file is read
    assert key(make_folder(tmp_path / "trained", weight=2.0), load_format="dummy") == digests[0]


def test_long_rope_counts_by_the_factors_that_it_takes(model: Path) -> None:
    """covers: F4. Beyond the original length all requests get other factors, within it none does."""
    long = overrides(rope_parameters=LONG_ROPE)
    found = [key(model, max_model_len=length, **long) for length in (128, 256, 257, 512)]
    assert found[0] == found[1] != found[2] == found[3]


def test_a_draft_model_counts_with_its_length(model: Path, tmp_path: Path) -> None:
    """covers: F4. Its KV is stored beside the target's, up to its own length only."""
    draft = make_folder(tmp_path / "draft", weight=3.0)
    other = make_folder(tmp_path / "other", weight=4.0)
    shaped = make_folder(tmp_path / "shaped", weight=3.0, rms_norm_eps=1e-3)

    def drafted(folder: Path, **changes: Any) -> bytes:
        given = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2, **changes}
        return key(model, speculative_config=given)

    base = drafted(draft)
    changed = [
        drafted(other),
        drafted(shaped),
        drafted(draft, max_model_len=128),
        drafted(draft, revision="v2"),
        drafted(draft, draft_load_config={"load_format": "dummy"}),
    ]
    assert len({base, key(model), *changed}) == 2 + len(changed)
    assert drafted(draft, num_speculative_tokens=3) == base


def test_weights_of_a_hub_are_those_in_its_cache(tmp_path: Path) -> None:
    """covers: F4. A branch moves: its name says nothing of what was loaded."""
    hub = tmp_path / "models--somebody--model"
    digests = []
    for commit, weight in (("a" * 40, 1.0), ("b" * 40, 2.0), ("c" * 40, 1.0)):
        make_folder(hub / "snapshots" / commit, weight)
        (hub / "refs").mkdir(exist_ok=True)
        (hub / "refs" / "main").write_text(commit)
        digests.append(named("somebody/model", tmp_path).namespace(sparse=False))
    assert digests[0] == digests[2] != digests[1]
    named("somebody/model", tmp_path, kind="redis").namespace(sparse=False)


def named(model: str, cache: Path, kind: str = "memory", revision: str | None = None, **load: Any) -> ConnectorSetup:
    setup = make_setup(cache / "unused", options={"store": {"kind": kind}})
    setup.vllm_config.model_config.model = model
    setup.vllm_config.model_config.revision = revision
    setup.vllm_config.load_config = LoadConfig(download_dir=str(cache), **load)
    return setup


@pytest.mark.parametrize("load", [{}, {"load_format": "tensorizer"}, {"load_format": "ipc_cache"}])
def test_weights_that_nothing_tells_apart_are_named(model: Path, tmp_path: Path, load: dict[str, str]) -> None:
    """covers: F4. They may be others tomorrow; what this process keeps for itself ends with it."""
    name = str(model) if load else "somebody/model"
    with pytest.raises(UcmConfigError, match=r"--revision: found none.*a name that changes when the weights change"):
        named(name, tmp_path, kind="redis", **load).namespace(sparse=False)
    named(name, tmp_path, **load).namespace(sparse=False)
    digests = {named(name, tmp_path, "redis", revision, **load).namespace(sparse=False) for revision in ("v1", "v2")}
    assert len(digests) == 2


# Where else a field counts, or why it does not: a field of a new vLLM belongs into one of these, or into MODEL_FIELDS
# and LOAD_FIELDS.
IN_ANOTHER_FORM = {
    ModelConfig: "model hf_config hf_text_config hf_config_path hf_overrides config_format max_model_len seed "
    "trust_remote_code disable_sliding_window",
    CacheConfig: "block_size cache_dtype kv_cache_dtype_skip_layers sliding_window",
    LoadConfig: "model_loader_extra_config",
    SpeculativeConfig: "model method max_model_len revision code_revision draft_model_config draft_load_config",
}
REFUSED = {
    ModelConfig: "pooler_config enable_prompt_embeds multimodal_config language_model_only limit_mm_per_prompt "
    "enable_mm_embeds media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type "
    "mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend "
    "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin "
    "interleave_mm_strings skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc "
    "mm_ipc_gpu_memory_gb mm_device_do_normalize mm_processor_device enable_trace_replay return_sampling_mask",
    CacheConfig: "mamba_page_size_padded skip_page_size_padded mamba_block_size mamba_cache_dtype "
    "mamba_ssm_cache_dtype mamba_cache_mode enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm "
    "use_kda_recoverssm swa_bounded_replay is_attention_free",
    LoadConfig: "",
    SpeculativeConfig: "quantization moe_backend attention_backend kv_cache_dtype draft_tensor_parallel_size "
    "tensor_parallel_size index_share_for_mtp_iteration use_heterogeneous_vocab parallel_drafting "
    "disable_padded_drafter_batch rejection_sample_method enable_adaptive_verification draft_sample_method "
    "draft_lm_head_quantization xpress_topc fly_window_size fly_entropy_threshold fly_entropy_top_k",
}
NO_INPUT = {
    # who is served, how tokens are made of text and chosen from logits, how memory is used
    ModelConfig: "runner convert tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init is_submodel_config "
    "allowed_local_media_path allowed_media_domains spec_target_max_model_len allow_deprecated_quantization "
    "word_embeddings_untied_by_checkpoint enforce_eager max_logprobs logprobs_mode use_fp64_gumbel "
    "disable_cascade_attn served_model_name hf_token generation_config override_generation_config enable_sleep_mode "
    "sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend "
    "enable_cumem_allocator logits_processors io_processor_plugin renderer_num_workers",
    CacheConfig: "DEFAULT_BLOCK_SIZE user_specified_block_size kv_cache_layout prefix_match_unit "
    "gpu_memory_utilization num_gpu_blocks_override enable_prefix_caching prefix_caching_hash_algo "
    "prefix_cache_retention_interval num_gpu_blocks num_cpu_blocks effective_attention_block_size "
    "kv_cache_size_tokens kv_cache_max_concurrency hash_block_size cache_hit_alignment_tokens "
    "kv_sharing_fast_prefill kv_cache_memory_bytes kv_offloading_size kv_offloading_backend "
    "simple_cpu_offload_num_blocks _block_size_resolved",
    LoadConfig: "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
    "safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location",
    # how many drafts there are, and which: what is accepted is computed by the target
    SpeculativeConfig: "enforce_eager num_speculative_tokens disable_eagle_block_drop use_local_argmax_reduction "
    "prompt_lookup_max prompt_lookup_min target_model_config target_parallel_config "
    "num_speculative_tokens_per_batch_size draft_parallel_config suffix_decoding_max_tree_depth "
    "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob "
    "disable_lookahead_block_hashes synthetic_acceptance_rates synthetic_acceptance_length dspark_draft_topk",
}


@pytest.mark.parametrize("config", IN_ANOTHER_FORM, ids=lambda config: config.__name__)
def test_each_field_of_vllm_was_judged(config: type) -> None:
    """covers: F4. One that a new vLLM brings is an input of the forward, or is none: it says so here."""
    as_it_is = {ModelConfig: MODEL_FIELDS, LoadConfig: LOAD_FIELDS}.get(config, ())
    judged = [*as_it_is, *(name for table in (IN_ANOTHER_FORM, REFUSED, NO_INPUT) for name in table[config].split())]
    fields = {field.name for field in dataclasses.fields(config)}
    assert len(judged) == len(set(judged))
    assert fields - set(judged) == set()


@pytest.mark.parametrize("name", [*MODEL_FIELDS, *LOAD_FIELDS])
def test_each_field_that_counts_as_it_is(tmp_path: Path, name: str) -> None:
    """covers: F4. Those of features that are refused today, too."""
    base, other = make_setup(tmp_path), make_setup(tmp_path)
    target = other.vllm_config.model_config if name in MODEL_FIELDS else other.vllm_config.load_config
    setattr(target, name, SimpleNamespace(changed=name))
    assert base.namespace(sparse=False) != other.namespace(sparse=False)


def test_the_configuration_that_counts_is_the_one_in_use(model: Path) -> None:
    """covers: F4. The file's, as flags have changed it."""
    first, read = key(model), json.loads((model / "config.json").read_text())
    assert key(model, **overrides(rms_norm_eps=0.5)) == key(make_folder(model, rms_norm_eps=0.5)) != first
    (model / "config.json").write_text(json.dumps({**read, "_name_or_path": "x", "transformers_version": "9"}))
    assert key(model) == first
