"""The vLLM platform: names the device, the worker and the attention backend, and refuses what is not supported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.platforms import Platform, PlatformEnum

from vllm_gaudi_ucm.config.exclusions import POLICIES, TOKEN_SLOTS
from vllm_gaudi_ucm.config.ucm_config import UcmConfig, resolve_config
from vllm_gaudi_ucm.connector.transfer_config import complete_transfer_config, is_ours_among
from vllm_gaudi_ucm.decisions.bucket_choice import step_memory
from vllm_gaudi_ucm.decisions.graph_kind import graph_kind
from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.device.cpu import host_memory
from vllm_gaudi_ucm.device.detect import detect_device
from vllm_gaudi_ucm.device.host_limits import Cgroup, find_cores
from vllm_gaudi_ucm.device.shared_machine import choose_waiting
from vllm_gaudi_ucm.envs import (
    announce_local_engines,
    ask_for_v1_messages,
    copy_to_ray_engines,
    kernel_choice,
    lazy_mode,
    merge_into_vllm,
    needed_to_import,
    spawn_workers,
)
from vllm_gaudi_ucm.graphs.shapes.limits import most_ranges, strip_size
from vllm_gaudi_ucm.kv_cache.tile import tile_size
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.ops.kv_cache.api import swap_blocks
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.platform.asynchronous import schedules_ahead
from vllm_gaudi_ucm.platform.checks import (
    RequestLimits,
    check_places,
    check_prompt,
    check_prompt_embeddings,
    check_request,
    warn_of_slow_dtype,
)
from vllm_gaudi_ucm.platform.combinations import (
    keeps_one_block_table,
    refuse_device_ids,
    refuse_older_ray_executor,
    refuse_other_profiler,
    refuse_with_latents,
    refuse_with_memory_mode,
    refuse_with_ranks,
    refuse_with_shared_experts,
)
from vllm_gaudi_ucm.platform.features import refuse_unsupported
from vllm_gaudi_ucm.platform.pool_memory import PoolMemory
from vllm_gaudi_ucm.platform.quantised_weights import take_measured_cache
from vllm_gaudi_ucm.platform.sizes import Host, check_host_sizes
from vllm_gaudi_ucm.platform.state_features import choose_kept_states
from vllm_gaudi_ucm.scheduler.scheduler_class import need_our_scheduler, use_planning_scheduler, warms_by_order
from vllm_gaudi_ucm.vllm_api.cache_options import keep_tile_of_slots, register_float_kv_dtypes
from vllm_gaudi_ucm.vllm_api.child_watch import watch_children
from vllm_gaudi_ucm.vllm_api.engine_process import (
    OF_SERVER,
    abort_at_shutdown,
    end_start_at_sigterm,
    give_engine_time_to_stop,
    is_engine_process,
    is_worker_process,
    leave_engines_heap_to_the_system,
    wake_at_sigterm,
    watch_parent,
)
from vllm_gaudi_ucm.vllm_api.log_lines import announce_engine
from vllm_gaudi_ucm.vllm_api.platforms import (
    client_error,
    reads_pictures,
    take_back_attention_backend,
    tolerate_missing_accelerator,
)
from vllm_gaudi_ucm.vllm_api.server_end import end_server_truly
from vllm_gaudi_ucm.vllm_api.versions import check_versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.vllm_api.attention import AttentionBackendEnum, AttentionSelectorConfig

logger = plugin_logger(__name__)

_DEVICE = get_device(detect_device() or "cpu")


class UcmPlatform(PoolMemory, Platform):
    """Gaudi, or the reference device in its place."""

    _enum = PlatformEnum.OOT
    device_name = _DEVICE.kind
    device_type = _DEVICE.kind
    dispatch_key = {"cpu": "CPU", "cuda": "CUDA", "hpu": "HPU"}[_DEVICE.kind]
    dist_backend = _DEVICE.dist_backend
    device_control_env_var = {"cpu": "", "cuda": "CUDA_VISIBLE_DEVICES", "hpu": "HABANA_VISIBLE_MODULES"}[_DEVICE.kind]
    # a CPU has no accelerator ids in Ray: nodes are started with --num-gpus, which says how many workers each takes
    ray_device_key = {"cpu": "GPU", "cuda": "GPU", "hpu": "HPU"}[_DEVICE.kind]
    # a worker on CUDA looks up its device; one on Gaudi has it from HABANA_VISIBLE_MODULES, which Ray sets
    ray_noset_device_env_vars = ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] if _DEVICE.kind == "cuda" else []
    # vLLM compiles a few standalone functions (ranks of logprobs) with this: compiling them on a request's path would
    # make the first such request wait, and on Gaudi the backend is looked up before the bridge has registered it
    simple_compile_backend = "eager"
    _limits = RequestLimits()
    """Sizes of the models that this process has configured; a request comes without a configuration."""

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        merge_into_vllm()
        register_float_kv_dtypes()
        if parser is None:
            # an engine's configuration comes next; a parser of arguments needs none of it
            from vllm_gaudi_ucm.layers.quantised.configs import register_quantisation

            register_quantisation()
            # read by that configuration
            ask_for_v1_messages()

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuses unsupported options, and sets those that this plugin decides."""
        from vllm.config import CompilationMode, CUDAGraphMode

        merge_into_vllm()
        kernel_choice()  # a wrong one is refused here, before a worker's thread needs kernels
        config = resolve_config(vllm_config.additional_config)
        check_versions(config.allow_untested_vllm)
        take_measured_cache(vllm_config)
        cls._refuse_unsupported(vllm_config, config)
        # graphs that the device lacks or an option excludes: a worker would say so in its log alone
        cls._has_static_shapes(vllm_config, config)
        if vllm_config.model_config is not None:
            cls._limits = RequestLimits.of(vllm_config.model_config, cls._limits)
        give_engine_time_to_stop(vllm_config)
        if is_engine_process():
            # if a worker has a process of its own, its variables are not the engine's
            abort_at_shutdown(vllm_config)
            leave_engines_heap_to_the_system()
            wake_at_sigterm()
        else:
            # an engine of several is configured as the only one
            announce_local_engines(vllm_config.parallel_config.data_parallel_size_local)
            refuse_device_ids(vllm_config, cls.device_type)
            # before the handler of SIGTERM changes by which it knows a server
            end_server_truly()
            if cls.device_type == "cpu":
                choose_waiting()
        end_start_at_sigterm(OF_SERVER)
        # in a forked engine whose worker has a process of its own, no other code of ours runs
        watch_parent()
        watch_children()
        cls._start_processes_anew()
        # a user's process makes these calls when it cleans up, as a worker does
        tolerate_missing_accelerator(cls.device_type)
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_gaudi_ucm.platform.worker.UcmWorker"
        if take_back_attention_backend(vllm_config):
            logger.info("Heads differ in size: the plugin's attention backend replaces vLLM's choice, TRITON_ATTN.")
        ahead = vllm_config.scheduler_config.async_scheduling = schedules_ahead(vllm_config, config, cls.device_type)
        choose_kept_states(vllm_config, config.kv_cache.kept_states)
        if reads_pictures(vllm_config):
            # rows of a picture may see each other, so that one step computes all of them
            vllm_config.scheduler_config.disable_chunked_mm_input |= vllm_config.model_config.is_mm_prefix_lm
            from vllm_gaudi_ucm.vllm_api.media import check_media

            check_media()
        if keeps_one_block_table(vllm_config, config):
            vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = True
        refuse_with_ranks(vllm_config, config)
        refuse_other_profiler(vllm_config, cls.device_type)
        refuse_with_shared_experts(vllm_config, config)
        refuse_with_latents(vllm_config, config)
        if vllm_config.parallel_config.use_ray:
            refuse_older_ray_executor(vllm_config)
            cls._prepare_ray_workers(vllm_config)
        complete_transfer_config(vllm_config)
        # vLLM makes a connector of the second option after this call
        offloads = vllm_config.cache_config.kv_offloading_size is not None
        if ahead and (offloads or vllm_config.kv_transfer_config is not None):
            need_our_scheduler(vllm_config, "a KV connector with asynchronous scheduling")
        if is_ours_among(vllm_config.kv_transfer_config):
            use_planning_scheduler(vllm_config)
        if warms_by_order(vllm_config, config):
            need_our_scheduler(vllm_config, "ucm.graphs.warm_up 'idle' with several workers")
        needs = {"ucm.ucm_sparse_method": config.ucm_sparse_method, "--enable-lora": vllm_config.lora_config}
        needs["a model that reads pictures"] = "pictures" if reads_pictures(vllm_config) else None
        for option in (name for name, value in needs.items() if value is not None):
            need_our_scheduler(vllm_config, option)
        for policy in POLICIES:
            # vLLM's own scheduler gives slots at true shapes
            if policy is not TOKEN_SLOTS and policy.is_on(config):
                need_our_scheduler(vllm_config, policy.key)
        if TOKEN_SLOTS.is_on(config) and cls._has_static_shapes(vllm_config, config):
            need_our_scheduler(vllm_config, f"{TOKEN_SLOTS.words} at static shapes")
            keep_tile_of_slots(vllm_config, cls._tile(vllm_config))
        if config.memory_mode.enabled:
            refuse_with_memory_mode(vllm_config, config.memory_mode)
        if not is_engine_process():
            check_places(config, vllm_config.kv_transfer_config)
            if not vllm_config.parallel_config.use_ray:  # whose workers may be on other machines
                host = Host(find_cores().machine, host_memory(Cgroup()).total)
                check_host_sizes(config, vllm_config.kv_transfer_config, host)
        compilation = vllm_config.compilation_config
        if compilation.mode != CompilationMode.NONE:
            logger.info("torch.compile and CUDA graphs are off, whatever --compilation-config says.")
        compilation.mode, compilation.cudagraph_mode = CompilationMode.NONE, CUDAGraphMode.NONE
        compilation.cudagraph_capture_sizes = []
        warn_of_slow_dtype(vllm_config, cls.device_type)
        cls._bound_step_memory(vllm_config, config)
        if not is_engine_process() and not is_worker_process():
            announce_engine()

    @classmethod
    def _refuse_unsupported(cls, vllm_config: VllmConfig, config: UcmConfig) -> None:
        """Sets the slots of `ucm.kv_cache.max_total_token_num`, too: vLLM keeps one block more, its null block."""
        cache, slots = vllm_config.cache_config, config.kv_cache.max_total_token_num
        if slots is not None and cache.num_gpu_blocks_override == slots + 1:
            # set here: vLLM makes copies of its configuration, each of which comes here
            cache.num_gpu_blocks_override = None
        refuse_unsupported(vllm_config, config)
        if slots is not None:
            cache.num_gpu_blocks_override = slots + 1

    @classmethod
    def _has_static_shapes(cls, vllm_config: VllmConfig, config: UcmConfig) -> bool:
        eager = vllm_config.model_config is not None and vllm_config.model_config.enforce_eager
        return graph_kind(config, cls.device_type, lazy_mode(), eager) != "off"

    @staticmethod
    def _tile(vllm_config: VllmConfig) -> int:
        """Returns the slots that attention reads as a block. vLLM asks our backend later, when it makes workers."""
        cache = vllm_config.cache_config
        return tile_size(cache.block_size if cache.user_specified_block_size else None)

    @classmethod
    def _bound_step_memory(cls, vllm_config: VllmConfig, config: UcmConfig) -> None:
        """Lowers the tokens of a step to what fits `ucm.graphs.step_memory`."""
        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        memory = None if model is None else step_memory(vllm_config, config, cls.device_type)
        if memory is None:
            return
        asked, longest = scheduler.max_num_batched_tokens, model.max_model_len
        if config.kv_cache.granularity == "token":
            tile = cls._tile(vllm_config)
            longest = tile * most_ranges(longest, strip_size(tile))
        rows = memory.rows(asked, scheduler.max_num_seqs, longest)
        if not scheduler.enable_chunked_prefill:
            # the longest prompt is one piece
            rows = max(rows, min(asked, model.max_model_len))
        if rows < asked:
            logger.warning(
                "Steps have at most %d tokens, not the %d of --max-num-batched-tokens: attention takes %.2f GiB for "
                "these and %.2f for those, over %d tokens (--max-model-len), and ucm.graphs.step_memory is %g GiB.",
                rows,
                asked,
                memory.gib_of(rows, longest),
                memory.gib_of(asked, longest),
                longest,
                memory.gib,
            )
            scheduler.max_num_batched_tokens = rows
            if scheduler.max_num_scheduled_tokens is not None:
                # vLLM has copied the one into the other already, if there are drafts
                scheduler.max_num_scheduled_tokens = min(rows, scheduler.max_num_scheduled_tokens)

    @classmethod
    def _prepare_ray_workers(cls, vllm_config: VllmConfig) -> None:
        """Prepares workers on Ray, which get the engine's environment only after they have imported this plugin."""
        copy_to_ray_engines()
        parallel = vllm_config.parallel_config
        runtime = dict(parallel.ray_runtime_env or {})
        runtime["env_vars"] = {**needed_to_import(), **runtime.get("env_vars", {})}
        # Ray takes a dict, too, and may be missing here
        parallel.ray_runtime_env = cast(Any, runtime)

    @classmethod
    def _start_processes_anew(cls) -> None:
        """A fork of a process that has computed with several threads hangs in its first parallel region.

        It waits for OpenMP's threads, which are not forked. A fork after Gaudi's bridge was loaded always hangs.
        """
        is_spawned = spawn_workers(even_if_asked_to_fork=cls.device_type == "hpu")
        # the engine, which comes here as well, has started already
        if not is_spawned and not is_engine_process():
            logger.warning(
                "VLLM_WORKER_MULTIPROC_METHOD asks for fork: the engine will not start if this process has computed "
                "with torch before; unset the variable, or set it to spawn."
            )

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        asked = selected_backend.name if selected_backend is not None else "CUSTOM"
        if asked != "CUSTOM":
            raise UnsupportedFeatureError(f"the attention backend {asked}", "--attention-backend")
        if attn_selector_config.use_sparse:
            raise UnsupportedFeatureError("model-defined sparse attention", "an attention layer of the model")
        if attn_selector_config.attn_type == "encoder_only":
            return "vllm_gaudi_ucm.attention.encoder.EncoderAttentionBackend"
        if attn_selector_config.use_mla:
            return "vllm_gaudi_ucm.attention.latent.LatentAttentionBackend"
        return "vllm_gaudi_ucm.attention.backend.UnifiedAttentionBackend"

    @classmethod
    def _align_hybrid_block_size(cls, vllm_config: VllmConfig, backend_cls: Any) -> None:
        """Leaves blocks as they are: vLLM would make them as large as states, which are tensors of their own here."""

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuses a request with a parameter that would be ignored, or with tokens that the model does not have; its
        client gets the message, others go on.

        processed_inputs: the prompt. params: `SamplingParams` or `PoolingParams`.
        """
        try:
            check_request(params, cls._limits.columns)
            check_prompt(processed_inputs, cls._limits.vocab_size)
            check_prompt_embeddings(processed_inputs, params, cls._limits.embedding_width)
        except ValueError as error:
            raise client_error(str(error)) from error

    @classmethod
    def import_kernels(cls) -> None:
        """Does nothing: vLLM is built without kernels of its own here, and ours are imported where they are used."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "Gaudi" if cls.device_type == "hpu" else _DEVICE.name()

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        # vLLM asks for both while it builds its configuration, in a process that must not start a Gaudi card: the
        # worker would not get it, and the recipe cache would be set too late. With 0 vLLM takes 2,048 tokens and 256
        # requests a step for a server (8,192 tokens offline), as vllm-gaudi has them; from 70 GiB on it would take
        # what suits an H100, four times as much, and the largest buckets with it.
        return 0 if cls.device_type == "hpu" else _DEVICE.memory().total

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        free, total = _DEVICE.memory()
        return float(total - free)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """One device per worker: nothing to choose."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        _DEVICE.seed_all(seed)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        kind = "Cuda" if cls.device_type == "cuda" else "Lazy" if cls.device_type == "hpu" and lazy_mode() else ""
        return f"vllm_gaudi_ucm.distributed.communicator.{kind}Communicator"

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        # on Gaudi pinned memory needs the card started in this process, and copies are staged by the bridge anyway
        return cls.device_type == "cuda"

    @classmethod
    @torch.inference_mode()
    def insert_blocks_to_device(
        cls,
        src_cache: torch.Tensor,
        dst_cache: torch.Tensor,
        src_block_indices: torch.Tensor,
        dst_block_indices: torch.Tensor,
    ) -> None:
        """Copies blocks between host and device, for connectors with a buffer on the host."""
        pairs = torch.stack([src_block_indices.cpu(), dst_block_indices.cpu()], 1)
        swap_blocks([src_cache], [dst_cache], pairs)

    swap_out_blocks_to_host = insert_blocks_to_device

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "vllm_gaudi_ucm.lora.layer_adapters.LayerAdapters"

    @classmethod
    def can_update_inplace(cls) -> bool:
        return False  # layers with adapters take what a call returns, which may be a new tensor

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedFeatureError(f"dtype {dtype}", "--dtype")
