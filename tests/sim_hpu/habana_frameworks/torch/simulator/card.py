"""State of the simulated card: figures a test may set, and counts of what was called."""

import os
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version

GIB = 1 << 30
BUILD = "SIM_HPU_BUILD"
"""Environment variable: the build of Gaudi's software that is simulated, unlike the one of the distribution here."""


def _build() -> str:
    return os.environ.get(BUILD) or version("habana-torch-plugin")


@dataclass
class Card:
    """The one simulated card. Figures are those of a Gaudi 3 until a test sets others.

    Figures, in bytes unless they say otherwise:
        device_type: the generation. build: of Gaudi's software, four numbers.
        free_bytes: the limit of the memory pool: what all tensors, captured graphs and workspaces may take together.
        total_bytes: what the card's properties call its memory.
        bytes_per_capture: what a captured graph takes of the free memory, for as long as it exists, beside its tensors.
        workspace_bytes: what a recipe takes when it first runs, for each of its operators but the first.
        recipe_bytes: what one recipe takes in the recipe cache on disk.
        compilation_us, operator_us: microseconds that a compilation is said to take, and each operator in it. These put
            a single operator and a model of 32 layers at the 0.2 and 14 s that are reported of Gaudi.
        host_read_us: microseconds that a read by the host really waits.
        accepts_float16: whether tensors of 16-bit floats may be there.
        masked_rows_are_zero: what fused attention returns for a row that sees no key: zeros, or NaN. Nobody knows.
        stream_seed: decides which work of side streams runs late.
    Counts:
        captures, replays: of `wrap_in_hpu_graph`. bypasses: calls that neither captured nor replayed.
        compilations: recipes compiled. compiled_operators: operators in them.
        recipes: digest and microseconds of each that was compiled.
        cache_hits: recipes found in the cache on disk. launches: recipes run outside of captured graphs.
        compiled_graphs: calls of the `hpu_backend` compiler.
        mark_steps, synchronizations: calls. host_reads: reads of the card's memory that made the host wait.
        executed: operators that ran on the card.
        graph_compiles, pipeline_drains: calls of a compiled cluster that found its slot empty or of other sizes.
        eager_fallbacks: nodes of regions that ran eagerly. fallbacks: operators that the CPU ran in its place.
        copied_bytes: of whole targets that writes in regions copied.
        late_copies, late_works: copies from the host and to it, works of side streams, that did not run at once.
    """

    device_type: str = "synDeviceGaudi3"
    build: str = field(default_factory=_build)
    device_count: int = 1
    free_bytes: int = 120 * GIB
    total_bytes: int = 128 * GIB
    bytes_per_capture: int = 0
    workspace_bytes: int = 1 << 16
    recipe_bytes: int = 1 << 20
    compilation_us: int = 200_000
    operator_us: int = 7_000
    host_read_us: int = 0
    accepts_float16: bool = True
    masked_rows_are_zero: bool = False
    stream_seed: int = 0
    captures: int = 0
    replays: int = 0
    bypasses: int = 0
    compilations: int = 0
    compiled_operators: int = 0
    cache_hits: int = 0
    launches: int = 0
    compiled_graphs: int = 0
    mark_steps: int = 0
    synchronizations: int = 0
    host_reads: int = 0
    executed: int = 0
    graph_compiles: int = 0
    pipeline_drains: int = 0
    eager_fallbacks: int = 0
    copied_bytes: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    late_copies: int = 0
    late_works: int = 0
    recipes: list[tuple[str, int]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    def reset(self) -> None:
        """Back to the figures and counts at import. Recipes that are compiled stay compiled."""
        self.__init__()  # type: ignore[misc]

    def compiling_us(self) -> int:
        """Microseconds that all compilations are said to have taken."""
        return self.compilations * self.compilation_us + self.compiled_operators * self.operator_us

    def is_gaudi3(self) -> bool:
        return self.device_type == "synDeviceGaudi3"

    def has_build(self, oldest: str) -> bool:
        """Whether the software is at least as new as this build."""
        return _numbers(self.build) >= _numbers(oldest)


def _numbers(build: str) -> tuple[int, ...]:
    return tuple(map(int, build.split(".")))


card = Card()
