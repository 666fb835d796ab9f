"""Tiny random models with a layer of multi-token prediction (MTP), and a plain torch computation of its drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32DecoderLayer,
    DeepseekV32RMSNorm,
    DeepseekV32RotaryEmbedding,
)
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm, Glm4MoeRotaryEmbedding
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaDecoderLayer,
    GlmMoeDsaRMSNorm,
    GlmMoeDsaRotaryEmbedding,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextRMSNorm,
    Qwen3NextRotaryEmbedding,
)

from tests.engine.head_models import WIDTH, Pair, with_experts
from tests.engine.hybrids import hybrid_config
from tests.engine.tiny_models import make_config, make_model

CHOSEN = 24
"""Tokens that each row of a model with an indexer chooses."""


class Family(NamedTuple):
    """Says how a checkpoint names the parts of its layer.

    like: the layer of the model that it is like: one with whole contexts, and with experts if there are any. prefix: of
    the layer. embedding_norm, state_norm, norm, join: names of the parts around it. feeds_normed: whether the next pass
    reads the state after the last norm. skips_first: whether the row at position 0 reads no token. changes: of the
    configuration. model: Transformers' class.
    """

    layer: Callable[..., Any]
    rotary: Callable[..., Any]
    norm_of: Callable[..., Any]
    changes: dict[str, Any]
    prefix: str
    embedding_norm: str
    state_norm: str
    join: str
    norm: str
    feeds_normed: bool
    skips_first: bool
    config: Callable[..., Any] = hybrid_config
    like: int = 1
    model: Any = AutoModelForCausalLM


def _qwen(layer: Any, rotary: Any, norm: Any, count: str) -> Family:
    names = ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    return Family(layer, rotary, norm, {count: 1}, *names, feeds_normed=True, skips_first=False)


def _deepseek(
    layer: Any,
    rotary: Any,
    norm: Any,
    *,
    feeds_normed: bool,
    layers: int = 2,
    model: Any = AutoModelForCausalLM,
    **changes: Any,
) -> Family:
    """Describes the layer after the last one of the model, as DeepSeek V3 has it."""
    prefix = f"model.layers.{layers}."
    return Family(
        layer,
        rotary,
        norm,
        {"num_nextn_predict_layers": 1, "num_hidden_layers": layers, **changes},
        prefix,
        *(f"{prefix}{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
        feeds_normed=feeds_normed,
        skips_first=True,
        config=make_config,
        like=layers - 1,
        model=model,
    )


_CHOOSES = {"index_topk": CHOSEN, "index_n_heads": 8}
MTP_FAMILIES = {
    "glm4_moe": _deepseek(Glm4MoeDecoderLayer, Glm4MoeRotaryEmbedding, Glm4MoeRMSNorm, feeds_normed=False),
    "deepseek_v32": _deepseek(
        DeepseekV32DecoderLayer,
        DeepseekV32RotaryEmbedding,
        DeepseekV32RMSNorm,
        feeds_normed=True,
        model=DeepseekV32ForCausalLM,
        **_CHOOSES,
    ),
    # the second layer takes the choices of the first one
    "glm_moe_dsa": _deepseek(
        GlmMoeDsaDecoderLayer,
        GlmMoeDsaRotaryEmbedding,
        GlmMoeDsaRMSNorm,
        feeds_normed=True,
        layers=3,
        indexer_types=["full", "shared", "full"],
        **_CHOOSES,
    ),
    "qwen3_next": _qwen(Qwen3NextDecoderLayer, Qwen3NextRotaryEmbedding, Qwen3NextRMSNorm, "num_nextn_predict_layers"),
    "qwen3_5_text": _qwen(Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding, Qwen3_5RMSNorm, "mtp_num_hidden_layers"),
}

CHOOSING = ("deepseek_v32", "glm_moe_dsa")
"""Families whose rows choose tokens by themselves (DSA)."""


def make_mtp(folder: Path, name: str, **changes: Any) -> Pair:
    """Writes a model of a family with its layer, which Transformers ignores. changes: of the configuration."""
    family = MTP_FAMILIES[name]
    target = make_model(folder / name, family.config(name, **{**family.changes, **changes}), seed=1)
    torch.manual_seed(7)
    path = target / "model.safetensors"
    tensors = load_file(path)
    like = f"model.layers.{family.like}."
    own = {name.replace(like, family.prefix): one for name, one in tensors.items() if name.startswith(like)}
    own = {name: one + 0.1 * torch.randn_like(one) for name, one in own.items()}
    for norm in (family.embedding_norm, family.state_norm, family.norm):
        own[f"{norm}.weight"] = 1 + 0.1 * torch.randn(WIDTH)
    own[f"{family.join}.weight"] = torch.randn(WIDTH, 2 * WIDTH) * 0.2
    if family.skips_first:
        own[f"{family.prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        own[f"{family.prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**tensors, **own}, path, metadata={"format": "pt"})
    return Pair("mtp", target, None)


class PlainMtp:
    """Drafts for a text, computed anew without a cache: a row at position p has the model's state there and the token
    at p + 1."""

    def __init__(self, pair: Pair, name: str, chosen: int = CHOSEN) -> None:
        """chosen: most tokens that a row of the layer chooses, if it has an indexer."""
        self._family = family = MTP_FAMILIES[name]
        self._target: Any = family.model.from_pretrained(pair.target).eval()
        self._tensors = load_file(pair.target / "model.safetensors")
        config = self._config = self._target.config
        self._rotary = family.rotary(config)
        self._layer: Any = family.layer(config, family.like).eval()
        prefix = family.prefix
        own = {name.removeprefix(prefix): one for name, one in self._tensors.items() if name.startswith(prefix)}
        if any(name.startswith("mlp.experts.0.") for name in own):
            own = with_experts(own)
        self._layer.load_state_dict({name: own[name] for name in self._layer.state_dict()})
        if name in CHOOSING:
            self._layer.self_attn.indexer.index_topk = chosen

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> tuple[list[int], torch.Tensor]:
        """Returns the drafts after a text, and the logits of each, float32 [count, vocabulary]."""
        text = torch.tensor(tokens)
        states = self._target.model(text[None, :-1]).last_hidden_state[0]
        embed, logits, drafts = self._target.model.embed_tokens, [], []
        embeddings = embed(text[1:])
        for _ in range(count):
            found = self._forward(embeddings, states)
            normed = self._normed(found, self._family.norm)
            logits.append(self._target.lm_head(normed[-1]))
            drafts.append(int(logits[-1].argmax()))
            embeddings = torch.cat([embeddings, embed(torch.tensor(drafts[-1:]))])
            states = torch.cat([states, (normed if self._family.feeds_normed else found)[-1:]])
        return drafts, torch.stack(logits)

    def _normed(self, states: torch.Tensor, name: str) -> torch.Tensor:
        norm = self._family.norm_of(states.shape[-1], self._config.rms_norm_eps)
        norm.weight.data = self._tensors[f"{name}.weight"]
        found: torch.Tensor = norm(states)
        return found

    def _forward(self, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        family, rows = self._family, len(states)
        if family.skips_first:
            embeddings = torch.where(torch.arange(rows)[:, None] == 0, 0, embeddings)
        both = self._normed(embeddings, family.embedding_norm), self._normed(states, family.state_norm)
        mixed = torch.cat(both, -1) @ self._tensors[f"{family.join}.weight"].T
        positions = torch.arange(rows)[None]
        found = self._layer(
            mixed[None],
            attention_mask=torch.full((rows, rows), float("-inf")).triu(1)[None, None],
            position_ids=positions,
            position_embeddings=self._rotary(mixed[None], positions),
        )
        state: torch.Tensor = (found[0] if isinstance(found, tuple) else found)[0]
        return state
