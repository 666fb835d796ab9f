"""Everything that an engine of the fuzz is started with, drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.draws import Draws
from tests.fuzz.fuzz_models import DraftModel, FuzzModel, draw_model

MAX_LENGTH = 256
# the budget that leaves no block out: with any other, sparse tokens differ from Hugging Face
ALL_BLOCKS = 1.0
# shortest context that is sparse, where a method is to stay idle
NEVER = 4096


@dataclass
class Setting:
    """An engine to start.

    Args:
        model: what it serves.
        options: of `LLM`, over the defaults of `tests.engine.serving.Engine`.
        ucm: the plugin's options.
        contract: `v1`, or `v2`, where vLLM sends resumed requests as new ones.
        workers: processes that share the model.
        gaps: whether time passes between some steps.
        ratio: part of a sparse context that is attended; None without a method.
    """

    model: FuzzModel
    options: dict[str, Any]
    ucm: dict[str, Any]
    contract: str
    workers: int = 1
    gaps: bool = False
    ratio: float | None = None
    words: list[str] = field(default_factory=list)

    @property
    def has_drafts(self) -> bool:
        return "speculative_config" in self.options

    @property
    def max_length(self) -> int:
        """Tokens of the longest request."""
        length: int = self.options["max_model_len"]
        return length

    def __str__(self) -> str:
        """One line: model, then what is not as usual."""
        kind = f"{self.model.family}{' with text' if self.model.speaks else ''}"
        return ", ".join([kind, *self.words])


def draw_setting(draws: Draws, folder: Path) -> Setting:
    """A setting that the plugin may refuse. folder: for a file store of this seed."""
    model = draw_model(draws)
    setting = Setting(model, {}, {}, draws.choose("contract", ("v1", "v2")))
    setting.words += [setting.contract] if setting.contract == "v2" else []
    _draw_sizes(draws, setting)
    _draw_shapes(draws, setting)
    _draw_workers(draws, setting)
    _draw_drafts(draws, setting)
    _draw_method(draws, setting)
    _draw_cache(draws, setting)
    _draw_connector(draws, setting, folder)
    return setting


def _draw_sizes(draws: Draws, setting: Setting) -> None:
    seats = draws.choose("max_num_seqs", (1, 2, 4, 6, 8, 12, 48, 128), (1, 2, 4, 4, 3, 2, 1, 1))
    tokens = draws.choose("max_num_batched_tokens", (16, 24, 48, 64, 100, 256))
    setting.options |= {
        "max_model_len": MAX_LENGTH,
        "block_size": draws.choose("block_size", (4, 8, 16, 32, 64), (1, 2, 4, 2, 1)),
        "max_num_seqs": seats,
        "max_num_batched_tokens": max(seats, tokens),
        "enable_prefix_caching": draws.chance("prefix_caching", 0.75),
        "max_logprobs": 20,
        "skip_tokenizer_init": not setting.model.speaks,
    }
    if setting.model.family == "llama4_text":
        # vLLM switches it on for long contexts alone, Transformers always
        setting.options["override_generation_config"] = {"attn_temperature_tuning": True}
    if setting.model.speaks:
        setting.options["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
    # of several prompts at most one may be longer
    threshold = draws.choose("long_prefill_token_threshold", (0, 5, 8, 20), (6, 1, 1, 1))
    if threshold:
        setting.options["long_prefill_token_threshold"] = threshold
        setting.words.append(f"prompts of more than {threshold} tokens in pieces")
    if draws.chance("priority_policy", 0.2):
        setting.options["scheduling_policy"] = "priority"
        setting.words.append("priorities")


def _draw_shapes(draws: Draws, setting: Setting) -> None:
    """True shapes or buckets, and who computes."""
    if draws.chance("buckets", 0.45):
        warm_up = draws.choose("warm_up", ("idle", "skeleton", "full"), (4, 1, 1))
        most = draws.choose("max_graphs", (4, 8, 15, 40)) if warm_up != "full" else draws.choose("graphs", (4, 8, 12))
        skeleton = draws.choose("skeleton", (1, 2, 3))
        setting.ucm["graphs"] = {"mode": "eager", "max_graphs": most, "warm_up": warm_up, "skeleton": skeleton}
        setting.gaps = warm_up == "idle"
        setting.words.append(f"{most} graphs, warm-up {warm_up}")
    setting.ucm["cpu"] = {
        "threads": 1,
        "native_graphs": draws.chance("native_graphs", 0.7),
        "packed_weights": draws.chance("packed_weights", 0.7),
        "compact_weights": draws.chance("compact_weights", 0.7),
    }
    setting.ucm["attention"] = {
        "implementation": _draw_implementation(draws, setting),
        "contiguous_pa": draws.choose("contiguous_pa", ("auto", True, False), (4, 1, 1)),
        "causal_slice": draws.choose("causal_slice", (512, 16, 64)),
    }
    ahead = draws.chance("async_scheduling", 0.4)
    setting.ucm["scheduler"] = {"async_scheduling": ahead}
    setting.words += ["asynchronous"] if ahead else []


def _draw_implementation(draws: Draws, setting: Setting) -> str:
    """Kernels of attention; those that read shapes on the host exclude buckets."""
    if "graphs" in setting.ucm:
        return draws.choose("bucket_attention", ("auto", "reference", "hpu"), (6, 1, 1))
    return draws.choose("attention", ("auto", "reference", "cpu", "native", "hpu"), (6, 1, 1, 1, 1))


def _draw_workers(draws: Draws, setting: Setting) -> None:
    shared = draws.choose("workers", ("one", "tensor-parallel", "stages"), (17, 2, 2))
    if shared == "one":
        return
    setting.workers = 2
    flag = "tensor_parallel_size" if shared == "tensor-parallel" else "pipeline_parallel_size"
    setting.options |= {flag: 2, "distributed_executor_backend": "mp"}
    setting.ucm["distributed"] = {"check_ranks": draws.chance("check_ranks", 0.5)}
    setting.words.append(shared)


def _draw_drafts(draws: Draws, setting: Setting) -> None:
    kind = draws.choose("drafts", ("none", "ngram", "same-model", "other-model"), (6, 1, 1.5, 1.5))
    if kind == "none":
        return
    drafts: dict[str, Any] = {"num_speculative_tokens": draws.number("num_drafts", 1, 4)}
    if kind == "ngram":
        drafts |= {"method": "ngram", "prompt_lookup_max": draws.number("lookup", 2, 3), "prompt_lookup_min": 1}
    elif kind == "same-model":
        drafts |= {"method": "draft_model", "model": str(setting.model.folder())}
    else:
        drafts |= {"method": "draft_model", "model": str(DraftModel(setting.model.vocabulary).folder())}
        drafts |= {"max_model_len": 64} if draws.chance("short_drafts", 0.3) else {}
    setting.options["speculative_config"] = drafts
    setting.words.append(f"{drafts['num_speculative_tokens']} drafts ({kind})")


def _draw_method(draws: Draws, setting: Setting) -> None:
    """A sparse method, and memory mode, which needs one."""
    method = draws.choose("sparse_method", ("none", "GSA", "ESA", "KVStar"), (6, 1.5, 1, 1.5))
    if method == "none":
        return
    setting.ratio = draws.choose("sparse_ratio", (ALL_BLOCKS, 0.3, 0.1), (3, 2, 1))
    options: dict[str, Any] = {
        "sparse_steps": draws.choose("sparse_steps", ("always", "auto"), (4, 1)),
        "min_tokens": draws.choose("sparse_min_tokens", (32, 64, NEVER), (4, 2, 1)),
        "local_window_sz": draws.number("local_window", 1, 2),
        "init_window_sz": draws.number("init_window", 0, 1),
        "min_blocks": draws.number("min_blocks", 1, 3),
        "sparse_ratio": setting.ratio,
        "summary": draws.choose("summary", ("mean", "minmax", "box_mean", "hash", "codes")),
    }
    if method == "GSA":
        options |= {
            "reuse_steps": draws.number("reuse_steps", 1, 4),
            "reuse_layers": draws.number("reuse_layers", 1, 2),
        }
    elif method == "KVStar":
        options |= {"checkpoint_interval": draws.number("checkpoint", 2, 5), "lock_duration": 9}
    setting.ucm |= {"ucm_sparse_method": method, "ucm_sparse_config": {method: options}}
    setting.words.append(f"{method} of {setting.ratio:.0%}")
    if draws.chance("memory_mode", 0.25 if setting.ratio < ALL_BLOCKS else 0.1):
        setting.ucm["memory_mode"] = {
            "enabled": True,
            "on_device_ratio": max(setting.ratio, draws.choose("on_device_ratio", (0.4, 0.6))),
            "refresh_steps": draws.number("refresh_steps", 2, 4),
            "max_missed": 1.0,
        }
        setting.words.append("memory mode")


def _draw_cache(draws: Draws, setting: Setting) -> None:
    """How large the KV cache is, and who gets what of it."""
    blocks = -(-MAX_LENGTH // setting.options["block_size"]) * setting.model.groups
    tight = draws.chance("tight_cache", 0.45)
    spare = draws.number("spare_blocks", 2, 12)
    if draws.chance("by_token", 0.1):
        slots = MAX_LENGTH + draws.number("spare_slots", 130, 300) if tight else None
        setting.ucm["kv_cache"] = {"granularity": "token", "max_total_token_num": slots}
        setting.words.append("a slot for each token")
    else:
        if tight:
            setting.options["num_gpu_blocks_override"] = 1 + blocks + spare
        _draw_block_rules(draws, setting)
    setting.words += ["tight"] if tight else []
    admission = draws.choose("admission", ("greedy", "exact"), (4, 2))
    setting.ucm["scheduler"]["admission"] = admission
    setting.words += [f"{admission} admission"] if admission != "greedy" else []


def _draw_block_rules(draws: Draws, setting: Setting) -> None:
    if "memory_mode" in setting.ucm:
        return
    partial, compaction = draws.chance("partial_hits", 0.25), draws.chance("compaction", 0.25)
    preemption = draws.choose("preemption", ("recompute", "swap", "auto"), (4, 1, 1))
    if partial and setting.options["enable_prefix_caching"]:
        setting.ucm.setdefault("kv_cache", {})["partial_hits"] = True
        setting.words.append("partial hits")
    if compaction:
        setting.ucm.setdefault("kv_cache", {})["compaction"] = True
        setting.words.append("compaction")
    if preemption != "recompute":
        memory = draws.choose("host_memory", (4 << 20, 1 << 17))
        setting.ucm["preemption"] = {"mode": preemption, "host_memory": memory}
        setting.words.append(preemption)


def _draw_connector(draws: Draws, setting: Setting, folder: Path) -> None:
    kind = draws.choose("store", ("none", "memory", "file", "offloading"), (8, 1.5, 1, 1))
    if kind == "none":
        return
    # with what the plugin refuses most draws would be refused
    rules = setting.ucm.get("kv_cache", {})
    if "preemption" in setting.ucm or "compaction" in rules or "granularity" in rules:
        return
    if kind == "offloading":
        setting.options |= {"kv_offloading_size": 0.01, "kv_offloading_backend": "native"}
    else:
        store: dict[str, Any] = {"kind": "memory", "capacity": draws.choose("capacity", (64 << 20, 1 << 20))}
        if kind == "file":
            store = {"kind": "file", "path": str(folder / "blocks"), "fsync": False, "deadline": 10.0}
        setting.options["kv_transfer_config"] = {
            "kv_connector": "UcmConnector",
            "kv_connector_module_path": "vllm_gaudi_ucm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": store, "save_patience": 0},
        }
    setting.words.append(f"store {kind}")
