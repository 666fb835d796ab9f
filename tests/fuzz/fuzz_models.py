"""Tiny models of every family that the fuzz serves, made once and kept."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.engine.tiny_models import FAMILIES, LATENT, MIXTURES, VOCAB, make_config, make_model
from tests.engine.window_models import MODELS, window_config
from tests.fuzz.draws import Draws
from tests.text_model import TOKENS, make_text_model

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / ".cache/models/smollm2-135m-instruct"
FOLDER = ROOT / ".cache/fuzz"
# families with windows or chunks, and how many KV-cache groups each has
GROUPS = {"gemma2": 2, "gemma3_text": 3, "gpt_oss": 2, "llama4_text": 4}
_PLAIN = [name for name in FAMILIES if name not in MIXTURES | LATENT]
# each row of these chooses tokens by itself; vLLM's classes need positions of at least that number
_CHOOSING = {"deepseek_v32", "glm_moe_dsa"}


@dataclass(frozen=True)
class FuzzModel:
    """A tiny model.

    Args:
        family: model type of its configuration.
        speaks: whether it has the demo model's tokenizer, cut.
        seed: of its weights.
    """

    family: str
    speaks: bool
    seed: int = 0

    @property
    def vocabulary(self) -> int:
        return TOKENS if self.speaks else VOCAB

    @property
    def groups(self) -> int:
        """KV-cache groups."""
        return GROUPS.get(self.family, 1)

    def folder(self, parent: Path = FOLDER) -> Path:
        """The model's folder, written unless it is there."""
        return made(parent / f"{self.family}-{'text' if self.speaks else 'ids'}-{self.seed}", self._write)

    def _write(self, folder: Path) -> None:
        if self.speaks:
            make_text_model(DEMO, folder, self.family)
        elif self.family in MODELS or self.family in GROUPS:
            make_model(folder, window_config(self.family), seed=self.seed)
        else:
            make_model(folder, make_config(self.family), seed=self.seed)


@dataclass(frozen=True)
class DraftModel:
    """A smaller model that drafts for another one: its drafts are often wrong."""

    vocabulary: int

    def folder(self, parent: Path = FOLDER) -> Path:
        return made(parent / f"draft-{self.vocabulary}", self._write)

    def _write(self, folder: Path) -> None:
        sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_key_value_heads": 1, "vocab_size": self.vocabulary}
        make_model(folder, make_config("llama", **sizes), seed=3)


def made(folder: Path, write: object) -> Path:
    """`folder`, written by `write` unless it is complete; several processes may ask at once."""
    if (folder / "config.json").exists():
        return folder
    assert callable(write)
    part = folder.with_name(f".{folder.name}.{os.getpid()}")
    part.parent.mkdir(parents=True, exist_ok=True)
    write(part)
    try:
        part.rename(folder)
    except OSError:
        # another process was first
        shutil.rmtree(part)
    return folder


def draw_model(draws: Draws) -> FuzzModel:
    """A third speaks; others are of any family, plain ones more often."""
    if draws.chance("text", 0.35):
        return FuzzModel(draws.choose("text_family", ("llama", "qwen3", "mixtral"), (3, 1, 1)), speaks=True)
    kinds = {
        "plain": _PLAIN,
        "experts": sorted(MIXTURES),
        "latent": sorted(LATENT - _CHOOSING),
        "windows": sorted(GROUPS),
    }
    kind = draws.choose("model_kind", tuple(kinds), (5, 1.5, 1.5, 2))
    return FuzzModel(draws.choose(f"{kind}_family", kinds[kind]), speaks=False, seed=draws.number("weights", 0, 1))
