"""Runs a model on one device: the model, and the objects that compute its steps once it has a KV cache."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from vllm_gaudi_ucm.attention.latent_block import register_latent_attention
from vllm_gaudi_ucm.execution.decoder import Decoder, DecoderModel
from vllm_gaudi_ucm.graphs.runners.compiled import HPU_BACKEND, StaticCompiler
from vllm_gaudi_ucm.graphs.warm_up.extremes import largest_of_phases
from vllm_gaudi_ucm.kv_cache.allocation import NO_CACHE, bind_kv_caches, give_back_memory, kv_cache_specs
from vllm_gaudi_ucm.kv_cache.tile import tile_size
from vllm_gaudi_ucm.layers.experts import prepare_model_experts
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.multimodal.item_encoder import item_encoder_of
from vllm_gaudi_ucm.observability.start_stages import StartStages
from vllm_gaudi_ucm.ops.registry import has_folders
from vllm_gaudi_ucm.runner.kv_groups import leave_groups, refuse_windows_in_one_table, refuse_with_windows
from vllm_gaudi_ucm.runner.loaded_model import LoadedModel
from vllm_gaudi_ucm.runner.model_pooler import ModelPooler
from vllm_gaudi_ucm.runner.other_groups import refuse_with_states
from vllm_gaudi_ucm.sampling.sampling import SamplingBatch
from vllm_gaudi_ucm.speculation.draft_model import load_draft_model
from vllm_gaudi_ucm.start.graph_measurement import GIB, graph_memory_need, run_largest_step
from vllm_gaudi_ucm.start.kernel_compilation import compile_kernels
from vllm_gaudi_ucm.start.served_layers import refuse_other_layers
from vllm_gaudi_ucm.start.setup import KeptParts, WorkerParts, make_parts
from vllm_gaudi_ucm.start.target_model import load_target_model
from vllm_gaudi_ucm.state_layers.register import register_state_layers
from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheConfig, KVCacheSpec, in_blocks_of, in_tiles
from vllm_gaudi_ucm.vllm_api.loading import Weights, weights_of
from vllm_gaudi_ucm.vllm_api.platforms import is_pooling, keeps_states

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.decisions.graph_kind import GraphKind
    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.distributed.lockstep import Lockstep
    from vllm_gaudi_ucm.distributed.ranks import Ranks
    from vllm_gaudi_ucm.distributed.stage import Stage
    from vllm_gaudi_ucm.lora.adapter_manager import AdapterManager
    from vllm_gaudi_ucm.observability.phase_log import PhaseLog
    from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
    from vllm_gaudi_ucm.observability.step_profiler import StepProfiler
    from vllm_gaudi_ucm.runner.kv_transfer import KvTransfer
    from vllm_gaudi_ucm.runner.static_shapes import StaticShapes

logger = plugin_logger(__name__)


class ModelRunner:
    """A decoder model on one device, from loading to the objects that compute its steps (`parts`).

    Args:
        kind: the kind of graphs; `off` runs steps at their true shapes.
        stage: the layers of this worker; None: all.
        lockstep: engines that share out the model's experts; None: this one has them.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: UcmConfig,
        device: Device,
        kind: GraphKind,
        ranks: Ranks,
        stage: Stage | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        self._lockstep = lockstep
        self._vllm_config = vllm_config
        self._config = config
        self._device = device
        self.kind = kind
        self._ranks = ranks
        self._stage = stage
        self._tensors_on = device.torch_device()
        # at static shapes, the host computes what depends on a request's parameters
        self._sampling = SamplingBatch(vllm_config, self._tensors_on if self.kind == "off" else torch.device("cpu"))
        self._draft_decoder: Decoder | None = None
        self._adapters: AdapterManager | None = None
        self._parts: WorkerParts | None = None
        self._has_weights = True
        self._resting: RequestTable
        self._made_of: tuple[KVCacheConfig, PhaseLog, StepMetrics, StepProfiler | None]
        given = config.graphs.memory_budget
        self._memory_budget = None if given is None else int(given * GIB)
        self._tile: int | None = None
        self.decoder: Decoder
        self.pooler: ModelPooler | None = None
        self._compiler: StaticCompiler | None = None
        self.start_stages = StartStages()
        self._has_measured = False

    def load_model(self, weights: Weights | None = None) -> None:
        """Loads the model and the draft model. weights: the model's, instead of its checkpoint's."""
        refuse_other_layers(self._vllm_config)
        register_latent_attention()
        if keeps_states(self._vllm_config):
            register_state_layers()
        models = [load_target_model(self._vllm_config, weights, self._device, static=self.kind != "off")]
        draft_model = load_draft_model(self._vllm_config, models[0], self._tensors_on)
        if draft_model is not None:
            models.append(draft_model)
        on_cpu = self._device.kind == "cpu" and has_folders("cpu")
        if on_cpu:
            from vllm_gaudi_ucm.ops.cpu.native import matrix_unit

            matrix_unit.use(self._config.cpu.matrix_unit)
        packed = on_cpu and self._config.cpu.packed_weights and self.kind != "compile"
        compact, captured = self._config.cpu.compact_weights, self._captures_experts
        for model in models:
            prepare_model_experts(
                model,
                captured=captured,
                packed=packed and not captured,
                compact=compact,
                keep=self._config.quantised_experts,
            )
        if packed:
            from vllm_gaudi_ucm.layers.cpu.packed_weights import pack_linear_layers

            for model in models:
                layers = pack_linear_layers(model, compact)
                logger.info("Packed %d linear layers, %d of them also in fewer bits", *layers)
        if self._vllm_config.lora_config is not None:
            # behind all that replaces layers' weights
            from vllm_gaudi_ucm.lora.adapter_manager import AdapterManager

            self._adapters = AdapterManager(
                self._vllm_config, models[0], self._tensors_on, captured=self.kind != "off", agree=self._ranks.all_of
            )
        routes = None if self._adapters is None else self._adapters.routes
        self.decoder, *draft = (
            Decoder(cast(DecoderModel, model), self._vllm_config, self._stage, self._lockstep, of_model)
            for model, of_model in zip(models, (routes, None), strict=False)
        )
        self._draft_decoder = draft[0] if draft else None
        if is_pooling(self._vllm_config):
            on_host = self._device.kind == "hpu"
            self.pooler = ModelPooler(models[0], torch.device("cpu") if on_host else self._tensors_on)
        refuse_with_windows(self.decoder, self._draft_decoder, self._config, self._vllm_config)
        refuse_with_states(self._config, self._vllm_config)
        if on_cpu:
            from vllm_gaudi_ucm.ops.cpu.host_memory import keep_all_freed_memory

            keep_all_freed_memory()
        if self.kind == "compile":
            self._compiler = StaticCompiler(HPU_BACKEND if self._device.kind == "hpu" else self._config.graphs.backend)
            for decoder in (self.decoder, *draft):
                decoder.compile(self._compiler)
        self.decoder.connect(self._tensors_on)

    @property
    def adapters(self) -> AdapterManager | None:
        """Loads adapters (LoRA); None if they are switched off, and before the model is loaded."""
        return self._adapters

    @property
    def _captures_experts(self) -> bool:
        """Padded steps of a CPU run in Python, and may group rows by expert, unless their operators are recorded."""
        runs_python = self._device.kind == "cpu" and self.kind == "eager"
        return self.kind != "off" and not (runs_python and self._config.graphs.recipe_check == "off")

    @property
    def parts(self) -> WorkerParts:
        """The objects that compute steps.

        Raises RuntimeError before `initialize_kv_cache` has made them.
        """
        if self._parts is None:
            raise RuntimeError("the KV cache of this worker was not initialised yet")
        return self._parts

    @property
    def static(self) -> StaticShapes | None:
        """The static shapes; None at true shapes, and before the KV cache exists."""
        return None if self._parts is None else self._parts.static

    @property
    def transfer(self) -> KvTransfer | None:
        """The transfers; None without a KV connector, and before the KV cache exists."""
        return None if self._parts is None else self._parts.transfer

    @property
    def draft_model(self) -> nn.Module | None:
        return None if self._draft_decoder is None else cast(nn.Module, self._draft_decoder.model)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Returns what each layer caches for a block as vLLM's scheduler allocates it."""
        specs = kv_cache_specs(
            self._vllm_config,
            choosing=self._config.ucm_sparse_method is not None,
            with_draft_model=self._draft_decoder is not None,
        )
        if self._config.memory_mode.enabled:
            refuse_windows_in_one_table(specs, self._vllm_config)
        if self._config.kv_cache.granularity == "block":
            return specs
        if self._tile is None:
            # known only from now on: the engine takes its own block size from the result
            self._tile = tile_size(self._vllm_config.cache_config.block_size)
        return in_blocks_of(specs, 1)

    def as_allocated(self, kv_cache_config: KVCacheConfig) -> KVCacheConfig:
        """The cache in blocks as attention reads them, of which a slot for each token is a part."""
        return kv_cache_config if self._tile is None else in_tiles(kv_cache_config, self._tile)

    def bytes_beside_slots(self) -> int:
        """The most bytes of the KV cache that are not slots: the dummy block, and the rest of the last block."""
        per_slot = sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values())
        return 0 if self._tile is None else 2 * self._tile * per_slot

    @torch.inference_mode()
    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        phase_log: PhaseLog,
        metrics: StepMetrics,
        profiler: StepProfiler | None = None,
    ) -> None:
        """Makes the objects that compute steps, now that the number of blocks is final; see `make_parts`.

        kv_cache_config: the allocated blocks. profiler: None unless the engine can be profiled.
        """
        self._made_of = kv_cache_config, phase_log, metrics, profiler
        self._parts = make_parts(self._loaded(profiler), self._sampling, kv_cache_config, phase_log, metrics)

    def _loaded(self, profiler: StepProfiler | None) -> LoadedModel:
        return LoadedModel(
            vllm_config=self._vllm_config,
            config=self._config,
            device=self._device,
            tensors_on=self._tensors_on,
            kind=self.kind,
            decoder=self.decoder,
            draft_decoder=self._draft_decoder,
            memory_budget=self._memory_budget,
            compiler=self._compiler,
            ranks=self._ranks,
            pooler=self.pooler,
            adapters=self._adapters,
            profiler=profiler,
        )

    def reload_weights(self, path: str | None, weights: Weights | None) -> None:
        """Replaces the model by one with other weights. Requests and KV cache stay as they are.

        The model before serves until the new one is loaded, so there must be memory for both; after an exception it
        goes on.

        path: another checkpoint of this model; None: the same checkpoint as before. weights: instead of a checkpoint's.
        """
        if self._parts is None:
            # asleep: `wake_up` makes the rest
            with self._other_model(path, weights):
                self._has_weights = True
            return
        before = self.settle("reload_weights")
        kv_cache_config, phase_log, metrics, profiler = self._made_of
        with self._other_model(path, weights), torch.inference_mode():
            model, kept = self._loaded(profiler), KeptParts(before.requests, before.kv_caches)
            self._parts = make_parts(model, self._sampling, kv_cache_config, phase_log, metrics, kept)
        before.close()
        del before, kept
        gc.collect()
        if self.static is not None:
            self.static.warm_up()

    @contextmanager
    def _other_model(self, path: str | None, weights: Weights | None) -> Iterator[None]:
        """Loads the model with other weights; after an exception the model before is back."""
        compilation = self._vllm_config.compilation_config
        before = {
            name: getattr(self, name) for name in ("decoder", "_draft_decoder", "_compiler") if hasattr(self, name)
        }
        context = compilation.static_forward_context
        with weights_of(self._vllm_config, path):
            try:
                self.load_model(weights)
                yield
            except BaseException:
                compilation.static_forward_context = context
                for name, value in before.items():
                    setattr(self, name, value)
                raise

    def settle(self, call: str) -> WorkerParts:
        """Returns the objects that compute steps, once the tokens of all steps are known. call: named in errors."""
        parts = self.parts
        if parts.steps.is_between_stages:
            raise RuntimeError(f"{call} while a step is computed, but not sampled; call it once more")
        if parts.ahead is not None:
            parts.ahead.settle()
        return parts

    def sleep(self, drops_weights: bool) -> None:
        """Gives back the KV cache and graphs, and the weights if asked. Steps must be settled, and nothing else may
        hold their objects.
        """
        parts = self.parts
        parts.close()
        self._parts, self._resting = None, parts.requests
        leave_groups(self._vllm_config)
        if drops_weights:
            self._vllm_config.compilation_config.static_forward_context = {}
            self._compiler = self._draft_decoder = None
            del self.decoder
            self._has_weights = False
        else:
            bind_kv_caches(self._vllm_config, dict.fromkeys(parts.kv_caches, NO_CACHE))
        del parts
        give_back_memory(self._device)

    def wake_up(self) -> None:
        """Makes KV cache and graphs anew, and reads the checkpoint if there are no weights."""
        if not self._has_weights:
            self.load_model()
            self._has_weights = True
        kv_cache_config, phase_log, metrics, profiler = self._made_of
        with torch.inference_mode():
            model, kept = self._loaded(profiler), KeptParts(self._resting)
            self._parts = make_parts(model, self._sampling, kv_cache_config, phase_log, metrics, kept)
        if self.static is not None:
            self.static.warm_up()

    def forget_embeddings(self) -> None:
        """Forgets the embeddings of all pictures. A worker without weights has none."""
        if self._has_weights and self.decoder.embeddings is not None:
            self.decoder.embeddings.clear()

    def warm_up(self) -> float:
        """Warms the graphs that must be warm before serving; returns the seconds it took."""
        static, seconds, pictures = self.static, 0.0, item_encoder_of(self.decoder.model)
        if static is not None and pictures is not None:
            with self.start_stages.measured("encoder of pictures"):
                pictures.warm_up()
        if static is not None:
            if not self._has_measured and static.execution.compiles_kernels:
                # with `--kv-cache-memory-bytes`
                with self.start_stages.measured("kernels"):
                    self._compile_kernels(static)
            with self.start_stages.measured("graphs"):
                seconds = static.warm_up()
        logger.info("Start of the worker: %s", self.start_stages.line())
        return seconds

    @torch.inference_mode()
    def _compile_kernels(self, static: StaticShapes) -> None:
        """Compiles its graphs' kernels in parallel, unless the measurement of their memory has already done so."""
        buckets = static.execution.ready.buckets
        ranks = self._ranks if self._lockstep is None else self._lockstep.workers
        compile_kernels(static.executions, largest_of_phases(buckets.limits), lambda: buckets.forward, ranks)

    def close(self) -> None:
        """Ends all background work; safe before there is any."""
        if self._parts is not None:
            self._parts.close()

    def measure_steps(self) -> int:
        """Measures the bytes that steps take in addition to the KV cache, after the largest have actually run."""
        # buckets that do not fit are dropped, so one budget must hold on every rank
        ranks = self._ranks if self._lockstep is None else self._lockstep.workers
        self._has_measured = True
        free = self._device.memory().free
        pictures = item_encoder_of(self.decoder.model)
        if pictures is not None:
            pictures.warm_up()
            self._device.synchronize()
        if self.kind != "off":
            for_pictures = free - self._device.memory().free
            need = graph_memory_need(
                self.decoder,
                self._vllm_config,
                self._config,
                self._device,
                kind=self.kind,
                draft_model=self._draft_decoder,
                compiler=self._compiler,
                tile=self._tile,
                agreement=ranks,
            )
            if need.kernels.found:
                self.start_stages.add("kernels", need.kernels.seconds)
            self._memory_budget = ranks.least(need.budget)
            return for_pictures + need.budget + need.buffers
        for decoder in filter(None, (self.decoder, self._draft_decoder)):
            run_largest_step(decoder, self._vllm_config, self._tensors_on, self.pooler)
        self._device.synchronize()
        return free - self._device.memory().free
