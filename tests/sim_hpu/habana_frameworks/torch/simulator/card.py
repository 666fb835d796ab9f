"""State of the simulated card: figures a test may set, and counts of what was called."""

from dataclasses import dataclass, field

from habana_frameworks.torch.simulator.memory import memory

GIB = 1 << 30


@dataclass
class Card:
    """The one simulated card. Figures are those of a Gaudi 3 until a test sets others.

    Figures, in bytes unless they say otherwise:
        free_bytes: what is free before the first tensor is made.
        bytes_per_capture: what a captured graph takes of the free memory, for as long as it exists, beside its tensors.
        recipe_bytes: what one recipe takes in the recipe cache on disk.
        compilation_us, operator_us: microseconds that a compilation is said to take, and each operator in it. These put
            a single operator and a model of 32 layers at the 0.2 and 14 s that are reported of Gaudi.
    Counts:
        captures, replays: of `wrap_in_hpu_graph`. bypasses: calls that neither captured nor replayed.
        compilations: recipes compiled. compiled_operators: operators in them.
        cache_hits: recipes found in the cache on disk. launches: recipes run outside of captured graphs.
        compiled_graphs: calls of the `hpu_backend` compiler.
        mark_steps, synchronizations: calls. host_reads: reads of the card's memory that made the host wait.
        executed: operators that ran on the card.
    """

    device_type: str = "synDeviceGaudi3"
    device_count: int = 1
    free_bytes: int = 120 * GIB
    total_bytes: int = 128 * GIB
    bytes_per_capture: int = 0
    recipe_bytes: int = 1 << 20
    compilation_us: int = 200_000
    operator_us: int = 7_000
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
    seeds: list[int] = field(default_factory=list)

    def reset(self) -> None:
        """Back to the figures and counts at import. Recipes that are compiled stay compiled."""
        self.__init__()  # type: ignore[misc]

    def compiling_us(self) -> int:
        """Microseconds that all compilations are said to have taken."""
        return self.compilations * self.compilation_us + self.compiled_operators * self.operator_us

    def free(self) -> int:
        """Free memory, in bytes, after what the card's tensors and captured graphs take."""
        return max(0, self.free_bytes - memory.used())


card = Card()
