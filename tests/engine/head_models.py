"""Tiny random draft heads (EAGLE, EAGLE-3, MTP), and a plain torch computation of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from tests.engine.tiny_models import VOCAB, make_config, make_model

AUXILIARY = (1, 2, 3)
DRAFT_VOCAB = 96
WIDTH = 64
QUIET = 0.04


class Pair(NamedTuple):
    """A target and a head. method: of `--speculative-config`; head: None if it is in the target's checkpoint."""

    method: str
    target: Path
    head: Path | None

    def speculation(self, num_drafts: int) -> dict[str, Any]:
        model = {} if self.head is None else {"model": str(self.head)}
        return {"method": self.method, "num_speculative_tokens": num_drafts, **model}


def make_pair(folder: Path, method: str, *, quiet: bool = False) -> Pair:
    """Writes a pair. quiet: attention and MLP of the target change little, so that a head of EAGLE is often right."""
    layers = 4 if method == "eagle3" else 2
    family = "deepseek_v3" if method == "mtp" else "llama"
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    if method == "mtp":
        changes["num_nextn_predict_layers"] = 1
    config = make_config(family, **changes)
    target = make_model(folder / "target", config, seed=1)
    if quiet:
        _quieten(target)
    torch.manual_seed(7)
    if method == "mtp":
        _add_mtp(target)
        return Pair(method, target, None)
    tensors = _eagle_tensors(quiet) if method == "eagle" else _eagle3_tensors()
    head = folder / "head"
    head.mkdir()
    save_file(tensors, head / "model.safetensors")
    own = config.to_dict() | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    if method == "eagle3":
        own |= {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": list(AUXILIARY)}
    (head / "config.json").write_text(json.dumps(own, default=str))
    return Pair(method, target, head)


def _quieten(target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(QUIET)
            if "norm" in name:
                weight.fill_(1.0)
    model.save_pretrained(target)


def _block(width_in: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    shapes = {
        "self_attn.q_proj": (64, width_in),
        "self_attn.k_proj": (32, width_in),
        "self_attn.v_proj": (32, width_in),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_proj": (128, 64),
        "mlp.up_proj": (128, 64),
        "mlp.down_proj": (64, 128),
    }
    found = {f"{name}.weight": torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        found[name] *= scale
    return {**found, "post_attention_layernorm.weight": _norm()}


def _norm(width: int = WIDTH) -> torch.Tensor:
    return 1 + 0.1 * torch.randn(width)


def _eagle_tensors(quiet: bool) -> dict[str, torch.Tensor]:
    fc = torch.randn(WIDTH, 2 * WIDTH) * 0.2
    if quiet:
        fc = torch.cat([torch.eye(WIDTH), 0.1 * QUIET * torch.randn(WIDTH, WIDTH)], 1)
    layer = {f"layers.0.{name}": tensor for name, tensor in _block(WIDTH, QUIET if quiet else 1.0).items()}
    return {**layer, "fc.weight": fc}


def _eagle3_tensors() -> dict[str, torch.Tensor]:
    layer = {f"midlayer.{name}": tensor for name, tensor in _block(2 * WIDTH).items()}
    # each draft token is another token of the model
    d2t = torch.randperm(VOCAB - 3)[:DRAFT_VOCAB].sort().values + 3 - torch.arange(DRAFT_VOCAB)
    return {
        **layer,
        "midlayer.input_layernorm.weight": _norm(),
        "midlayer.hidden_norm.weight": _norm(),
        "fc.weight": torch.randn(WIDTH, 3 * WIDTH) * 0.2,
        "norm.weight": _norm(),
        "lm_head.weight": torch.randn(DRAFT_VOCAB, WIDTH) * 0.2,
        "d2t": d2t,
    }


def _add_mtp(target: Path) -> None:
    """Adds the layer of multi-token prediction, which Transformers does not know, to a checkpoint of DeepSeek V3."""
    path = target / "model.safetensors"
    tensors = load_file(path)
    # with experts
    own = {name.replace("layers.1.", "layers.2."): one for name, one in tensors.items() if "layers.1." in name}
    own = {name: one + 0.1 * torch.randn_like(one) for name, one in own.items()}
    prefix = "model.layers.2"
    own |= {f"{prefix}.{name}.weight": _norm() for name in ("enorm", "hnorm", "shared_head.norm")}
    own[f"{prefix}.eh_proj.weight"] = torch.randn(WIDTH, 2 * WIDTH) * 0.2
    own[f"{prefix}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    own[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**tensors, **own}, path, metadata={"format": "pt"})


def with_experts(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Joins the matrices of all experts, as Transformers' layer has them."""
    count = 1 + max(int(name.split(".")[2]) for name in own if name.startswith("mlp.experts."))
    of = {kind: [own[f"mlp.experts.{i}.{kind}_proj.weight"] for i in range(count)] for kind in ("gate", "up", "down")}
    gate_up = [torch.cat(both) for both in zip(of["gate"], of["up"], strict=True)]
    joined = {"mlp.experts.gate_up_proj": torch.stack(gate_up), "mlp.experts.down_proj": torch.stack(of["down"])}
    return {**own, **joined}


class PlainHead:
    """Drafts of a head for a text, computed anew for each text without a cache.

    The target is Transformers' model; a row at position p has its hidden state there and the token at p + 1.
    """

    def __init__(self, pair: Pair) -> None:
        self.method = pair.method
        self.target: Any = AutoModelForCausalLM.from_pretrained(pair.target).eval()
        folder = pair.target if pair.head is None else pair.head
        self.tensors = load_file(folder / "model.safetensors")
        self.config = self.target.config
        self._rotary = (DeepseekV3RotaryEmbedding if self.method == "mtp" else LlamaRotaryEmbedding)(self.config)
        if self.method == "eagle3":
            return
        kind = DeepseekV3DecoderLayer if self.method == "mtp" else LlamaDecoderLayer
        self._layer: Any = kind(self.config, 1).eval()
        prefix = "model.layers.2." if self.method == "mtp" else "layers.0."
        own = {name.removeprefix(prefix): one for name, one in self.tensors.items() if name.startswith(prefix)}
        if self.method == "eagle":
            self._layer.input_layernorm = nn.Identity()
        else:
            own = with_experts(own)
        known = self._layer.state_dict()
        self._layer.load_state_dict({name: own[name] for name in known})

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> tuple[list[int], torch.Tensor]:
        """Returns the drafts after a text, and the logits of each, float32 [count, vocabulary of the head]."""
        text = torch.tensor(tokens)
        found = self.target.model(text[None, :-1], output_hidden_states=True)
        states = found.last_hidden_state[0]
        if self.method == "eagle3":
            several = torch.cat([found.hidden_states[number][0] for number in AUXILIARY], -1)
            states = several @ self._weight("fc").T
        embeddings, logits, drafts = self.target.model.embed_tokens(text[1:]), [], []
        for _ in range(count):
            scored, passed = self._forward(embeddings, states)
            logits.append(scored[-1])
            drafts.append(self._token(scored[-1]))
            embeddings = torch.cat([embeddings, self.target.model.embed_tokens(torch.tensor(drafts[-1:]))])
            states = torch.cat([states, passed[-1:]])
        return drafts, torch.stack(logits)

    def _token(self, logits: torch.Tensor) -> int:
        likeliest = int(logits.argmax())
        return likeliest + int(self.tensors["d2t"][likeliest]) if self.method == "eagle3" else likeliest

    def _weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"]

    def _normed(self, states: torch.Tensor, name: str) -> torch.Tensor:
        norm = LlamaRMSNorm(states.shape[-1], self.config.rms_norm_eps)
        norm.weight.data = self._weight(name)
        return norm(states)

    def _forward(self, embeddings: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logits and the states that the next pass reads, [rows, ...] each."""
        if self.method == "eagle3":
            return self._eagle3(embeddings, states)
        if self.method == "eagle":
            mixed = torch.cat([embeddings, states], -1) @ self._weight("fc").T
        else:
            prefix = "model.layers.2"
            # the first row has no token before it
            embeddings = torch.where(torch.arange(len(embeddings))[:, None] == 0, 0, embeddings)
            both = self._normed(embeddings, f"{prefix}.enorm"), self._normed(states, f"{prefix}.hnorm")
            mixed = torch.cat(both, -1) @ self._weight(f"{prefix}.eh_proj").T
        found = self._decoded(mixed)
        if self.method == "eagle":
            return self.target.lm_head(found), found
        passed = self._normed(found, "model.layers.2.shared_head.norm")
        return self.target.lm_head(passed), passed

    def _decoded(self, states: torch.Tensor) -> torch.Tensor:
        rows = len(states)
        positions = torch.arange(rows)[None]
        mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
        found = self._layer(
            states[None],
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self._rotary(states[None], positions),
        )
        return (found[0] if isinstance(found, tuple) else found)[0]

    def _eagle3(self, embeddings: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, name = len(states), "midlayer"
        own = [self._normed(embeddings, f"{name}.input_layernorm"), self._normed(states, f"{name}.hidden_norm")]
        both = torch.cat(own, -1)
        q, k, v = (
            (both @ self._weight(f"{name}.self_attn.{one}_proj").T).view(1, rows, -1, 16).transpose(1, 2)
            for one in "qkv"
        )
        q, k = apply_rotary_pos_emb(q, k, *self._rotary(both[None], torch.arange(rows)[None]))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended = attended.transpose(1, 2).reshape(rows, WIDTH) @ self._weight(f"{name}.self_attn.o_proj").T
        residual = states + attended
        normed = self._normed(residual, f"{name}.post_attention_layernorm")
        gate, up = (normed @ self._weight(f"{name}.mlp.{one}_proj").T for one in ("gate", "up"))
        passed = residual + (nn.functional.silu(gate) * up) @ self._weight(f"{name}.mlp.down_proj").T
        return self._normed(passed, "norm") @ self._weight("lm_head").T, passed
