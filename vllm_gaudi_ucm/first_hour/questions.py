"""What cannot be known without a card. Probes name these numbers; docs/gaudi.md has the same table."""

QUESTIONS = {
    1: "Host microseconds per decode step in compile mode, and what guards cost after skip_guard_eval_unsafe",
    2: "Whether what was read of the bridge at 1.19 (one recipe slot, offsets as keys, m in bf16) still holds",
    3: "When an aliased index_copy_ is dropped, and whether stacked caches trigger it",
    4: "Which integer torch.where is compiled wrongly",
    5: "The meaning of -1 and of indices out of range in gather and scatter kernels",
    6: "Whether the maximum that the fused kernel returns is the one used inside it",
    7: "Compile seconds as a function of nodes and of shapes; whether buckets compile in parallel",
    8: "Peak memory of compilation, workspace per recipe, and whether recipes share it",
    9: "Whether permuted weight layouts change after the first use and recompile other graphs",
    10: "Whether a compiled exponential_ draws fresh numbers",
    11: "Real overlap of copies and compute; the cost of unpinned copies to the device",
    12: "Whether Unified Attention beats split prompt and decode batches",
    13: "Behaviour of every torch.accelerator call that vLLM makes outside of the GPU worker",
    14: "How a Gaudi 2 behaves with Gaudi software 1.24.1",
    15: "Several hosts, and collectives of ranks that miss a bucket: hang, error or timeout",
}
