"""A sparse method of your own: options, scores and name in one file.

    make model                                   # the demo model, once
    python examples/own_sparse_method.py

A method that selects blocks inherits budgets, summaries, windows and reuse from `BlockSparse`, and adds its own scores.
The engine's process imports this script again, which registers the method there, too. An installed package names its
methods in the entry point group `vllm_gaudi_ucm.sparse_methods` instead.
"""

import argparse
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from vllm import LLM, SamplingParams

from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.options import BlockOptions, MethodOptions
from vllm_gaudi_ucm.sparse.registry import SPARSE_METHODS

MODEL = ".cache/models/smollm2-135m-instruct"


class StrideOptions(BlockOptions):
    """The options of every method that selects blocks, and one more."""

    stride: Annotated[int, Field(ge=1)] = Field(default=2, description="Prefers one of this many consecutive blocks.")


class Stride(BlockSparse):
    """Prefers every n-th block of a context, and among those the newest. It ignores the query."""

    Options: ClassVar[type[MethodOptions]] = StrideOptions
    options: StrideOptions

    def block_scores(self, layer_idx: int, query: torch.Tensor, candidates: Any) -> torch.Tensor:
        """Runs inside captured graphs: static shapes, no read from the host, no `if` on a tensor."""
        block = candidates.places % candidates.width  # number of each candidate in its request
        preferred = (block % self.options.stride == 0).float()
        return preferred + block / candidates.width


SPARSE_METHODS.register("Stride", Stride)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Decodes with a sparse method of this file.")
    parser.add_argument("--model", default=MODEL, help="folder of a model (default: the demo model)")
    section: dict[str, Any] = {
        "stride": 3,
        "sparse_ratio": 0.3,
        "min_tokens": 128,
        "min_blocks": 2,
        "local_window_sz": 1,
    }
    # in a context as short as this one a choice costs more time than it saves
    section["sparse_steps"] = "always"
    llm = LLM(
        parser.parse_args().model,
        dtype="float32",
        block_size=16,
        max_model_len=1024,
        max_num_seqs=4,
        kv_cache_memory_bytes=256 << 20,
        additional_config={"ucm": {"ucm_sparse_method": "Stride", "ucm_sparse_config": {"Stride": section}}},
    )
    prompt = "Sea, wind and sand are all that there is to see here. " * 40 + "Once upon a time"
    for sparse in (True, False):
        sampling = SamplingParams(temperature=0, max_tokens=12, extra_args={"ucm_sparse": sparse})
        print("sparse" if sparse else "dense ", repr(llm.generate(prompt, sampling)[0].outputs[0].text))
