"""Every metric that the plugin exports: name, kind, labels and help text."""

from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """One metric. A counter's samples are named `name + "_total"`; `engine` comes before `labels`."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    help: str

    @property
    def sample_name(self) -> str:
        """The name that a query uses."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


STEPS = Metric("gaudi_ucm_steps", "counter", ("phase",), "Steps, by the parts of attention that they had.")
TRUE_SIZE = Metric("gaudi_ucm_true_size", "counter", ("dimension",), "Sizes of steps before padding, summed.")
PADDED_SIZE = Metric("gaudi_ucm_padded_size", "counter", ("dimension",), "Sizes that steps ran at, summed.")
BUCKET_STEPS = Metric("gaudi_ucm_bucket_steps", "counter", ("graph", "bucket"), "Steps by the graphs of their bucket.")
STEP_SECONDS = Metric("gaudi_ucm_step_seconds", "counter", ("stage",), "Host seconds of the stages of steps.")
RECIPES = Metric("gaudi_ucm_recipes_after_warm_up", "counter", (), "Recipes compiled after warm-up.")
BYPASSES = Metric("gaudi_ucm_bypasses", "counter", ("reason",), "Executions that no captured graph served.")
HOST_READS = Metric(
    "gaudi_ucm_host_reads", "counter", ("reason",), "Reads of the device that steps with static shapes waited for."
)
HOST_STAGES = Metric("gaudi_ucm_host_stages", "counter", ("stage",), "Stages of steps that ran on the host.")
NATIVE_GRAPHS = Metric(
    "gaudi_ucm_native_graph_forwards", "counter", ("way",), "Forward passes on a CPU: replayed, captured, or ordinary."
)
WARM_UP_BUCKETS = Metric("gaudi_ucm_warm_up_buckets", "gauge", ("state",), "Graphs of the warm-up: warm, and all.")
WARM_UP_SECONDS = Metric("gaudi_ucm_warm_up_seconds", "gauge", (), "Seconds that the warm-up has taken.")
SKELETON_SECONDS = Metric(
    "gaudi_ucm_warm_up_skeleton_seconds", "gauge", (), "Seconds until the skeleton was warm and serving could start."
)
WAITS = Metric("gaudi_ucm_warm_up_waits", "counter", (), "Steps that waited for a graph that was being warmed.")
WAIT_SECONDS = Metric("gaudi_ucm_warm_up_wait_seconds", "counter", (), "Seconds that steps waited for such graphs.")
SELECTIONS = Metric(
    "gaudi_ucm_sparse_selections", "counter", ("mode",), "Sparse requests of steps, by how their blocks were chosen."
)
SPARSE_BLOCKS = Metric(
    "gaudi_ucm_sparse_blocks", "counter", ("state",), "Blocks of sparse requests: of their contexts, and attended."
)
SPARSE_FALLBACKS = Metric(
    "gaudi_ucm_sparse_fallbacks", "counter", (), "Requests that were dense in a step for want of room for their choice."
)
SPARSE_DENSE_STEPS = Metric(
    "gaudi_ucm_sparse_dense_steps",
    "counter",
    (),
    "Steps that were dense because choices would have cost more time than they save.",
)
CHECKPOINTS = Metric(
    "gaudi_ucm_sparse_checkpoints", "counter", ("result",), "Checks of stored choices, by layer and request."
)
ATTENTION_MASS = Metric(
    "gaudi_ucm_sparse_attention_mass",
    "counter",
    ("state",),
    "Estimated attention of the blocks that competed in the last layer that chooses, and of those chosen among them.",
)
LOCKS = Metric("gaudi_ucm_sparse_locks", "counter", ("event",), "Choices that KVStar locked, and that it unlocked.")
CHOSEN_STEPS = Metric(
    "gaudi_ucm_chosen_token_steps", "counter", (), "Steps that chose the tokens that each row attends to (DSA)."
)
CHOSEN_ROWS = Metric(
    "gaudi_ucm_chosen_token_rows", "counter", (), "Rows of these steps that saw more tokens than they attended to."
)
STORE_EVENTS = Metric(
    "gaudi_ucm_store_events", "counter", ("store", "event"), "Blocks and calls of a KV store, by what became of them."
)
STORE_BYTES = Metric("gaudi_ucm_store_bytes", "counter", ("store", "direction"), "Bytes loaded from and saved to it.")
STORE_SECONDS = Metric(
    "gaudi_ucm_store_seconds", "counter", ("store", "direction"), "Seconds of these loads and saves, of all threads."
)
STORE_HELD = Metric("gaudi_ucm_store_held_bytes", "gauge", ("store",), "Bytes of blocks that a KV store holds.")
STORE_BREAKER = Metric(
    "gaudi_ucm_store_breaker", "gauge", ("store",), "Circuit breaker of a KV store: 0 closed, 1 half open, 2 open."
)
PREFETCHES = Metric("gaudi_ucm_prefetches", "counter", ("use", "outcome"), "Prefetches and loads, by how they ended.")
PREFETCH_BLOCKS = Metric(
    "gaudi_ucm_prefetch_blocks",
    "counter",
    ("use", "result"),
    "Blocks of prefetches, by where they came from.",
)
PREFETCH_QUEUE = Metric(
    "gaudi_ucm_prefetch_queue_blocks", "gauge", ("use", "priority"), "Blocks that wait for a thread, by priority."
)
PREFETCH_CACHE = Metric("gaudi_ucm_prefetch_cache_bytes", "gauge", ("use",), "Host memory of the prefetch engine.")
PREFETCH_SHED = Metric("gaudi_ucm_prefetch_shed", "counter", ("use",), "Prefetches beyond max_pending_prefetch.")
PREFETCH_WAITS = Metric("gaudi_ucm_prefetch_waits", "counter", ("use", "result"), "Waits for a prefetch, by their end.")
PREFETCH_WAIT_SECONDS = Metric("gaudi_ucm_prefetch_wait_seconds", "counter", ("use",), "Seconds of these waits.")
PREFETCH_THREADS = Metric(
    "gaudi_ucm_prefetch_threads_replaced", "counter", ("use",), "Threads of the prefetch engine that died."
)
KV_BLOCKS = Metric(
    "gaudi_ucm_kv_blocks", "counter", ("event",), "Blocks of requests, by what the connector did about them."
)
KV_LOOKUPS = Metric("gaudi_ucm_kv_lookups", "counter", ("result",), "Requests that the store was asked about.")
MEMORY_MODE_BLOCKS = Metric(
    "gaudi_ucm_memory_mode_blocks", "counter", ("event",), "Blocks that memory mode copied, released and brought back."
)
MEMORY_MODE_OFFLOADED = Metric(
    "gaudi_ucm_memory_mode_offloaded", "gauge", (), "Blocks of requests that are not on the device."
)
MEMORY_MODE_AWAY = Metric(
    "gaudi_ucm_memory_mode_away", "gauge", (), "Earlier name of gaudi_ucm_memory_mode_offloaded, for one release."
)
MEMORY_MODE_SCORINGS = Metric(
    "gaudi_ucm_memory_mode_scorings",
    "counter",
    ("share",),
    "Requests scored, and the share of their attention that was estimated to fall on offloaded blocks, summed.",
)
MEMORY_MODE_KEPT = Metric(
    "gaudi_ucm_memory_mode_kept", "counter", (), "Requests that got every block back, because too much was missed."
)
MEMORY_MODE_REPEATED = Metric(
    "gaudi_ucm_memory_mode_repeated",
    "counter",
    (),
    "First steps that were computed again, because blocks that a load had left in the store were wanted.",
)
MEMORY_EVENTS = Metric(
    "gaudi_ucm_memory_events",
    "counter",
    ("event",),
    "What the scheduler has done about blocks of the KV cache: copies, tokens that copies saved, waits, swaps, moves.",
)
MEMORY_RATES = Metric(
    "gaudi_ucm_memory_rates",
    "gauge",
    ("rate",),
    "Measured for ucm.preemption: prompt tokens per second, and bytes per second to host memory and back.",
)
MEMORY_DENSITY = Metric(
    "gaudi_ucm_kv_cache_density",
    "gauge",
    (),
    "Blocks in use / (highest block id in use + 1), with compaction.",
)

METRICS = tuple(one for one in list(globals().values()) if isinstance(one, Metric))

EARLIER = (MEMORY_MODE_AWAY,)
"""Earlier names that are still exported, for one release."""
