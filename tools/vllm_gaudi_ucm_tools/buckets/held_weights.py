"""Bytes of weights on a device: quantised experts may keep the codes of their checkpoint, and adapters have slots."""

from __future__ import annotations

from vllm_gaudi_ucm.graphs.cost.experts import ExpertSpec
from vllm_gaudi_ucm.graphs.cost.specs import ModelSpec
from vllm_gaudi_ucm_tools.buckets.expert_codes import CodeSpec
from vllm_gaudi_ucm_tools.op_cost.work import CHIPS

# Devices on which they stay codes, unless `ucm.quantised_experts` says otherwise.
KEEP_CODES = {"h200"}


def held_bytes(model: ModelSpec, codes: CodeSpec | None, device: str, kept: str = "auto") -> int:
    """Returns the bytes of all weights: quantised experts stay codes, or become plain ones.

    Args:
        model: the model, or one device's part of it.
        codes: codes of the checkpoint's experts; None: they are not quantised.
        device: name of its `DeviceSpec`.
        kept: as `ucm.quantised_experts`: `auto`, `codes` or `plain`.

    Raises:
        ValueError: `codes` on a Gaudi, which has no product with these codes.
    """
    experts = model.experts
    found = None if experts is None else _kept_codes(model, experts, codes, device, kept)
    if experts is None or found is None:
        return model.weight_bytes
    reason = found.why_not_on_gaudi(model.hidden, experts.inner) if device in CHIPS else None
    if reason is not None:
        raise ValueError(f"--quantised-experts is 'codes', but on a {device} {reason}; take 'auto' or 'plain'")
    plain = experts.count * model.mlp_matrices * model.hidden * experts.inner * model.dtype_bytes
    coded = expert_bytes(experts, model.hidden, model.mlp_matrices, found)
    return model.weight_bytes - experts.layers * (plain - coded)


def adapter_bytes(model: ModelSpec, slots: int, rank: int) -> int:
    """Returns the bytes of the slots of adapters (LoRA), which are allocated whether they are in use or not.

    Linear layers of attention and MLP, and embeddings, have slots; experts do not.

    Args:
        model: the model, or one device's part of it.
        slots: as `--max-loras`; 0: adapters are switched off.
        rank: as `--max-lora-rank`.

    Raises:
        ValueError: a model with latent attention, whose engine refuses adapters.
    """
    if not slots:
        return 0
    if model.latent is not None:
        raise ValueError(f"--max-loras is {slots}, expected 0: a model with latent attention takes no adapters")
    query, keys, gates = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim, model.mlp_matrices - 1
    attention = 3 * model.hidden + query + keys + query + model.hidden
    mlp = gates * (model.hidden + model.intermediate) + model.intermediate + model.hidden
    dense = model.layers - (0 if model.experts is None else model.experts.layers)
    # whole on every device
    embeddings = 2 * (model.vocab * model.tensor + model.hidden)
    return slots * rank * model.dtype_bytes * (model.layers * attention + dense * mlp + embeddings)


def expert_bytes(experts: ExpertSpec, hidden: int, matrices: int, codes: CodeSpec) -> int:
    """Returns the bytes of the routed experts of a layer, kept as codes. matrices: matrices of each expert."""
    inner, kept = experts.inner, codes.within(experts.inner)
    return experts.count * ((matrices - 1) * kept.bytes(inner, hidden) + kept.bytes(hidden, inner))


def _kept_codes(
    model: ModelSpec, experts: ExpertSpec, codes: CodeSpec | None, device: str, kept: str
) -> CodeSpec | None:
    """Returns the codes that are kept; see `ops.moe.api.are_codes_enough`."""
    if codes is None or kept == "plain":
        return None
    codes = codes.within(experts.inner)
    stay = kept == "codes" or (device in KEEP_CODES and codes.has_kernel(model.hidden, experts.inner))
    return codes if stay else None
