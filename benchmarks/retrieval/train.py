"""Trains the retrieval model on one CPU core: `python -m benchmarks.retrieval.train`. An interrupted run is resumed."""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.retrieval.batch import Batch, accuracy, answer_logits, make_batch
from benchmarks.retrieval.curriculum import CURRICULUM, EVALUATED, Stage, plan
from benchmarks.retrieval.induction import start_from_induction
from benchmarks.retrieval.model import MAX_POSITIONS, MODEL, new_model

CHECKPOINT = Path(".cache/retrieval/checkpoint.pt")
BETAS = (0.9, 0.98)
SAVE_EVERY = 50


def main() -> None:
    """Train from the last checkpoint, or from the beginning; save the model; print its accuracy at several lengths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=MODEL)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", type=int, default=4, help="sequences of each length that accuracy is measured on")
    args = parser.parse_args()
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    model = train(args.seed, args.checkpoint)
    model.save_pretrained(args.output)
    for task in EVALUATED:
        print(f"{task.length:6} tokens  {100 * accuracy(model, task, args.evaluate, seed=1):6.2f} % of look-ups right")


def train(seed: int, checkpoint: Path, curriculum: tuple[Stage, ...] = CURRICULUM) -> Any:
    """The trained model; `checkpoint` is read if it exists, and written every `SAVE_EVERY` steps and at the end."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = new_model()
    start_from_induction(model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=0.0)
    done, spent = _load(checkpoint, model, optimizer)
    steps = list(plan(curriculum))
    begin = time.perf_counter() - spent
    with tqdm(total=len(steps), initial=done, unit="step") as bar:
        for number in range(done, len(steps)):
            stage, rate = steps[number]
            # Every step has a generator of its own, so that a resumed run sees the same sequences.
            batch = make_batch(stage.task, stage.sequences, np.random.default_rng((seed, number)), MAX_POSITIONS)
            loss, right = train_step(model, optimizer, batch, rate)
            bar.set_postfix(length=stage.task.length, loss=f"{loss:.3f}", right=f"{right:.3f}", refresh=False)
            bar.update()
            if (number + 1) % SAVE_EVERY == 0 or number + 1 == len(steps):
                _save(checkpoint, model, optimizer, number + 1, time.perf_counter() - begin)
    print(f"trained for {time.perf_counter() - begin:.0f} s")
    return model.eval()


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch, rate: float) -> tuple[float, float]:
    """One step; loss and share of right answers before it."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    logits = answer_logits(model, batch)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.answers.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), (logits.argmax(-1) == batch.answers).float().mean().item()


def _load(checkpoint: Path, model: Any, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    """Steps done and seconds spent so far."""
    if not checkpoint.exists():
        return 0, 0.0
    state = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["done"], state["spent"]


def _save(checkpoint: Path, model: Any, optimizer: torch.optim.Optimizer, done: int, spent: float) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done, "spent": spent}
    partial = checkpoint.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(checkpoint)


if __name__ == "__main__":
    main()
