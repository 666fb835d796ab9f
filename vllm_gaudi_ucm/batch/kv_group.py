"""A KV-cache group: layers that read the same blocks, and see equally far back."""

from typing import NamedTuple

from vllm_gaudi_ucm.batch.window import Window
from vllm_gaudi_ucm.graphs.shapes.group_room import most_blocks


class KvGroup(NamedTuple):
    """A group for which a step is planned once. The first group of an engine has full attention if any group has:
    sparse methods, drafts and the sizes of buckets refer to its blocks.

    number: number of vLLM's group whose block ids it reads. With `--disable-hybrid-kv-cache-manager`, layers of several
        windows share one table, and several groups have the same number.
    window: how far back its rows see; None for their whole context.
    chooses_tokens: rows of some layers choose tokens by themselves, so steps know the order of each row's blocks.
    """

    number: int
    block_size: int
    window: Window | None = None
    layers: tuple[str, ...] = ()
    chooses_tokens: bool = False

    @property
    def most_blocks(self) -> int | None:
        """Returns the most cached blocks that the rows of one request see at once; None for all of its context."""
        if self.window is None:
            return None
        return most_blocks(self.window.tokens, self.block_size)
